"""A whole random run with its objects, as a log and a store have it: for tests of what is removed from the store."""

from __future__ import annotations

import hashlib
from typing import Any

from pipeline.retention.names import named
from schemas.envelope import Event
from schemas.facts import (
    Artefact,
    Fact,
    PolicyPublished,
    SampleGraded,
    SequenceFailed,
    SequenceFinished,
    SequenceOpened,
    SequenceScored,
    SequenceVerified,
    StepTrained,
)
from schemas.keys import artefact_key, grading_key, optimizer_key, payload_key, weights_key
from schemas.names import attempt_id
from schemas.payload import ImageItem, PayloadHeader, Ref
from tests.unit.signal_world import SignalWorld


def ref(key: str) -> Ref:
    return Ref(key=key, bytes=1, crc32c=1)


def image(number: int) -> ImageItem:
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return ImageItem(digest=digest, bytes=9, height=28, width=28, patches=4, start=0, end=1)


def real(fact: Any) -> Any:
    """The fact with keys as services make them."""
    match fact:
        case SequenceFinished():
            key = payload_key("r", fact.source, attempt_id(fact.sequence, fact.attempt))
            return fact.model_copy(update={"payload": fact.payload.model_copy(update={"key": key})})
        case StepTrained(step=step):
            keys = {
                "weights": ref(weights_key("r", step, "n")),
                "optimizer": ref(optimizer_key("r", step, "n")),
            }
            return fact.model_copy(update=keys)
        case PolicyPublished(step=step):
            return fact.model_copy(update={"weights": ref(weights_key("r", step, "n"))})
        case SampleGraded():
            return fact.model_copy(update={"report": ref(grading_key("r", fact.source, fact.sample))})
        case _:
            return fact


class Stored(SignalWorld):
    """With attempts that come to nothing, artefacts, reports and images. `written`: every object, and the message by which it
    is known."""

    def __init__(self, *given: Any) -> None:
        self.written: dict[str, int] = {}
        super().__init__(*given)

    def publish(self, fact: Fact, cause: Event | None = None) -> None:
        if isinstance(fact, SequenceFinished | SequenceFailed):
            fact = self._attempts(fact)
        fact = real(fact)
        before = len(self.log)
        super().publish(fact, cause)
        if len(self.log) > before:
            for key in named("r", self.log[-1].fact):
                self.written.setdefault(key, len(self.log))

    def _attempts(self, fact: Any) -> Any:
        """Some are opened, leave artefacts and payloads, and only one ends the sequence; others open after that."""
        last = self.random.randint(1, 3)
        for attempt in range(1, last + 1):
            self._opened(fact, attempt)
        if self.random.random() < 0.2:
            self.work.append(
                SequenceScored(
                    source=fact.source,
                    sample=fact.sample,
                    sequence=fact.sequence,
                    teacher=f"late{last}",
                    tokens=0,
                    scores=None,
                    failure="an attempt opens late",
                )
            )
        if isinstance(fact, SequenceFailed):
            key = payload_key("r", fact.source, attempt_id(fact.sequence, last))
            return fact.model_copy(
                update={"attempts": last, "payload": PayloadHeader(key=key, bytes=1, columns=())}
            )
        shown = (image(self.random.randint(0, 9)),)
        contexts = tuple(context.model_copy(update={"images": shown}) for context in fact.contexts)
        return fact.model_copy(update={"attempt": self.random.randint(1, last), "contexts": contexts})

    def do(self, fact: Fact) -> None:
        if isinstance(fact, SequenceScored) and fact.teacher.startswith("late"):
            self._opened(fact, 9)
        else:
            super().do(fact)

    def _opened(self, fact: Any, attempt: int) -> None:
        whose = {"source": fact.source, "sample": fact.sample, "sequence": fact.sequence, "attempt": attempt}
        self.publish(
            SequenceOpened(
                **whose, pool="p", task_index=0, host="h", base_url="http://h", session="s", budget_s=1
            )
        )
        key = artefact_key("r", attempt_id(fact.sequence, attempt), "log")
        self.publish(
            SequenceVerified(**whose, host="h", reward=1.0, artefacts=(Artefact(name="log", ref=ref(key)),))
        )
        self.written.setdefault(
            payload_key("r", fact.source, attempt_id(fact.sequence, attempt)), len(self.log)
        )
