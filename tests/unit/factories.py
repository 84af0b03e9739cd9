"""Facts for tests of pure cores: a run's stream as a list, without a broker."""

from __future__ import annotations

from datetime import UTC, datetime

from schemas.config import RunConfig
from schemas.envelope import Event
from schemas.facts import Fact, SequenceFinished
from schemas.payload import ContextMeta, PayloadHeader, Span


def config(**changes: object) -> RunConfig:
    """Two training sources of 2 groups x 2 sequences, 3 steps, unless changed."""
    source = {"pool": "p", "groups": 2, "group_size": 2, "environment": {"kind": "arithmetic"}}
    whole = {
        "run": "r",
        "steps": 3,
        "pools": [{"name": "p", "harness": "chat"}],
        "sources": [{"name": "math", **source}, {"name": "code", **source}],
        **changes,
    }
    return RunConfig.model_validate(whole)


def event(fact: Fact, seq: int) -> Event:
    return Event(fact=fact, id=f"e{seq}", time=datetime(2026, 1, 1, tzinfo=UTC), producer="test", seq=seq)


def finished(
    sequence: str, reward: float, *, tokens: int = 10, generated: int = 4, version: int = 0, contexts: int = 1
) -> SequenceFinished:
    sample = sequence.rpartition("-")[0]
    return SequenceFinished(
        source=sample.rpartition("-")[0],
        sample=sample,
        sequence=sequence,
        attempt=1,
        reward=reward,
        termination="completed",
        turns=1,
        contexts=tuple(
            ContextMeta(
                offset=i * tokens,
                tokens=tokens,
                generated=generated,
                loss_spans=(Span(start=tokens - generated, end=tokens),) if generated else (),
                min_version=version,
                max_version=version,
            )
            for i in range(contexts)
        ),
        payload=PayloadHeader(key=f"runs/r/payloads/{sequence}", bytes=1, columns=()),
    )
