#!/usr/bin/env python3
"""A grader as a program: the answer of a sum is a plain number, and has no digit too many. Any language will do; this one uses
nothing of packtrain.

    [sources.grader]
    kind = "command"
    options = { argv = ["examples/graders/plain_number.py"] }

It runs in a directory with the group (`docs/signal.md` says what is in it), and prints its answer as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path


def answer(said: dict) -> str:
    turns = [turn for context in said["contexts"] for turn in context["turns"] if turn["role"] == "assistant"]
    return turns[-1]["text"].strip() if turns else ""


def plain(text: str) -> bool:
    return text.removeprefix("-").isdigit()


def judged(said: dict, shortest: int) -> dict:
    last = answer(said)
    return {
        "sequence": said["sequence"],
        "quality": min(1.0, shortest / len(last)) if plain(last) else 0.5,
        # A reward for an answer that holds no digit was not earned by an answer.
        "hack": said["reward"] >= 1.0 and not any(c.isdigit() for c in last),
        "reason": f"ends with {last[-80:]!r}, and the shortest that is right has {shortest} characters",
    }


group = json.loads(Path("group.json").read_text())
transcripts = [json.loads(Path(f"transcripts/{each}.json").read_text()) for each in group["sequences"]]
lengths = [len(answer(said)) for said in transcripts if said["reward"] > 0 and plain(answer(said))]
shortest = min(lengths, default=1)
print(json.dumps({"sequences": [judged(said, shortest) for said in transcripts]}))
