"""The loop that serves a work consumer: facts in, handlers out.

Promises:
- it pulls only into free slots, one fact at a time, and of the readers that wait the broker gives to the one with the smaller
  part of its slots taken first, to a tenth (`pipeline.log.pull`);
- it keeps the fact its own while the handler lives. Stopped, it takes no more, and hands back what has not ended within
  `drain_s`, or when it shall hurry; a fact that is delivered again meanwhile, as the broker was away and did not hear that it
  is kept, is not handled a second time beside the first;
- each log line of a handler, its tasks and its threads carries the ids of its fact (`pipeline.hosts.tenant`);
- a handler that raises, whatever it raises, costs its own delivery (which is retried, with growing delay), never another's;
- a fact costs at most `max_deliver` handlers, whatever it does to them: then it is a dead letter
  (`pipeline.log.dead_letters`), and comes back when a person retries it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable

from nats.errors import Error as NatsError

from pipeline.hosts import tenant
from pipeline.log.dead_letters import REASON, printable
from pipeline.log.patience import LogError
from pipeline.log.pull import LOWEST
from pipeline.log.tasks import end_tasks
from pipeline.log.tracing import handling
from pipeline.log.work import Delivery, Work

_LOG = logging.getLogger("packtrain.work")
_RETRY_S = 0.3
_BACKOFF_S = (0.5, 1.0, 2.0, 5.0)

LastWord = Callable[[Delivery, str], Awaitable[None]]
"""What a service says of a fact before it becomes a dead letter, for that reason: idempotent, for it may be said twice."""


async def serve_work(
    work: Work,
    capacity: int,
    handler: Callable[[Delivery], Awaitable[None]],
    stop: asyncio.Event,
    bury: LastWord | None = None,
    *,
    drain_s: float = 0.0,
    hurry: asyncio.Event | None = None,
) -> None:
    """Handles deliveries, at most `capacity` at once, until `stop` is set; see the module's promises.

    drain_s: seconds that handlers then have to end in, unless `hurry` is set. `bury` is told of each fact that is about to become a dead letter, so that whoever waits for its result gets one.
    """
    running: set[asyncio.Task[None]] = set()
    in_hand: dict[int, Delivery] = {}

    def ended(task: asyncio.Task[None], delivery: Delivery) -> None:
        running.discard(task)
        if in_hand.get(delivery.seq) is delivery:
            del in_hand[delivery.seq]

    stopped = asyncio.create_task(stop.wait())
    stopped.add_done_callback(lambda _: work.end())
    try:
        while not stop.is_set():
            free = capacity - len(running)
            if free <= 0:
                await asyncio.wait([*running, stopped], return_when=asyncio.FIRST_COMPLETED)
                continue
            try:
                # One at a time: what more was asked for at this load would come at another.
                deliveries = await work.fetch(1, priority=_priority(len(running), capacity))
            except (NatsError, OSError) as error:
                _LOG.info("work %s waits for the broker: %s", work.name, error or type(error).__name__)
                await asyncio.sleep(_RETRY_S)
                continue
            for delivery in deliveries:
                held = in_hand.get(delivery.seq)
                if held is not None and not held.settled:
                    held.renew(delivery)
                    continue
                if stop.is_set():
                    # It came with the stop. A task that is cancelled before it began could not hand it back.
                    await _hand_back(delivery, 0.0)
                    continue
                in_hand[delivery.seq] = delivery
                task = asyncio.create_task(_handle(work, delivery, handler, bury))
                running.add(task)
                task.add_done_callback(functools.partial(ended, delivery=delivery))
        await work.close()
        if running and drain_s > 0:
            await _drained(running, drain_s, hurry)
    finally:
        await end_tasks([stopped, *running])
        await work.close()


def _priority(running: int, capacity: int) -> int:
    """0 for the emptiest tenth of slots to 9 for the fullest."""
    return min(LOWEST, (LOWEST + 1) * running // capacity)


async def _drained(running: set[asyncio.Task[None]], drain_s: float, hurry: asyncio.Event | None) -> None:
    """Until all have ended, the time is over, or it is time to hurry."""
    _LOG.info("%d under way may end within %.0f s", len(running), drain_s)
    hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
    ended = asyncio.create_task(asyncio.wait(running))
    try:
        await asyncio.wait({hurried, ended}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks([hurried, ended])


async def _handle(
    work: Work,
    delivery: Delivery,
    handler: Callable[[Delivery], Awaitable[None]],
    last_word: LastWord | None,
) -> None:
    tenant.work_on(delivery.event.fact)
    alive = asyncio.create_task(_keep(delivery, work.ack_wait_s / 3))
    try:
        if delivery.attempt > work.max_deliver:
            reason = f"delivered {delivery.attempt - 1} times, no reader answered"
            await _bury(work, delivery, reason, last_word)
        else:
            with handling(delivery.event, work.name):
                await handler(delivery)
            if not delivery.settled:
                raise RuntimeError(
                    f"handler of work {work.name!r} neither acknowledged nor retried {delivery.event.fact.id()}"
                )
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            await _hand_back(delivery, 0.0)
            raise
        # Nobody cancelled it: it is the handler's own.
        await _failed(work, delivery, error, last_word)
    except BaseException as error:
        # Also SystemExit, which would end the loop: handlers run other people's code.
        await _failed(work, delivery, error, last_word)
    finally:
        alive.cancel()


async def _failed(work: Work, delivery: Delivery, error: BaseException, last_word: LastWord | None) -> None:
    if delivery.attempt == work.max_deliver and not delivery.settled:
        _LOG.error(
            "work %s: %s failed for the last time", work.name, delivery.event.fact.id(), exc_info=error
        )
        try:
            await _bury(work, delivery, f"{type(error).__name__}: {error}", last_word)
            return
        except (LogError, NatsError, OSError) as unburied:
            error = unburied
    delay = _BACKOFF_S[min(delivery.attempt, len(_BACKOFF_S)) - 1]
    _LOG.error(
        "work %s: %s failed, retried in %.1f s", work.name, delivery.event.fact.id(), delay, exc_info=error
    )
    await _hand_back(delivery, delay)


async def _bury(work: Work, delivery: Delivery, reason: str, last_word: LastWord | None) -> None:
    # What a plug-in raises may hold anything; whoever gets the reason from here gets a line of text.
    reason = printable(reason, REASON)
    if last_word is not None:
        try:
            await last_word(delivery, reason)
        except Exception as error:
            # The letter is written all the same: without it nobody would know of either.
            _LOG.exception("work %s: the last word on %s failed", work.name, delivery.event.fact.id())
            reason = f"{reason}; and the service's last word failed: {type(error).__name__}: {error}"
    await delivery.bury(reason)


async def _hand_back(delivery: Delivery, delay_s: float) -> None:
    # Without a connection the fact comes back by its ack_wait all the same.
    if not delivery.settled:
        with contextlib.suppress(NatsError, OSError):
            await delivery.retry(delay_s)


async def _keep(delivery: Delivery, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        with contextlib.suppress(NatsError, OSError):
            await delivery.progress()
