#!/bin/bash
set -e
python3 - <<'END'
import json
import re
from collections import Counter
from pathlib import Path

line = re.compile(r"^\S+ auth: failed password for (?:invalid user )?\S+ from (\S+) port", re.MULTILINE)
counts = Counter(line.findall(Path("/app/auth.log").read_text()))
Path("/app/failed.json").write_text(json.dumps({ip: n for ip, n in counts.items() if n >= 12}))
END
