"""The grader of source `arithmetic`: the shorter a right answer, the better. It runs in a directory that has the group's files."""

import json
from pathlib import Path

group = json.loads(Path("group.json").read_text())
said = [json.loads(Path(f"transcripts/{each}.json").read_text()) for each in group["sequences"]]
texts = [
    [
        turn["text"].strip()
        for context in one["contexts"]
        for turn in context["turns"]
        if turn["role"] == "assistant"
    ]
    for one in said
]
print(
    json.dumps(
        {
            "sequences": [
                {
                    "sequence": one["sequence"],
                    "hack": False,
                    "quality": 1.0 / max(1, len(text[-1]) if text else 1),
                    "reason": f"the answer has {len(text[-1]) if text else 0} characters",
                }
                for one, text in zip(said, texts, strict=True)
            ]
        }
    )
)
