"""Whose decisions can be made again: the cores, and the facts that each decides. What the hook service made of an accepted
group is an input: it comes of columns in the store, and of other people's code.

`yield` is the sampler's core, of which only what a batch is and what it leaves behind is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.batch.mixer import MixerCore
from pipeline.batch.sampler import SamplerCore
from pipeline.decision import Core
from schemas.facts import (
    BatchReplanned,
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
    """A core by name. `decides` says which facts are its decisions, but for what a run inherited; all others are its inputs."""

    name: str
    core: Callable[[str], Core]
    decides: Callable[[Fact], bool]


def _mixed(fact: Fact) -> bool:
    # A cancelled run was ended by a person.
    return isinstance(fact, SequenceDispatched) or (
        isinstance(fact, RunStopped) and fact.reason == "completed"
    )


def _sampled(fact: Fact) -> bool:
    if isinstance(fact, SampleRejected | SampleShaped):
        return fact.by == "sampler"
    return isinstance(fact, SampleCompleted | SampleAccepted | BatchYielded | BatchReplanned)


def _yielded(fact: Fact) -> bool:
    return isinstance(fact, BatchYielded | BatchReplanned) or (
        isinstance(fact, SampleRejected) and fact.reason == "stale" and fact.by == "sampler"
    )


SERVICES: dict[str, Service] = {
    service.name: service
    for service in (
        Service("mixer", MixerCore, _mixed),
        Service("sampler", SamplerCore, _sampled),
        Service("yield", SamplerCore, _yielded),
    )
}
