"""The hook service on a real log and store: a group is shaped once, by exactly the columns that are named; what cannot be shaped
leaves the pipeline."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.log import Log
from pipeline.log import serving as serving_loop
from pipeline.signal.hooks import Signal
from pipeline.store import ObjectStore, StoreUnavailable, outage
from pipeline.store.payload import read_columns
from schemas.config import Broker, RunConfig
from schemas.facts import SampleRejected, SampleShaped
from services import hook
from services.hook import Room, Shaper
from tests.hook_parts import LENGTH, LOSS, SPILLED, Array, Group, World, config_of, context, hooking
from tests.log_parts import until

pytestmark = pytest.mark.timeout(90)
OPD = {"kind": "opd", "options": {"teacher": "large"}}


class Raises:
    """A hook that cannot shape some groups: those whose second member failed. Of a reward of 2 it hangs."""

    stage = "after"
    columns = ("tokens", "logprobs")
    hang = threading.Event()

    def __call__(self, signal: Signal) -> Signal:
        if signal.rewards[0] == 2:
            self.hang.wait()
        if signal.rewards[1] == 0:
            raise RuntimeError("no such group")
        return signal


SOURCES: dict[str, Any] = {
    "plain": ["grpo"],
    "distilled": [OPD],
    "both": ["grpo", {"kind": "opd", "options": {"teacher": "large", "add": True}}],
    "mine": ["dr_grpo", f"{__name__}:Raises"],
    "weighed": ["grpo", "examples.hooks.likely_tokens:LikelyTokens"],
}


@pytest.fixture
def config(log: Log, broker: Broker, tmp_path: Path) -> RunConfig:
    return config_of(log.run, broker, f"file://{tmp_path}/objects", SOURCES)


@pytest.fixture
def world(log: Log, store: ObjectStore) -> World:
    return World(log, store)


@pytest.fixture
def its_store(config: RunConfig) -> ObjectStore:
    """The service's own, whose traffic is its alone."""
    return ObjectStore.open(config.store)


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_loop, "_BACKOFF_S", (0.01,))


async def shaped(world: World, group: Group, revision: int = 0) -> SampleShaped:
    id_ = group.sample if not revision else f"{group.sample}-r{revision}"
    fact = (await world.fact("sample.shaped", group.source, id_)).fact
    assert isinstance(fact, SampleShaped)
    assert (fact.by, fact.revision) == ("hook", revision)
    return fact


async def sidecars(store: ObjectStore, fact: SampleShaped) -> list[Array]:
    found: list[Array] = []
    for header in fact.sidecars:
        assert header is not None
        assert f".advantages.{fact.revision}." in header.key
        found.append((await read_columns(store, header, ["advantages"]))["advantages"])
    return found


def assert_all(actual: list[Array], wanted: list[Any]) -> None:
    # GRPO's epsilon, 1e-6, is not in the numbers that are wanted.
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=5e-6)


async def test_a_group_is_shaped_once_from_the_columns_that_are_named_alone(
    config: RunConfig, world: World, its_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "packtrain")
    group = await world.group("distilled", 1, [1.0, 0.0])
    plain = await world.group("plain", 1, [1.0, 0.0])
    async with hooking(config, world.log, its_store):
        fact = await shaped(world, group)
        await world.settled("hook")
    wanted = [t - o for t, o in zip(group.teacher, group.own, strict=True) if t is not None]
    assert_all(await sidecars(world.store, fact), wanted)
    assert fact.advantages == pytest.approx([w.mean() for w in wanted], rel=1e-5)
    assert fact.estimator == "opd"
    # Of two payloads all log-probabilities, of two sidecars theirs: not the tokens, not a header.
    named = 2 * 4 * (LENGTH + LOSS)
    assert its_store.counters.bytes_read == named
    assert (
        f"shaped 1 groups; read {named} bytes of the store, where the columns that their hooks name have {named}"
        in caplog.text
    )
    # What the sampler shapes from events alone is not the hook service's.
    assert await world.log.last("sample.shaped", "plain", plain.sample) is None
    assert await world.count("sample.shaped") == 1


async def test_a_member_without_scores_keeps_the_estimators_advantage(
    config: RunConfig, world: World, its_store: ObjectStore
) -> None:
    group = await world.group("both", 1, [1.0, 0.0], unscored=1)
    async with hooking(config, world.log, its_store):
        fact = await shaped(world, group)
    (header, absent) = fact.sidecars
    assert header is not None
    assert absent is None
    (teacher, _), (own, _) = group.teacher, group.own
    assert teacher is not None
    (one,) = await sidecars(world.store, fact.model_copy(update={"sidecars": (header,)}))
    assert_all([one], [2**-0.5 + teacher - own])
    assert fact.advantages == pytest.approx([float(one.mean()), -(2**-0.5)], rel=1e-5)


