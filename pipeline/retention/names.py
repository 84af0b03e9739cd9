"""Which keys are whose, and which keys a fact names.

Promises:
- an object belongs to one sequence, sample, step or image of one run, and its key alone says to which: what a fact names that
  is not its own is never removed for its sake;
- `named` gives every key of an object that a fact names, of whatever run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from pydantic import BaseModel

from schemas.facts import Fact, SequenceQuarantined
from schemas.keys import image_key, run_prefix
from schemas.payload import ImageItem, PayloadHeader, Ref, Span

_NAME = r"[A-Za-z0-9_-]+"
_FORMS = {
    form: re.compile(pattern)
    for form, pattern in {
        "payload": rf"(?:payloads|inherited)/(?P<source>{_NAME})/(?P<sequence>{_NAME})-a(?P<attempt>[0-9]+)\.[A-Za-z0-9_.-]+",
        "artefact": rf"artefacts/(?P<sequence>{_NAME})-a(?P<attempt>[0-9]+)/{_NAME}",
        "grading": rf"grading/(?P<source>{_NAME})/(?P<sample>{_NAME})\.json",
        "plan": rf"plans/(?P<step>[0-9]+)-{_NAME}\.json",
        "weights": rf"weights/(?P<step>[0-9]+)-{_NAME}\.safetensors",
        "optimizer": rf"optimizer/(?P<step>[0-9]+)-{_NAME}\.safetensors",
        "image": r"images/(?P<digest>[0-9a-f]{64})",
    }.items()
}


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose an object is. form: payload (or a sidecar of one), artefact, grading, plan, weights, optimizer or image; the fields
    that its key does not say are empty, or 0."""

    form: str
    sample: str = ""
    sequence: str = ""
    attempt: int = 0
    step: int = 0


def owner(run: str, key: str) -> Owner | None:
    """Whose the object of that key is; None for one of another run, or of no form that a run's objects have."""
    prefix = f"{run_prefix(run)}/"
    if not key.startswith(prefix):
        return None
    for form, pattern in _FORMS.items():
        if (found := pattern.fullmatch(key, len(prefix))) is not None:
            has = found.groupdict()
            sequence = has.get("sequence", "")
            return Owner(
                form,
                has.get("sample") or sequence.rpartition("-")[0],
                sequence,
                int(has.get("attempt", 0)),
                int(has.get("step", 0)),
            )
    return None


def named(run: str, fact: Fact) -> Iterator[str]:
    """Keys of the objects that the fact names, some maybe twice; `run`: whose fact it is."""
    if isinstance(fact, SequenceQuarantined):
        yield fact.key
    yield from _within(run, fact)


def _within(run: str, value: object) -> Iterator[str]:
    match value:
        case Ref() | PayloadHeader():
            yield value.key
        case ImageItem(digest=digest):
            yield image_key(run, digest)
        case BaseModel():
            for each in vars(value).values():
                yield from _within(run, each)
        case tuple():
            items = cast("tuple[object, ...]", value)
            # Of spans there may be thousands, and they name nothing.
            for each in () if items and isinstance(items[0], Span) else items:
                yield from _within(run, each)
        case _:
            pass
