#!/bin/bash
set -e
python3 - <<'END'
import csv
from collections import defaultdict
from decimal import Decimal, InvalidOperation

totals, skipped = defaultdict(Decimal), 0
with open("/app/sales.csv", newline="") as file:
    for row in csv.DictReader(file):
        try:
            amount = Decimal(row["amount"])
        except InvalidOperation:
            skipped += 1
        else:
            totals[row["date"][:7], row["region"]] += amount
with open("/app/report.csv", "w", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["month", "region", "total"])
    writer.writerows([month, region, f"{total:.2f}"] for (month, region), total in sorted(totals.items()))
with open("/app/skipped.txt", "w") as file:
    print(skipped, file=file)
END
