import json
import sys
from pathlib import Path

EXPECTED = {"10.0.0.3": 24, "10.0.0.4": 18, "10.0.0.5": 18, "10.0.0.6": 26, "10.0.0.7": 23, "10.0.0.8": 13}
found = json.loads(Path("/app/failed.json").read_text())
print(found)
sys.exit(found != EXPECTED)
