#!/bin/bash
set -e
python3 - <<'END'
import json
from pathlib import Path

for path in sorted(Path("/app/people").glob("*.json")):
    document = json.loads(path.read_text())
    if document["version"] != 1:
        continue
    words = document["name"].split()
    found = [{"kind": kind, "value": document.pop(kind, None)} for kind in ("mail", "phone")]
    document["version"] = 2
    document["name"] = {"first": words[0], "last": " ".join(words[1:])}
    document["contacts"] = [entry for entry in found if entry["value"] is not None]
    document["tags"] = [tag.strip() for tag in document["tags"].split(",") if tag.strip()]
    path.write_text(json.dumps(document, indent=2) + "\n")
END