async def test_a_hook_of_ones_own_shapes(config: RunConfig, world: World, its_store: ObjectStore) -> None:
    group = await world.group("weighed", 1, [1.0, 0.0])
    async with hooking(config, world.log, its_store):
        fact = await shaped(world, group)
    wanted = [a * (0.3 * np.exp(own) + 0.7) for a, own in zip((2**-0.5, -(2**-0.5)), group.own, strict=True)]
    assert_all(await sidecars(world.store, fact), wanted)
    assert its_store.counters.bytes_read == 2 * 4 * LENGTH


async def test_spans_that_are_in_the_payload_are_read_from_it(
    config: RunConfig, world: World, its_store: ObjectStore
) -> None:
    world.contexts = SPILLED
    group = await world.group("weighed", 1, [1.0, 0.0])
    # A count that the payload does not bear out: the group cannot be shaped, and nothing is made up.
    world.contexts = (SPILLED[0], SPILLED[1].model_copy(update={"spilled": 5}))
    wrong = await world.group("weighed", 2, [1.0, 0.0])
    async with hooking(config, world.log, its_store):
        fact = await shaped(world, group)
        await world.fact("sample.rejected", "weighed", wrong.sample)
    wanted = [a * (0.3 * np.exp(own) + 0.7) for a, own in zip((2**-0.5, -(2**-0.5)), group.own, strict=True)]
    assert_all(await sidecars(world.store, fact), wanted)


async def test_a_late_grading_shapes_anew_where_it_came_after_the_acceptance(
    config: RunConfig, world: World, its_store: ObjectStore
) -> None:
    before = await world.complete("both", 1, [1.0, 0.0])
    await world.grade(before, [1.0, 0.0])
    await world.grade(before, [0.0, 1.0], revision=1)
    await world.accept(before)
    after = await world.group("both", 2, [1.0, 0.0])
    # The service has seen neither: revision 1 is asked for before revision 0 is there.
    await world.grade(after, [0.0, 1.0], revision=1)
    undecided = await world.complete("both", 3, [1.0, 0.0])
    await world.grade(undecided, [1.0, 0.0])
    await world.grade(undecided, [0.0, 1.0], revision=1)
    async with hooking(config, world.log, its_store):
        first, own, anew = (
            await shaped(world, before),
            await shaped(world, after),
            await shaped(world, after, 1),
        )
        await world.settled("hook")
        await world.settled("hook-graded")
    half = 2**-0.5

    def wanted(group: Group, *advantages: float) -> list[Any]:
        members = zip(advantages, group.teacher, group.own, strict=True)
        return [a + t - o for a, t, o in members if t is not None]

    assert_all(await sidecars(world.store, first), wanted(before, -half, half))
    assert_all(await sidecars(world.store, own), wanted(after, half, -half))
    assert_all(await sidecars(world.store, anew), wanted(after, -half, half))
    zero, one = [await world.log.last("sample.shaped", "both", after.sample + end) for end in ("", "-r1")]
    assert zero is not None
    assert one is not None
    assert zero.seq < one.seq
    # Before its acceptance a late grading is its sampler's; after it there is nothing more to be late for.
    assert await world.count("sample.shaped") == 3


async def test_a_late_grading_that_is_seen_first_shapes_both_revisions_in_order(
    config: RunConfig, world: World, its_store: ObjectStore
) -> None:
    group = await world.group("both", 1, [1.0, 0.0])
    await world.grade(group, [0.0, 1.0], revision=1)
    gradings = await world.log.work("only", "sample.graded", ack_wait_s=30)
    _, late = [(await gradings.fetch(1, timeout_s=20))[0] for _ in range(2)]
    shaper = Shaper(context(config, world.log, its_store, asyncio.Event()))
    await shaper.graded(late)
    both = [await world.log.last("sample.shaped", "both", group.sample + end) for end in ("", "-r1")]
    seqs = [event.seq for event in both if event is not None]
    assert seqs == sorted(seqs)
    assert len(seqs) == 2
    assert late.settled
    # Said of a group that is shaped, the last word is nothing: a batch may hold it.
    acceptances = await world.log.work("other", "sample.accepted", ack_wait_s=30)
    (accepted,) = await acceptances.fetch(1, timeout_s=20)
    await shaper.reject(accepted, "too late")
    assert await world.count("sample.rejected") == 0


async def test_a_group_that_its_hooks_refuse_is_rejected_and_the_others_go_on(
    config: RunConfig, world: World, its_store: ObjectStore
) -> None:
    poison = await world.group("mine", 1, [1.0, 0.0])
    good = await world.group("mine", 2, [0.0, 1.0])
    async with hooking(config, world.log, its_store, max_deliver=2):
        assert (await shaped(world, good)).advantages == (-0.5, 0.5)
        event = await world.fact("sample.rejected", "mine", poison.sample)
        await world.settled("hook")
        # A late grading of the good one that its hooks refuse leaves it as it is.
        await world.grade(good, [1.0, 0.0], revision=1)
        await world.settled("hook-graded")
    assert isinstance(event.fact, SampleRejected)
    assert (event.fact.reason, event.fact.by, event.fact.tokens) == ("failed", "hook", LENGTH)
    letters = {letter.name.partition("/")[0]: letter for letter in (await world.log.letters.all())[0]}
    assert letters.keys() == {"hook", "hook-graded"}
    assert (letters["hook"].reason, letters["hook"].deliveries) == ("RuntimeError: no such group", 2)
    assert (await world.count("sample.shaped"), await world.count("sample.rejected")) == (1, 1)


