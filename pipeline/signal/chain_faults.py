"""What is wrong with the hooks of a source together, each of which is there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.signal.hooks import BadHook, Chain, Member, Signal, chain, teacher_of
from pipeline.signal.shaping import largest_group
from schemas.config import RunConfig, Source
from schemas.payload import COLUMNS

_TOP_K = ("top_ids", "top_logprobs")
"""Columns of a sidecar that only a teacher with top_k writes."""


def chain_faults(config: RunConfig, source: Source) -> Iterator[str]:
    """What is wrong, and the remedy, a line each. Imports the hooks."""
    try:
        hooks = chain(source)
    except BadHook as error:
        yield str(error)
        return
    yield from _columns(config, source, hooks)
    if not source.groups:
        return
    if hooks.pure:
        members = tuple(Member(str(i), generated=i + 1, loss_tokens=i + 1) for i in range(source.group_size))
        rewards = np.arange(1, source.group_size + 1, dtype=np.float64) % 2
        try:
            made = hooks.run(Signal(members, rewards)).made()
        except BadHook as error:
            yield f"no group of group_size {source.group_size} could be shaped: {error}"
            return
        if source.accept.drop_all_zero and not made.any():
            yield (
                f"advantages of a group of group_size {source.group_size} are all zero, so that each would be dropped: raise group_size, or "
                "set accept.drop_all_zero = false"
            )
        return
    most = largest_group(config.run, source, config.agent_loop.max_attempts)
    if source.group_size > most:
        behaviour = source.behaviour
        yield (
            f"group_size {source.group_size} is above {most}: with advantages by token a group is told of in one event of 64 KiB, with "
            f"a header for each member, of up to max_turns {behaviour.max_turns} x max_tokens {behaviour.max_tokens} tokens (max_session_tokens "
            f"{behaviour.max_session_tokens}); lower group_size, or these where they are far above what is sampled"
        )


def _columns(config: RunConfig, source: Source, hooks: Chain) -> Iterator[str]:
    teachers = {teacher.name: teacher for teacher in config.teachers}
    for name in hooks.columns:
        teacher = teacher_of(name)
        if teacher and teacher not in source.teachers:
            yield (
                f"column {name!r} is teacher {teacher!r}'s, and the source's teachers are {list(source.teachers)}: add it to teachers"
            )
        elif teacher and name.rpartition(".")[2] in _TOP_K and not teachers[teacher].top_k:
            yield f"column {name!r} is of a teacher with top_k, and {teacher!r} has top_k 0: give it one"
        elif name == "segments":
            yield f"column 'segments' has no row for each token; by token are {sorted(COLUMNS.keys() - {name})}"
