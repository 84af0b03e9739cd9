#!/bin/bash
# The reward is written last, by this script: what the agent's programs wrote there before does not count.
if python3 -I /tests/check.py; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
