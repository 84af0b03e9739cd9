"""The figures of a benchmark as a table, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Figure = dict[str, Any]
"""name, value, unit, goal (0: none, it is told only), better (higher or lower), against."""


def missed(row: Figure) -> bool:
    """Whether the figure has a goal and does not reach it."""
    if not row["goal"]:
        return False
    return row["value"] < row["goal"] if row["better"] == "higher" else row["value"] > row["goal"]


def table(figures: list[Figure], width: int, digits: int) -> str:
    """`width`: characters of a name; `digits` after the point."""
    lines = [f"{'figure':<{width}} {'value':>12} {'unit':<10} {'goal':>12} {'against':>12} {'ratio':>8}"]
    for row in figures:
        goal = f"{row['goal']:,.{digits}f}" if row["goal"] else "-"
        ratio = row["value"] / row["against"]
        lines.append(
            f"{row['name']:<{width}} {row['value']:>12,.{digits}f} {row['unit']:<10} {goal:>12} "
            f"{row['against']:>12,.{digits}f} {ratio:>8.3f}" + (" MISSED" if missed(row) else "")
        )
    return "\n".join(lines)


def tell(figures: list[Figure], file: Path | None, width: int, digits: int) -> None:
    """Prints the table, and writes the list to the file where one is given."""
    print(table(figures, width, digits))
    if file:
        file.write_text(json.dumps(figures, indent=1) + "\n")
