"""The benchmark runs, quickly, and says what it measured in the form that is compared from change to change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_quick_data_path_benchmark_gives_its_figures_within_its_time() -> None:
    command = [sys.executable, str(ROOT / "bench" / "porter.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=ROOT, check=True)
    figures = json.loads(done.stdout)
    assert len({row["name"] for row in figures}) == len(figures) >= 9
    for row in figures:
        assert set(row) == {"name", "value", "unit", "goal", "better", "against"}
        assert row["better"] in ("higher", "lower")
        assert row["value"] > 0
        assert row["against"] > 0
