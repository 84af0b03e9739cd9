"""Older bodies in today's form: one step a version, so that a reader of version 3 reads 1 by way of 2.

Promises:
- `upcast` takes the body of any version from 1 to the fact's own, and gives what the fact's model validates;
- a recorded stream of the oldest version is among the tests, and reads as today's events.

To raise a fact's version: change the model, raise its `version`, and add the step from the version before here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Body = dict[str, Any]


def _run_started_1(body: Body) -> Body:
    """Version 2 says which decision rules made the run. Those of all version 1 streams were rules 1."""
    return {**body, "rules": 1}


def _run_started_2(body: Body) -> Body:
    """Version 3 may begin with another run's groups."""
    return body


def _run_started_3(body: Body) -> Body:
    """Version 4 may order micro-batches otherwise; before, a rank's came by descending cost."""
    match body:
        case {"config": {"batch": {} as batch} as config}:
            return {**body, "config": {**config, "batch": {"order": "descending", **batch}}}
        case _:
            return body


def _sequence_failed_1(body: Body) -> Body:
    """Version 2 may keep tokens; those of version 1 were dropped."""
    return body


def _sequence_verified_1(body: Body) -> Body:
    """Version 2 may say what the trial took and left behind."""
    return body


def _sequence_failed_2(body: Body) -> Body:
    """Version 3 may flag rows of its contexts."""
    return body


def _sequence_failed_3(body: Body) -> Body:
    """Version 4 may have images, spans that are left to the payload, and checksums of small parts."""
    return body


def _sequence_finished_2(body: Body) -> Body:
    """Version 3 may have images, spans that are left to the payload, and checksums of small parts."""
    return body


def _sequence_finished_1(body: Body) -> Body:
    """Version 2 may flag rows of its contexts."""
    return body


def _sequence_scored_1(body: Body) -> Body:
    """Version 2 may say why there are no scores."""
    return body


def _sample_graded_1(body: Body) -> Body:
    """Version 2 may have qualities and hacks, and come late."""
    return body


def _sample_rejected_1(body: Body) -> Body:
    """Version 2 knows duplicates."""
    return body


def _sample_shaped_1(body: Body) -> Body:
    """Version 2 may have sidecars, and come anew."""
    return body


def _batch_yielded_1(body: Body) -> Body:
    """Version 2 may say the factors of penalties."""
    return body


UPCASTERS: dict[tuple[str, int], Callable[[Body], Body]] = {
    ("run.started", 1): _run_started_1,
    ("run.started", 2): _run_started_2,
    ("run.started", 3): _run_started_3,
    ("sequence.failed", 1): _sequence_failed_1,
    ("sequence.failed", 2): _sequence_failed_2,
    ("sequence.failed", 3): _sequence_failed_3,
    ("sequence.finished", 1): _sequence_finished_1,
    ("sequence.finished", 2): _sequence_finished_2,
    ("sequence.scored", 1): _sequence_scored_1,
    ("sample.graded", 1): _sample_graded_1,
    ("sample.rejected", 1): _sample_rejected_1,
    ("sample.shaped", 1): _sample_shaped_1,
    ("batch.yielded", 1): _batch_yielded_1,
    ("sequence.verified", 1): _sequence_verified_1,
}
"""From (type, version) to the body of version + 1."""


def upcast(type_: str, version: int, newest: int, body: Body) -> Body:
    """The body of `version` as one of `newest`; raises KeyError when a step is missing, which is a bug of ours."""
    for step in range(version, newest):
        body = UPCASTERS[type_, step](body)
    return body