async def test_a_hook_that_hangs_costs_its_own_group_and_no_other(
    config: RunConfig, world: World, its_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "HOOK_S", 0.5)
    stuck = await world.group("mine", 1, [2.0, 0.0])
    async with hooking(config, world.log, its_store, max_deliver=2):
        try:
            await world.fact("sample.rejected", "mine", stuck.sample)
            await world.settled("hook")
            good = await world.group("mine", 2, [0.0, 1.0])
            assert (await shaped(world, good)).advantages == (-0.5, 0.5)
        finally:
            Raises.hang.set()
    (letter,) = (await world.log.letters.all())[0]
    assert (
        letter.reason
        == "its hooks (dr_grpo, tests.integration.test_hook_service:Raises) gave nothing in 0.5 s"
    )


async def test_a_group_that_turns_out_to_have_no_advantage_is_dropped(
    config: RunConfig, world: World, its_store: ObjectStore
) -> None:
    group = await world.group("mine", 1, [1.0, 1.0])
    async with hooking(config, world.log, its_store):
        fact = (await world.fact("sample.rejected", "mine", group.sample)).fact
        await world.settled("hook")
        read = its_store.counters.bytes_read
        # What is dropped is not shaped anew.
        await world.grade(group, [0.0, 1.0], revision=1)
        await world.settled("hook-graded")
    assert isinstance(fact, SampleRejected)
    assert (fact.reason, fact.by) == ("all_zero", "hook")
    # Of two members two columns, and not what lies between them; and of what is dropped nothing again.
    assert read == its_store.counters.bytes_read == 2 * 2 * 4 * LENGTH
    assert await world.count("sample.shaped") == 0


async def test_a_store_that_is_away_costs_no_delivery(
    config: RunConfig, world: World, its_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = await world.group("distilled", 1, [1.0, 0.0])
    refusals = {"get_ranges": 7, "put": 3}

    def away(name: str, present: Any) -> Any:
        async def asked(store: ObjectStore, *arguments: Any, **options: Any) -> Any:
            if refusals[name]:
                refusals[name] -= 1
                raise StoreUnavailable(store.url, "away", "wait")
            return await present(store, *arguments, **options)

        return asked

    monkeypatch.setattr(outage, "RETRY_S", 0.01)
    for name in refusals:
        monkeypatch.setattr(ObjectStore, name, away(name, getattr(ObjectStore, name)))
    async with hooking(config, world.log, its_store, max_deliver=1):
        fact = await shaped(world, group)
    assert refusals == {"get_ranges": 0, "put": 0}
    assert len(fact.sidecars) == 2
    assert (await world.log.letters.all())[0] == []


async def test_a_damaged_column_is_never_trained(
    config: RunConfig, world: World, its_store: ObjectStore, tmp_path: Path
) -> None:
    group = await world.group("distilled", 1, [1.0, 0.0])
    file = tmp_path / "objects" / group.payloads[1].key
    data = bytearray(file.read_bytes())
    data[group.payloads[1].column("logprobs").offset + 5] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    async with hooking(config, world.log, its_store, max_deliver=2):
        await world.fact("sample.rejected", "distilled", group.sample)
        await world.settled("hook")
    (letter,) = (await world.log.letters.all())[0]
    assert re.search(r"column logprobs, block 0, rows .*: CRC32C", letter.reason)
    assert await world.count("sample.shaped") == 0


async def test_columns_have_room_for_so_many_bytes_or_for_one_group() -> None:
    room, inside = Room(10), list[int]()

    async def take(size: int, leave: asyncio.Event) -> None:
        async with room.taken(size):
            inside.append(size)
            await leave.wait()

    leaves = {size: asyncio.Event() for size in (6, 4, 100, 3)}
    async with asyncio.TaskGroup() as tasks:
        for size, leave in leaves.items():
            tasks.create_task(take(size, leave))
        await until(lambda: len(inside) == 2)
        leaves[4].set()
        # There would be room for the last, but then one that wants it all might wait for ever.
        for _ in range(10):
            await asyncio.sleep(0)
        assert inside == [6, 4]
        leaves[6].set()
        # One that is larger than the room has it alone.
        await until(lambda: len(inside) == 3)
        assert inside == [6, 4, 100]
        leaves[100].set()
        await until(lambda: len(inside) == 4)
        leaves[3].set()
