"""Grades completed groups, group by group, apart from the rollouts.

A source's grader is `none`, which keeps the verifiers' rewards at once, or one of `pipeline.graders`, whose groups
`services.grader.judging` takes to their end. Output that cannot be used falls back to the original rewards, and the event says so; so
does a group that was lost with its graders too often.
"""

from __future__ import annotations

from pipeline.graders.base import NONE, make
from pipeline.log import Delivery, serve_work
from pipeline.signal.grading import Graded, graded_fact, kept_fact
from schemas.facts import SampleCompleted
from services.grader.judging import Judging, Late, Limits
from services.grader.reading import Reader
from services.process import Context

_LIMITS = Limits()


async def serve(ctx: Context, limits: Limits = _LIMITS) -> None:
    """Until it is stopped. Raises UnknownGrader, ValidationError or PolicyMissing for graders that cannot be made."""
    kinds = {source.name: source.grader.kind for source in ctx.config.sources}
    graders = {s.name: make(s.grader.kind, s.grader.options) for s in ctx.config.sources}
    made = {name: grader for name, grader in graders.items() if grader is not None}
    reader = Reader(ctx.config, ctx.log, ctx.store, any(grader.needs for grader in made.values()))
    late = Late(limits.late)
    judging = {
        source.name: Judging(
            source, made[source.name], ctx.log, ctx.store, reader, ctx.measures, limits, late
        )
        for source in ctx.config.sources
        if source.name in made
    }
    work = await ctx.log.work("grader", "sample.completed", ack_wait_s=limits.ack_wait_s)
    ctx.health.ready()

    async def handle(delivery: Delivery) -> None:
        completed = delivery.event.fact
        assert isinstance(completed, SampleCompleted)
        kind = kinds[completed.source]
        if kind == NONE or not completed.sequences:
            kept = graded_fact(kind, completed, Graded(completed.rewards))
            await ctx.log.publish(kept, delivery.event)
        else:
            await judging[completed.source].grade(delivery.event)
        await delivery.ack()

    async def last_word(delivery: Delivery, reason: str) -> None:
        """A plug-in that kills its graders does not hold its group for ever."""
        completed = delivery.event.fact
        assert isinstance(completed, SampleCompleted)
        await ctx.log.publish(kept_fact(kinds[completed.source], completed, reason), delivery.event)

    try:
        await serve_work(work, limits.capacity, handle, ctx.stop, last_word)
    finally:
        for grader in made.values():
            await grader.close()
