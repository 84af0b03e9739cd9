import json
import subprocess
import sys

# In a process of its own: it is the agent's code.
PROGRAM = """
import json, sys
sys.path.insert(0, "/app")
from charges import charge
def charged(case):
    try:
        return charge(*case)
    except ValueError:
        return "refused"
print(json.dumps([charged(case) for case in json.loads(sys.argv[1])]))
"""
CASES = {
    (1, "home"): 390,
    (500, "home"): 390,
    (501, "home"): 475,
    (1000, "near"): 825,
    (20_000, "far"): 4795,
    (20_001, "far"): "refused",
    (0, "home"): "refused",
    (400, "home", True): 540,
    (9_999, "near", True): 2590,
}
done = subprocess.run(
    [sys.executable, "-I", "-c", PROGRAM, json.dumps(list(CASES))], capture_output=True, text=True, timeout=20
)
print(done.stdout, done.stderr)
sys.exit(done.returncode != 0 or json.loads(done.stdout) != list(CASES.values()))
