"""Rates of the log against nats-py alone, on the same server in the same minutes: publish, work, and what `always` costs."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from log_server import Figure, Server, aclosing, figure, rates
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from pipeline.log import Delivery, Log, serve_work
from schemas.envelope import EXPECTED_LAST, encode, new_event
from schemas.facts import SequenceDispatched

IN_FLIGHT = 256
BURST = 100
_FETCH = 256
_T = TypeVar("_T")


def facts() -> Iterator[SequenceDispatched]:
    """Facts of one small kind (160 bytes of JSON), each on a subject of its own: the smaller, the more our part shows."""
    for index in itertools.count():
        yield SequenceDispatched(
            source="math",
            sample=f"math-{index:06d}",
            sequence=f"math-{index:06d}-0",
            member=0,
            group_size=8,
            pool="pool",
            task_index=index,
        )


class Publishers:
    """A run's log, and nats-py alone on a stream of its own, on one server. An asynchronous context manager.

    The methods give the seconds that so many publishes take; what is published is made before.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stream = f"bare{secrets.token_hex(6)}"
        self.facts = facts()

    async def __aenter__(self) -> Publishers:
        self.log = await Log.connect(self.server.broker, f"b{secrets.token_hex(6)}", "bench")
        await self.log.create()
        self.client = await self.server.bare()
        self.js = self.client.jetstream()
        await self.js.add_stream(name=self.stream, subjects=[f"{self.stream}.>"])
        self.like = encode(new_event(next(self.facts), "bench"), self.log.run)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.log.close()
        await self.client.close()

    async def ours(self, count: int, callers: int = IN_FLIGHT) -> float:
        return await _seconds(self.log.publish, self._made(count), callers)

    async def bare(self, count: int, callers: int = IN_FLIGHT) -> float:
        """What compare-and-set needs: two headers, and a body of the same size."""
        return await _seconds(lambda id_: self._bare(id_, {}), _ids(count), callers)

    async def same(self, count: int, callers: int = IN_FLIGHT) -> float:
        """The same message as ours, made before."""
        return await _seconds(lambda id_: self._bare(id_, self.like.headers), _ids(count), callers)

    async def _bare(self, id_: str, headers: dict[str, str]) -> None:
        head = {**headers, EXPECTED_LAST: "0", "Nats-Msg-Id": id_}
        await self.js.publish(f"{self.stream}.sequence.dispatched.math.{id_}", self.like.body, headers=head)

    async def bursts(self, count: int) -> float:
        made = [(fact, None) for fact in self._made(count)]
        began = time.perf_counter()
        for begin in range(0, count, BURST):
            await self.log.publish_all(made[begin : begin + BURST])
        return time.perf_counter() - began

    def _made(self, count: int) -> list[SequenceDispatched]:
        return list(itertools.islice(self.facts, count))


def _ids(count: int) -> list[str]:
    return [uuid.uuid4().hex for _ in range(count)]


async def _seconds(publish: Callable[[_T], Awaitable[object]], what: Sequence[_T], callers: int) -> float:
    """Seconds until all is published by so many callers, each of which waits for its own."""
    left = iter(what)

    async def caller() -> None:
        for each in left:
            await publish(each)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(min(callers, len(what)))))
    return time.perf_counter() - began


