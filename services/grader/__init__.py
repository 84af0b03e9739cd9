"""Grades completed groups, group by group, apart from the rollouts.

A grader is `none`, which keeps the verifiers' rewards, or `module:function` from a group's `sample.completed` to its
rewards. Output that cannot be used falls back to the original rewards, and the event says so; so does a group that was
lost with its graders too often.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Callable, Sequence
from typing import cast

from pydantic import ValidationError

from pipeline.log import Delivery, serve_work
from schemas.facts import MAX_REWARD, SampleCompleted, SampleGraded
from services.process import Context

Grader = Callable[[SampleCompleted], Sequence[float]]
_TENANTS = 64
_ACK_WAIT_S = 10.0


def keep(completed: SampleCompleted) -> Sequence[float]:
    """The grader `none`."""
    return completed.rewards


def resolve(name: str) -> Grader:
    """The grader of that name; raises ValueError or TypeError that names it and the remedy."""
    if name == "none":
        return keep
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"grader {name!r} cannot be imported: {error}; give none, or module:function"
        ) from error
    if not callable(found):
        raise TypeError(f"grader {name!r} is not callable; give none, or module:function")
    return cast("Grader", found)


def grade(name: str, grader: Grader, completed: SampleCompleted) -> SampleGraded:
    """The group's graded rewards, or its original ones with the reason."""
    try:
        rewards = [float(reward) for reward in grader(completed)]
    # A plug-in may raise anything; the reason goes into the event.
    except (Exception, SystemExit) as error:
        return ungraded(name, completed, f"{type(error).__name__}: {error}")
    if len(rewards) != len(completed.rewards):
        said = f"gave {len(rewards)} rewards for {len(completed.rewards)} sequences"
        return ungraded(name, completed, said)
    try:
        return _graded(name, completed, rewards)
    except ValidationError:
        said = f"gave rewards that are not finite numbers of at most {MAX_REWARD:g}: {rewards}"
        return ungraded(name, completed, said)


def ungraded(name: str, completed: SampleCompleted, reason: str) -> SampleGraded:
    """The group with its original rewards, and why."""
    # What a plug-in raises may hold half a surrogate pair, which no JSON holds.
    return _graded(name, completed, completed.rewards, reason[:500].encode(errors="replace").decode())


def _graded(
    name: str, completed: SampleCompleted, rewards: Sequence[float], fallback: str | None = None
) -> SampleGraded:
    return SampleGraded(
        source=completed.source,
        sample=completed.sample,
        grader=re.sub(r"[^A-Za-z0-9_-]", "-", name)[:128],
        rewards=tuple(rewards),
        fallback=fallback,
    )


async def serve(ctx: Context) -> None:
    graders = {source.name: (source.grader.kind, resolve(source.grader.kind)) for source in ctx.config.sources}
    work = await ctx.log.work("grader", "sample.completed", ack_wait_s=_ACK_WAIT_S)

    async def handle(delivery: Delivery) -> None:
        completed = delivery.event.fact
        assert isinstance(completed, SampleCompleted)
        name, grader = graders[completed.source]
        graded = (
            grade(name, grader, completed)
            if name == "none"
            else await asyncio.to_thread(grade, name, grader, completed)
        )
        await ctx.log.publish(graded, delivery.event)
        await delivery.ack()

    async def last_word(delivery: Delivery, reason: str) -> None:
        """A plug-in that kills its graders does not hold its group for ever."""
        completed = delivery.event.fact
        assert isinstance(completed, SampleCompleted)
        name, _ = graders[completed.source]
        await ctx.log.publish(ungraded(name, completed, reason), delivery.event)

    await serve_work(work, _TENANTS, handle, ctx.stop, last_word)
