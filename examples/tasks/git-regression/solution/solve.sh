#!/bin/bash
set -e
sed -i -e 's|return grams // STEP_GRAMS|return -(-grams // STEP_GRAMS)|' -e 's|< HEAVIEST_GRAMS|<= HEAVIEST_GRAMS|' \
    -e 's|STEP_PRICE \* steps(grams)|STEP_PRICE * (steps(grams) - 1)|' -e 's|min(150|max(150|' /app/charges.py