async def publishing(server: Server, count: int, rounds: int) -> list[Figure]:
    """One writer: 256 in flight, in bursts, and one at a time."""
    async with Publishers(server) as at:
        flight, bare, same, bursts = await rates(
            rounds,
            count,
            [
                lambda: at.ours(count),
                lambda: at.bare(count),
                lambda: at.same(count),
                lambda: at.bursts(count),
            ],
            f"publish, {IN_FLIGHT} in flight; bare; bare, the same message; bursts of {BURST}",
        )
        few = max(count // 5, 1)
        one, one_bare = await rates(
            rounds, few, [lambda: at.ours(few, 1), lambda: at.bare(few, 1)], "publish, one at a time; bare"
        )
    return [
        figure("publish.in_flight", flight, "events/s", 0.7 * bare, bare),
        figure("publish.same_message", flight, "events/s", 0, same),
        figure("publish.bursts", bursts, "events/s", 0, bare),
        figure("publish.single", one, "events/s", 0, one_bare),
    ]


async def syncing(server: Server, always: Server, count: int, rounds: int) -> list[Figure]:
    """What it costs that a fact is on the disk before it is acknowledged."""
    # A busy disk syncs a few hundred times a second.
    count = max(count // 4, 1)
    few = max(count // 10, 1)
    async with Publishers(server) as lazy, Publishers(always) as safe:
        flight, flight_lazy = await rates(
            rounds,
            count,
            [lambda: safe.ours(count), lambda: lazy.ours(count)],
            f"sync_interval always, {IN_FLIGHT} in flight; default",
        )
        bursts, bursts_lazy = await rates(
            rounds,
            count,
            [lambda: safe.bursts(count), lambda: lazy.bursts(count)],
            f"sync_interval always, bursts of {BURST}; default",
        )
        one, one_lazy = await rates(
            rounds,
            few,
            [lambda: safe.ours(few, 1), lambda: lazy.ours(few, 1)],
            "sync_interval always, one at a time; default",
        )
    return [
        figure("always.in_flight", flight, "events/s", 0, flight_lazy),
        figure("always.bursts", bursts, "events/s", 0, bursts_lazy),
        figure("always.single", one, "events/s", 0, one_lazy),
    ]


async def reading(server: Server, count: int, rounds: int) -> list[Figure]:
    """Work with acknowledgements, and ordered reading, of the same messages."""
    async with Publishers(server) as at:
        await at.bursts(count)
        work, work_bare = await rates(
            rounds, count, [lambda: _work(at, count), lambda: _work_bare(at, count)], "work and ack; bare"
        )
        read, push, pull = await rates(
            rounds,
            count,
            [
                lambda: _read(at.log, count),
                *(lambda r=r: r(at.js, at.log.stream, count) for r in BARE_READERS),
            ],
            "ordered reading, decoded; bare push; bare pull",
        )
    read_bare = max(push, pull)
    return [
        figure("work", work, "events/s", 0.7 * work_bare, work_bare),
        figure("read", read, "events/s", 0.5 * read_bare, read_bare),
    ]


async def _work(at: Publishers, count: int) -> float:
    work = await at.log.work(f"w{secrets.token_hex(6)}", "sequence.dispatched", ack_wait_s=30)
    stop, done, ended = asyncio.Event(), 0, 0.0

    async def handle(delivery: Delivery) -> None:
        nonlocal done, ended
        await delivery.ack()
        done += 1
        if done == count:
            ended = time.perf_counter()
            stop.set()

    began = time.perf_counter()
    await serve_work(work, IN_FLIGHT, handle, stop)
    # Not what it takes to stop: the fetch in flight.
    return ended - began


async def _work_bare(at: Publishers, count: int) -> float:
    name = f"w{secrets.token_hex(6)}"
    config = ConsumerConfig(
        durable_name=name,
        filter_subject=f"rl.{at.log.run}.sequence.dispatched.*.*",
        ack_policy=AckPolicy.EXPLICIT,
        max_ack_pending=20_000,
    )
    await at.js.add_consumer(at.log.stream, config)
    subscription = await at.js.pull_subscribe_bind(consumer=name, stream=at.log.stream)
    began, done = time.perf_counter(), 0
    while done < count:
        for message in await subscription.fetch(IN_FLIGHT):
            await message.ack()
            done += 1
    taken = time.perf_counter() - began
    await subscription.unsubscribe()
    return taken


async def _read(log: Log, count: int) -> float:
    began, done = time.perf_counter(), 0
    async with aclosing(log.read()) as events:
        async for _ in events:
            done += 1
            if done == count:
                break
    return time.perf_counter() - began


async def _push_bare(js: JetStreamContext, stream: str, count: int) -> float:
    began, done = time.perf_counter(), 0
    subscription = await js.subscribe(">", stream=stream, ordered_consumer=True)
    async for _ in subscription.messages:
        done += 1
        if done == count:
            break
    taken = time.perf_counter() - began
    await subscription.unsubscribe()
    return taken


async def _pull_bare(js: JetStreamContext, stream: str, count: int) -> float:
    began, done = time.perf_counter(), 0
    config = ConsumerConfig(
        ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL, mem_storage=True, inactive_threshold=30
    )
    info = await js.add_consumer(stream, config)
    subscription = await js.pull_subscribe_bind(consumer=info.name, stream=stream)
    while done < count:
        done += len(await subscription.fetch(_FETCH))
    taken = time.perf_counter() - began
    await subscription.unsubscribe()
    return taken


BARE_READERS = (_push_bare, _pull_bare)
"""Seconds to read so many messages of a stream, in order, undecoded."""
