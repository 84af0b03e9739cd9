"""A run that begins with the groups of another: which ones, how they enter its log, and what comes of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.batch.mixer import MixerCore
from pipeline.batch.sampler import SamplerCore
from pipeline.log import Log
from pipeline.log.shell import run_core
from pipeline.replay import SERVICES, Rerun
from pipeline.store import ObjectExists, ObjectStore
from pipeline.store.payload import read_columns, write_payload
from schemas.config import Broker, RunConfig
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    Fact,
    Failure,
    PolicyPublished,
    RunStarted,
    SampleAccepted,
    SampleCompleted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    SourceShare,
)
from schemas.keys import payload_key
from schemas.names import sample_id, sequence_id
from schemas.payload import Ref
from schemas.plan import Plan
from services.cli.begin import begin
from services.cli.embedded import LaunchError
from tests.unit.factories import finished

pytestmark = pytest.mark.timeout(60)
REF = Ref(key="k", bytes=1, crc32c=1)
ROWS = 10


def config(run: str, broker: Broker, directory: Path, **changes: Any) -> RunConfig:
    source = {
        "name": "math", "pool": "p", "groups": 2, "group_size": 3, "staleness": 2, "environment": {"kind": "arithmetic"},
    }  # fmt: skip
    return RunConfig.model_validate(
        {
            "run": run, "steps": 9, "broker": broker.model_dump(), "batch": {"dp": 1},
            "store": {"url": f"file://{directory}/objects"}, "pools": [{"name": "p", "harness": "chat"}],
            "sources": [{**source, **changes}],
        }
    )  # fmt: skip


class Old:
    """The log of a run that somebody else made, and its payloads."""

    def __init__(self, log: Log, store: ObjectStore, run_config: RunConfig) -> None:
        self.log, self.store, self.config = log, store, run_config
        self.ids: dict[str, str] = {}

    async def tell(self, *facts: Fact) -> None:
        for published in await self.log.publish_all([(fact, None) for fact in facts]):
            self.ids[f"{published.event.fact.type} {published.event.fact.id()}"] = published.event.id

    async def group(self, number: int, rewards: tuple[float | None, ...], version: int) -> str:
        """Of task 100 + number; a reward of None is a failure."""
        sample = sample_id("math", number)
        for member in range(len(rewards)):
            await self.tell(
                SequenceDispatched(
                    source="math", sample=sample, sequence=sequence_id(sample, member), member=member, group_size=len(rewards),
                    pool="other", task_index=100 + number, min_policy_version=0,
                )
            )  # fmt: skip
        for member, reward in enumerate(rewards):
            sequence = sequence_id(sample, member)
            if reward is None:
                failure = Failure(kind="infra", reason="host_lost")
                failed = SequenceFailed(
                    source="math", sample=sample, sequence=sequence, attempts=5, failure=failure
                )
                await self.tell(failed)
                continue
            columns = {
                "tokens": np.full(ROWS, 100 * number + member, np.int32),
                "loss_mask": np.array([0] * 6 + [1] * 4, np.uint8),
                "logprobs": np.zeros(ROWS, np.float32),
                "policy_version": np.full(ROWS, version, np.int32),
                "segments": np.array([[0, 6, 1, 0, 0], [6, ROWS, 2, 0, 0]], np.int32),
            }
            header = await write_payload(
                self.store, payload_key(self.log.run, "math", f"{sequence}-a1"), columns
            )
            fact = finished(sequence, reward, tokens=ROWS, version=version)
            await self.tell(fact.model_copy(update={"payload": header}))
        return sample

    async def accept(self, sample: str, version: int, advantages: tuple[float, ...]) -> None:
        accepted = {"pass_rate": 0.5, "mean_reward": 0.5, "tokens": 30, "min_version": version}
        await self.tell(SampleAccepted.model_validate({"source": "math", "sample": sample, **accepted}))
        if advantages:
            await self.tell(
                SampleShaped(source="math", sample=sample, estimator="grpo", advantages=advantages)
            )

    async def live(self) -> None:
        """Three steps. Left are 2 (not shaped yet), 4 (of which one failed) and 5 (too old)."""
        await self.tell(RunStarted(run=self.log.run, config=self.config.decisions()))
        mixed, shaped = (0.0, 1.0, 1.0), (-1.0, 0.5, 0.5)
        for number in (0, 1):
            await self.accept(await self.group(number, mixed, 1), 1, shaped)
        late = await self.group(2, mixed, 2)
        rejected = await self.group(3, (1.0, 1.0, 1.0), 2)
        await self.tell(SampleRejected(source="math", sample=rejected, reason="pass_rate", pass_rate=1.0))
        share = SourceShare(
            groups=2, sequences=6, tokens=60, loss_tokens=24, mean_reward=0.6, max_staleness=0
        )
        info = await self.log.head()
        await self.tell(
            BatchYielded(
                step=1, through=info, policy_version=0, sources={"math": share}, microbatches=1, plan=REF
            )
        )
        await self.accept(await self.group(4, (0.0, None, 1.0), 3), 3, (-1.0, 1.0))
        await self.accept(await self.group(5, mixed, 0), 0, shaped)
        await self.accept(late, 2, ())
        await self.group(6, mixed, 3)
        await self.tell(*(PolicyPublished(step=step, weights=REF) for step in (1, 2, 3)))


@pytest.fixture
async def old(log: Log, store: ObjectStore, broker: Broker, tmp_path: Path) -> Old:
    made = Old(log, store, config(log.run, broker, tmp_path))
    await made.live()
    return made


@pytest.fixture
async def new(old: Old, broker: Broker):
    log = await Log.connect(broker, f"{old.log.run}-2", "test")
    yield log
    await log.close()


async def events(log: Log) -> list[Event]:
    found: list[Event] = []
    head = await log.head()
    async for event in log.subscribe():
        found.append(event)
        if event.seq >= head:
            break
    return found


def bodies(found: list[Event]) -> list[tuple[Fact, str | None]]:
    return [(event.fact, event.causation) for event in found[1:]]


async def test_accepted_groups_that_are_in_no_batch_enter_the_next_run_and_are_trained_there(
    old: Old, new: Log, store: ObjectStore, broker: Broker, tmp_path: Path
) -> None:
    said: list[str] = []
    here = config(new.run, broker, tmp_path, groups=2)
    await begin(new, here, store, False, old.log.run, said.append)
    assert said == [f"run {new.run} begins with 2 groups of run {old.log.run}: math 2; 1 group too old"]
    found = await events(new)
    started = found[0].fact
    assert isinstance(started, RunStarted)
    assert started.inherited is not None
    assert (started.inherited.run, started.inherited.groups) == (old.log.run, {"math": 2})
    assert [(e.fact.type, e.fact.id()) for e in found[1:]] == [
        (f"sequence.{what}", f"math-00000{number}-{member}")
        for number, ends in ((0, ("finished", "failed", "finished")), (1, ("finished",) * 3))
        for what, member in [
            *(("dispatched", m) for m in range(3)),
            *((end, m) for m, end in enumerate(ends)),
        ]
    ]
    assert [e.causation for e in found[1:4]] == [
        old.ids[f"sequence.dispatched math-000004-{m}"] for m in range(3)
    ]
    assert found[4].causation == old.ids["sequence.finished math-000004-0"]
    for event in found[1:]:
        match event.fact:
            case SequenceDispatched() as fact:
                assert (fact.pool, fact.task_index) == ("p", {"0": 104, "1": 102}[fact.sample[-1]])
            case SequenceFinished() as fact:
                assert {(c.min_version, c.max_version) for c in fact.contexts} == {(0, 0)}
                assert fact.payload.key.startswith(f"runs/{new.run}/inherited/math/{fact.sequence}")
            case _:
                assert isinstance(event.fact, SequenceFailed)

    # What becomes of the other run is nothing to this one.
    await store.remove([key async for key, _ in store.list(f"runs/{old.log.run}")])
    stop = asyncio.Event()

    async def write(objects: Any) -> None:
        for key, body in objects.items():
            try:
                await store.create(key, body)
            except ObjectExists:
                continue

    mixer, sampler = MixerCore(new.run), SamplerCore(new.run)
    tasks = [asyncio.create_task(run_core(new, core, write, stop)) for core in (mixer, sampler)]
    async with asyncio.timeout(40):
        async for event in new.subscribe():
            if isinstance(event.fact, SampleCompleted):
                rewards, sample = event.fact.rewards, event.fact.sample
                await new.publish(
                    SampleGraded(source="math", sample=sample, grader="none", rewards=rewards), event
                )
            if isinstance(event.fact, BatchYielded):
                plan = Plan.model_validate_json(await store.get(event.fact.plan))
                break
    stop.set()
    await asyncio.gather(*tasks)
    assert Counter(s.sample for s in plan.sequences) == {"math-000000": 2, "math-000001": 3}
    tokens = (await read_columns(store, plan.sequences[0].payload, ["tokens"]))["tokens"]
    assert tokens.tolist() == [400] * ROWS
    found = await events(new)
    sent = {e.fact.sample for e in found if isinstance(e.fact, SequenceDispatched)}
    assert sent >= {"math-000002"}, "with three in play, the dispatcher's first is the third"
    assert [
        e.fact.task_index
        for e in found
        if isinstance(e.fact, SequenceDispatched) and e.fact.sample == "math-000002"
    ] == [2] * 3
    for name, service in SERVICES.items():
        again = Rerun(new.run, service)
        for event in found:
            again.feed(event)
        assert again.report().divergences == (), name


async def test_a_launcher_that_is_killed_on_the_way_goes_on_with_the_same_groups(
    old: Old, new: Log, store: ObjectStore, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, quiet = config(new.run, broker, tmp_path), lambda _: None
    publish_all = new.publish_all

    class Killed(Exception):
        pass

    async def some(facts: Any) -> Any:
        await publish_all(facts[:7])
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(new, "publish_all", some)
        with pytest.raises(Killed):
            await begin(new, here, store, False, old.log.run, quiet)
    assert len(await events(new)) == 8
    # Meanwhile the other run goes on, and is removed: what enters is what the first launcher found.
    await old.accept(sample_id("math", 6), 3, (-1.0, 0.5, 0.5))
    await old.log.js.delete_stream(old.log.stream)
    await begin(new, here, store, True, "", quiet)
    once = await events(new)
    assert len(once) == 1 + 2 * 6
    assert Counter(fact.subject("r").text for fact, _ in bodies(once)).most_common(1)[0][1] == 1
    for groups_from in ("", old.log.run):
        await begin(new, here, store, True, groups_from, quiet)
    assert await events(new) == once
    with pytest.raises(LaunchError, match=f"run {new.run} has begun without groups of run other"):
        await begin(new, here, store, True, "other", quiet)


async def test_what_cannot_be_taken_over_is_refused_in_words_and_leaves_no_run(
    old: Old, new: Log, store: ObjectStore, broker: Broker, tmp_path: Path
) -> None:
    async def refused(groups_from: str, words: str, **changes: Any) -> None:
        with pytest.raises(LaunchError, match=words):
            await begin(new, config(new.run, broker, tmp_path, **changes), store, False, groups_from, print)
        assert not await new.exists()

    name = old.log.run
    await refused("nobody", "has no run 'nobody' to take groups from")
    await refused(new.run, "cannot begin with its own groups")
    await refused(name, "another group_size \\(3 there, 4 here\\)", group_size=4)
    await refused(name, "another environment", environment={"kind": "arithmetic", "seed": 7})
    await refused(
        name, "of source 'math', which is no training source here; sources: \\['algebra'\\]", name="algebra"
    )
    (gone,) = [key async for key, _ in store.list(f"runs/{name}") if "math-000002-1" in key]
    await store.remove([gone])
    await refused(name, f"has no {gone}, a payload of run {name}")
    # None that is fresh enough is no fault.
    said: list[str] = []
    await begin(new, config(new.run, broker, tmp_path, staleness=0), store, False, name, said.append)
    assert said == [f"run {new.run} begins with 1 group of run {name}: math 1; 2 groups too old"]
