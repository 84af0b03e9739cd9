import csv
import sys
from pathlib import Path

EXPECTED = [
    ["month", "region", "total"],
    ["2026-01", "North", "44.00"],
    ["2026-01", "South, coast", "5.25"],
    ["2026-01", 'The "Old" Town', "2.25"],
    ["2026-02", "North", "0.30"],
    ["2026-02", "South, coast", "31.50"],
    ["2026-02", 'The "Old" Town', "9.00"],
    ["2026-03", "East", "0.00"],
]
with Path("/app/report.csv").open(newline="") as file:
    found = list(csv.reader(file))
skipped = Path("/app/skipped.txt").read_text().strip()
print(found, skipped)
sys.exit(found != EXPECTED or skipped != "3")
