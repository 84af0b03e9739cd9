#!/bin/bash
set -e
python3 - <<'END'
from pathlib import Path

path = Path("/app/median.py")
text = path.read_text()
text = text.replace("    middle = len(values) // 2", "    values = sorted(values)\n    middle = len(values) // 2")
path.write_text(text.replace("values[middle] + values[middle + 1]", "values[middle - 1] + values[middle]"))
END
python3 -m unittest
