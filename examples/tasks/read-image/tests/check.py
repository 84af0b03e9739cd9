import sys
from pathlib import Path

found = Path("/app/answer.txt").read_text().strip()
print(found)
sys.exit(found != "70416")
