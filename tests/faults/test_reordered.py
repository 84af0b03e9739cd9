"""Publishes that come late, twice, or whose acknowledgement is lost, of everybody in a run, on a real server.

The network is the one double here: it holds a message back, sends it twice, or loses what the server answers. The server,
its refusals, the log, the shell and the cores are real, and there are two of each core.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from pipeline.batch.mixer import MixerCore
from pipeline.batch.sampler import SamplerCore
from pipeline.log import Log, end_tasks
from pipeline.log.acks import Ack
from pipeline.log.shell import run_core
from pipeline.replay.rerun import Rerun
from pipeline.replay.service import SERVICES
from schemas.config import Broker
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    PolicyPublished,
    RunStarted,
    RunStopped,
    SampleCompleted,
    SampleGraded,
    SequenceDispatched,
    StepTrained,
)
from schemas.payload import Ref
from schemas.plan import Plan
from tests.integration.test_publish import stored
from tests.unit.factories import config, finished

pytestmark = pytest.mark.timeout(120)
REF = Ref(key="k", bytes=0, crc32c=0)
STEPS = 3


class Network:
    """Between a log and its broker. `met` counts what it did to how many messages."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.met: Counter[str] = Counter()

    def disturb(self, log: Log) -> Log:
        # One by one, so that the messages of a burst overtake each other.
        log._publisher._atomic = False
        publish = log._publisher._acks.publish

        async def disturbed(subject: str, body: bytes, headers: dict[str, str]) -> Ack:
            kind = self.random.choice(["late", "late", "twice", "lost", "well"])
            self.met[kind] += 1
            if kind == "late":
                await asyncio.sleep(self.random.random() * 0.05)
            if kind == "twice":
                first = asyncio.create_task(publish(subject, body, headers))
                second = asyncio.create_task(publish(subject, body, headers))
                await asyncio.wait([first, second])
                # What the sender hears is the answer to the copy.
                first.exception()
                return second.result()
            ack = await publish(subject, body, headers)
            if kind == "lost":
                raise TimeoutError("acknowledgement lost")
            return ack

        log._publisher._acks.publish = disturbed
        return log


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_run_whose_publishes_are_late_doubled_and_unanswered(
    broker: Broker, log: Log, seed: int
) -> None:
    network, objects, stop = Network(seed), dict[str, bytes](), asyncio.Event()
    rewards = random.Random(seed)

    async def write(new: Mapping[str, bytes]) -> None:
        objects.update(new)

    async def answer(own: Log, type_: str, handle: Callable[[Log, Event], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.TaskGroup() as at_once:
            async for event in own.subscribe(type_):
                at_once.create_task(handle(own, event))

    async def roll_out(own: Log, event: Event) -> None:
        assert isinstance(event.fact, SequenceDispatched)
        reward = float(rewards.random() < 0.5)
        await own.publish(finished(event.fact.sequence, reward, version=STEPS), event)

    async def grade(own: Log, event: Event) -> None:
        fact = event.fact
        assert isinstance(fact, SampleCompleted)
        graded = SampleGraded(source=fact.source, sample=fact.sample, grader="none", rewards=fact.rewards)
        await own.publish(graded, event)

    async def train(own: Log, event: Event) -> None:
        assert isinstance(event.fact, BatchYielded)
        step = event.fact.step
        trained = StepTrained(
            step=step, parent=None, weights=REF, optimizer=REF, loss=0, grad_norm=0, kl=0, loss_tokens=0, seconds=0
        )  # fmt: skip
        await own.publish(trained, event)
        await own.publish(PolicyPublished(step=step, weights=REF), event)

    await log.publish(RunStarted(run=log.run, config=config(run=log.run, steps=STEPS).decisions()))
    logs = [network.disturb(await Log.connect(broker, log.run, f"n{i}")) for i in range(7)]
    cores = [MixerCore(log.run), MixerCore(log.run), SamplerCore(log.run), SamplerCore(log.run)]
    tasks = [
        *(
            asyncio.create_task(run_core(own, core, write, stop))
            for own, core in zip(logs, cores, strict=False)
        ),
        asyncio.create_task(answer(logs[4], "sequence.dispatched", roll_out)),
        asyncio.create_task(answer(logs[5], "sample.completed", grade)),
        asyncio.create_task(answer(logs[6], "batch.yielded", train)),
    ]
    events: list[Event] = []
    try:
        async with asyncio.timeout(90):
            async for event in log.subscribe():
                events.append(event)
                if isinstance(event.fact, RunStopped):
                    break
    finally:
        stop.set()
        await end_tasks(tasks)
        for own in logs:
            await own.close()
    check(events, objects)
    assert all(network.met[kind] > 10 for kind in ("late", "twice", "lost"))
    for source in ("math", "code"):
        dispatched = [
            f.sequence for e in events if isinstance(f := e.fact, SequenceDispatched) and f.source == source
        ]
        assert dispatched != sorted(dispatched), "nothing overtook anything"
    # A copy that the broker took would be a message more, after the end too; and all of them are events.
    everything = await stored(log)
    assert len({event.fact.subject("r").text for event in everything}) == (await log.size())[0]
    assert not log.skipped


def check(events: list[Event], objects: dict[str, bytes]) -> None:
    """Everything once, every step's batch planned and no sequence in two, and the same again from the log alone."""
    facts = [event.fact for event in events]
    assert set(Counter(fact.subject("r").text for fact in facts).values()) == {1}
    yielded = [fact for fact in facts if isinstance(fact, BatchYielded)]
    assert [fact.step for fact in yielded] == list(range(1, STEPS + 1))
    planned = Counter(
        s.sequence for fact in yielded for s in Plan.model_validate_json(objects[fact.plan.key]).sequences
    )
    assert set(planned.values()) == {1}
    for completed in (fact for fact in facts if isinstance(fact, SampleCompleted)):
        assert list(completed.sequences) == sorted(completed.sequences), "members are in their order"
    for service in SERVICES.values():
        again = Rerun(events[0].fact.id(), service)
        for event in events:
            again.feed(event)
        assert again.report().divergences == (), service.name
