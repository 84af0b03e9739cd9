import json
import subprocess
import sys

CASES = [[3, 1, 2], [4, 1, 3, 2], [7], [5, 5], [9, -4, 0, 2, 11], [2, 1], [10, 8, 6, 4, 2, 0]]
EXPECTED = [2, 2.5, 7, 5, 2, 1.5, 5]
# In a process of its own: it is the agent's code.
PROGRAM = """
import json, sys
sys.path.insert(0, "/app")
from median import median
cases = json.loads(sys.argv[1])
found = [median(list(case)) for case in cases]
kept = [3, 1, 2]
median(kept)
try:
    median([])
except ValueError:
    print(json.dumps([found, kept]))
"""
done = subprocess.run(
    [sys.executable, "-I", "-c", PROGRAM, json.dumps(CASES)], capture_output=True, text=True, timeout=20
)
print(done.stdout, done.stderr)
sys.exit(done.returncode != 0 or json.loads(done.stdout) != [EXPECTED, [3, 1, 2]])
