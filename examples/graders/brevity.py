"""A grader in Python: of the sequences that passed, the shorter are the better. Deterministic, and needs nothing.

Found where Python finds modules: run packtrain with `PYTHONPATH=examples/graders`, and in the configuration of a source

    [sources.grader]
    kind = "brevity:Brevity"
    options = { floor = 0.2 }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from pipeline.graders.transcripts import Transcript
from pipeline.signal.grading import Answer, Verdict
from schemas.facts import SampleCompleted
from schemas.section import Section


class Options(Section):
    floor: float = Field(default=0.1, gt=0, le=1, description="the lowest quality")


class Brevity:
    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._floor = Options.model_validate(options or {}).floor

    def __call__(self, completed: SampleCompleted, transcripts: Sequence[Transcript]) -> Answer:
        """quality: tokens of the shortest sequence that passed / those of this one; 1 for those that did not pass."""
        lengths = [said.generated for said in transcripts if said.reward >= 1.0]
        shortest = min(lengths, default=1)
        verdicts: list[Verdict] = []
        for said in transcripts:
            passed = said.reward >= 1.0
            quality = max(self._floor, shortest / max(said.generated, 1)) if passed else 1.0
            reason = (
                f"{said.generated} tokens, the shortest that passed has {shortest}"
                if passed
                else "did not pass"
            )
            verdicts.append(
                Verdict(sequence=said.sequence, quality=min(quality, 1.0), hack=False, reason=reason)
            )
        return Answer(sequences=tuple(verdicts))
