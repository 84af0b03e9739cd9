"""Writes the table of `docs/scaffolds.md` from the rows that `test_harbor_solves` left: `python -m tests.scaffolds.table ROWS`.

The last row of each scaffold counts. A scaffold without one, or without a reward of 1.0, is an error, and nothing is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.scaffolds.install import SCAFFOLDS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/scaffolds.md"
BEGIN, END = "<!-- table: begin, by make scaffolds-table -->\n", "<!-- table: end -->"
_HEAD = (
    "| scaffold | version | protocol | reward | requests | contexts | tokens | generated | seconds | memory |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; raises ValueError that names what is missing."""
    last = {row["scaffold"]: row for row in rows}
    wrong = [name for name in SCAFFOLDS if last.get(name, {}).get("reward") != 1.0]
    if wrong:
        raise ValueError(f"no run to reward 1.0 of {', '.join(wrong)}")
    lines = [
        "| {scaffold} | {version} | {wire} | {reward} | {requests} | {contexts} | {tokens:,} | {generated:,} | {seconds} | {mb:.0f} MB |\n".format(
            mb=last[name]["memory"] / 1e6, **last[name]
        )
        for name in SCAFFOLDS
    ]
    return _HEAD + "".join(lines)


def written(document: str, made: str) -> str:
    """The document with the table between its marks. Raises ValueError when it has none."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT} has no place between {BEGIN.strip()} and {END}")
    return f"{before}{BEGIN}{made}{END}{after}"


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    DOCUMENT.write_text(written(DOCUMENT.read_text(), table([row for row in rows if "scaffold" in row])))
    print(f"{DOCUMENT}: written")


if __name__ == "__main__":
    main()
