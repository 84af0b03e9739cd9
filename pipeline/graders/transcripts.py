"""What a sequence said, as text: its contexts turn by turn, decoded from its payload with the policy's tokenizer.

Promises:
- nothing is cleaned: a transcript is the model's and its tools' words, and hostile;
- special tokens and what the chat template put around turns are left out; bytes that are not UTF-8 are U+FFFD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.capture.tokenizer import PolicyTokenizer
from schemas.facts import SequenceFinished
from schemas.payload import ROLES

COLUMNS = ("tokens", "segments")
_TEMPLATE = ROLES.index("template")


@dataclass(frozen=True, slots=True)
class Turn:
    """role: one of `schemas.payload.ROLES`, or `omitted` where something was left out. tokens: how many it was."""

    role: str
    text: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """One dialogue branch; `label` says which: main, subagent, compacted, ..."""

    label: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """One sequence of the group. reward: its verifier's. generated: tokens that the policy sampled."""

    sequence: str
    reward: float
    termination: str
    generated: int
    contexts: tuple[Context, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def transcript(
    finished: SequenceFinished, columns: Mapping[str, npt.NDArray[Any]], tokenizer: PolicyTokenizer
) -> Transcript:
    """columns: `tokens` int32 [T] and `segments` int32 [S, 5] of its payload.

    Segments of one turn that follow each other are decoded as one, so that no character is cut. Walks over all tokens: to be
    called on a thread where they are many.
    """
    tokens: npt.NDArray[np.int32] = columns["tokens"]
    turns: dict[int, list[Turn]] = {number: [] for number in range(len(finished.contexts))}
    rows: list[list[int]] = columns["segments"].tolist()
    for (context, role), run in groupby(rows, key=lambda row: (row[4], row[2])):
        if role == _TEMPLATE:
            continue
        ids: list[int] = [token for start, end, *_ in run for token in tokens[start:end].tolist()]
        text = tokenizer.decode(ids, keep_special=False)
        name = ROLES[role] if 0 <= role < len(ROLES) else str(role)
        turns.setdefault(context, []).append(Turn(name, text, len(ids)))
    labels: Sequence[str] = [context.label for context in finished.contexts]
    return Transcript(
        finished.sequence,
        finished.reward,
        finished.termination,
        sum(context.generated for context in finished.contexts),
        tuple(
            Context(labels[number] if number < len(labels) else "unknown", tuple(said))
            for number, said in sorted(turns.items())
        ),
    )
