"""Whose decisions can be made again: the cores, and the facts that each decides.

`yield` is the sampler's core, of which only what a batch is and what it leaves behind is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.batch.mixer import MixerCore
from pipeline.batch.sampler import SamplerCore
from pipeline.decision import Core
from schemas.facts import (
    BatchYielded,
    Fact,
    RunStopped,
    SampleAccepted,
    SampleCompleted,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
)


@dataclass(frozen=True, slots=True)
class Service:
    """A core by name. `decides` says which facts are its decisions; all others are its inputs."""

    name: str
    core: Callable[[str], Core]
    decides: Callable[[Fact], bool]


def _mixed(fact: Fact) -> bool:
    # A cancelled run was ended by a person.
    return isinstance(fact, SequenceDispatched) or (
        isinstance(fact, RunStopped) and fact.reason == "completed"
    )


def _sampled(fact: Fact) -> bool:
    return isinstance(fact, SampleCompleted | SampleAccepted | SampleRejected | SampleShaped | BatchYielded)


def _yielded(fact: Fact) -> bool:
    return isinstance(fact, BatchYielded) or (isinstance(fact, SampleRejected) and fact.reason == "stale")


SERVICES: dict[str, Service] = {
    service.name: service
    for service in (
        Service("mixer", MixerCore, _mixed),
        Service("sampler", SamplerCore, _sampled),
        Service("yield", SamplerCore, _yielded),
    )
}
