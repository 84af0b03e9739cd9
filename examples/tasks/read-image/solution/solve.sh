#!/bin/bash
set -e
python3 /solution/read.py /app/sign.png > /app/answer.txt
