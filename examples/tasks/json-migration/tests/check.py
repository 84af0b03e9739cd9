import json
import sys
from pathlib import Path

EXPECTED = {
    "1": {
        "version": 2,
        "name": {"first": "Ada", "last": "Lovelace"},
        "contacts": [{"kind": "mail", "value": "ada@example.org"}],
        "tags": ["math", "engines"],
    },
    "2": {"version": 2, "name": {"first": "Bob", "last": ""}, "contacts": [], "tags": []},
    "4": {
        "version": 2,
        "name": {"first": "Jean", "last": "Luc Picard"},
        "contacts": [{"kind": "mail", "value": "jl@example.org"}, {"kind": "phone", "value": "+33 1 23"}],
        "tags": ["tea", "earl grey"],
    },
    "5": {
        "version": 2,
        "name": {"first": "Grace", "last": "Hopper"},
        "contacts": [{"kind": "mail", "value": "g@example.org"}],
        "tags": ["navy"],
        "rank": {"code": 7},
    },
}
KEPT = '{"version": 2, "name": {"first": "Eve", "last": ""}, "contacts": [], "tags": ["keys"]}\n'
people = Path("/app/people")
for name, expected in EXPECTED.items():
    found = json.loads((people / f"{name}.json").read_text())
    if found != expected:
        sys.exit(f"{name}.json is {found}, and {expected} is right")
sys.exit((people / "3.json").read_text() != KEPT)
