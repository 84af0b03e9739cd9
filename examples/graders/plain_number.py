#!/usr/bin/env python3
"""A grader as a program: the answer of a sum is a plain number. Any language will do; this one uses nothing of packtrain.

    [sources.grader]
    kind = "command"
    options = { argv = ["examples/graders/plain_number.py"] }

It runs in a directory with the group (`docs/signal.md` says what is in it), and prints its answer as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path


def judged(said: dict) -> dict:
    answers = [
        turn["text"].strip()
        for context in said["contexts"]
        for turn in context["turns"]
        if turn["role"] == "assistant"
    ]
    last = answers[-1] if answers else ""
    plain = last.removeprefix("-").isdigit()
    return {
        "sequence": said["sequence"],
        "quality": 1.0 if plain else 0.5,
        # A reward for an answer that holds no digit was not earned by an answer.
        "hack": said["reward"] >= 1.0 and not any(c.isdigit() for c in last),
        "reason": f"ends with {last[-80:]!r}",
    }


group = json.loads(Path("group.json").read_text())
transcripts = [json.loads(Path(f"transcripts/{each}.json").read_text()) for each in group["sequences"]]
print(json.dumps({"sequences": [judged(said) for said in transcripts]}))
