"""Grades completed groups, group by group, apart from the rollouts.

A grader is `none`, which keeps the verifiers' rewards, or `module:function` from a group's `sample.completed` to its
rewards. Output that cannot be used falls back to the original rewards, and the event says so.
"""

from __future__ import annotations

import asyncio
import importlib
import math
from collections.abc import Callable, Sequence
from typing import cast

from pipeline.log import Delivery, serve_work
from schemas.facts import SampleCompleted, SampleGraded
from services.process import Context

Grader = Callable[[SampleCompleted], Sequence[float]]
_TENANTS = 64
_ACK_WAIT_S = 10.0


def keep(completed: SampleCompleted) -> Sequence[float]:
    """The grader `none`."""
    return completed.rewards


def resolve(name: str) -> Grader:
    """The grader of that name; raises ValueError that names it and the remedy."""
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
    fallback, rewards = None, completed.rewards
    try:
        rewards = tuple(float(reward) for reward in grader(completed))
    # A plug-in may raise anything; the reason goes into the event.
    except Exception as error:
        fallback = f"{type(error).__name__}: {error}"
    else:
        if len(rewards) != len(completed.rewards):
            fallback = f"gave {len(rewards)} rewards for {len(completed.rewards)} sequences"
        elif not all(math.isfinite(reward) for reward in rewards):
            fallback = f"gave rewards that are not finite: {rewards}"
    return SampleGraded(
        source=completed.source,
        sample=completed.sample,
        grader=name.replace(":", "-").replace(".", "-")[:128],
        rewards=completed.rewards if fallback else rewards,
        fallback=fallback[:500] if fallback else None,
    )


async def serve(ctx: Context) -> None:
    graders = {source.name: (source.grader, resolve(source.grader)) for source in ctx.config.sources}
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

    await serve_work(work, _TENANTS, handle, ctx.stop)
