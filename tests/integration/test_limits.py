"""Limits that a person changes while a run goes on: by the command, in the log, and what hosts and dispatcher make of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.batch.mixer import MixerCore
from pipeline.config import dumps, load
from pipeline.log import Delivery, Log, Work, end_tasks, serve_work
from pipeline.log.limits import Limit, changes, newest
from pipeline.log.shell import run_core
from pipeline.log.work import MAX_PENDING
from pipeline.store import ObjectStore
from schemas.config import Broker, RunConfig
from schemas.facts import LimitChanged, RunStarted, RunStopped, SequenceDispatched, SequenceFinished
from services import agent_loop, harness
from services.cli import limit as limits
from services.cli.embedded import LaunchError
from services.cli.main import app
from tests.log_parts import dispatched, until
from tests.rollout_stage import Stage, staged
from tests.unit.factories import finished

pytestmark = pytest.mark.timeout(60)
DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


class Host:
    """One host of a pool: it holds what it takes until it is let go."""

    def __init__(self, log: Log, configured: int, all_held: set[int], peaks: list[int]) -> None:
        self.log = log
        self.limit = Limit(log, "pool", "chat", configured)
        self.held: dict[int, asyncio.Event] = {}
        self.all_held = all_held
        self.peaks = peaks

    async def handle(self, delivery: Delivery) -> None:
        go = self.held[delivery.event.seq] = asyncio.Event()
        self.all_held.add(delivery.event.seq)
        self.peaks.append(len(self.all_held))
        await go.wait()
        # Before the broker knows: what it then gives may come before we go on.
        self.all_held.discard(delivery.event.seq)
        del self.held[delivery.event.seq]
        await delivery.ack()

    async def open(self) -> Work:
        most = await self.limit.read()
        return await self.log.work("w", "sequence.dispatched", ack_wait_s=30, max_pending=most or MAX_PENDING)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Host]:
        work, stop = await self.open(), asyncio.Event()
        tasks = [
            asyncio.create_task(serve_work(work, 50, self.handle, stop)),
            asyncio.create_task(self.limit.keep(work)),
        ]
        try:
            yield self
        finally:
            await end_tasks(tasks)


async def most_pending(log: Log) -> int | None:
    return (await log.js.consumer_info(log.stream, "w")).config.max_ack_pending


async def declared(log: Log, most: int) -> None:
    async with asyncio.timeout(20):
        while await most_pending(log) != most:
            await asyncio.sleep(0.01)


async def test_a_pools_limit_holds_over_all_its_hosts_and_is_changed_while_they_run(log: Log) -> None:
    for number in range(30):
        await log.publish(dispatched(number))
    held, peaks = set[int](), list[int]()

    def let_go(count: int) -> None:
        events = [go for host in (one, two) for go in host.held.values()]
        assert len(events) >= count
        for go in events[:count]:
            go.set()

    async with Host(log, 3, held, peaks).running() as one, Host(log, 3, held, peaks).running() as two:
        await until(lambda: len(held) == 3)
        let_go(2)
        await until(lambda: len(peaks) == 5)
        assert max(peaks) == 3
        await limits.change(log, "pool", "chat", 8)
        await until(lambda: len(held) == 8)
        await limits.change(log, "pool", "chat", 2)
        await declared(log, 2)
        before = len(peaks)
        let_go(7)
        await until(lambda: len(peaks) > before)
        assert peaks[before:] == [2]
        assert max(peaks) == 8
        info = (await log.js.consumer_info(log.stream, "w")).config
        assert info.filter_subjects is not None
        assert len(info.filter_subjects) == 2, "the rest of the consumer is as it was"
        # A host that starts does not lift what was lowered, not for a moment: it reads the limit before it declares the work.
        three = Host(log, 3, held, peaks)
        assert await three.limit.read() == 2
        await (await three.open()).close()
        assert await most_pending(log) == 2
        await limits.change(log, "pool", "chat", 0)
        await until(lambda: len(peaks) == 30)
        assert await most_pending(log) == MAX_PENDING
        let_go(len(held))
        await until(lambda: not held)


async def test_a_host_that_reads_an_older_change_late_does_not_go_back_to_it(log: Log) -> None:
    for number, concurrency in ((4, 7), (1, 5)):
        await log.publish(LimitChanged(of="pool", name="chat", number=number, concurrency=concurrency))
    await log.publish(LimitChanged(of="source", name="chat", number=9, concurrency=1))
    limit = Limit(log, "pool", "chat", 0)
    assert await limit.read() == 7
    follow = limit.follow()
    following = asyncio.ensure_future(anext(follow))
    await log.publish(LimitChanged(of="pool", name="chat", number=2, concurrency=9))
    await log.publish(LimitChanged(of="pool", name="chat", number=5, concurrency=4))
    async with asyncio.timeout(20):
        assert await following == 4
    assert await Limit(log, "pool", "tool", 6).read() == 6


async def test_a_sources_limit_changes_what_the_dispatcher_sends_out(log: Log) -> None:
    source = {
        "name": "math", "pool": "p", "groups": 4, "group_size": 3, "concurrency": 4, "environment": {"kind": "arithmetic"},
    }  # fmt: skip
    config = RunConfig.model_validate(
        {"run": log.run, "pools": [{"name": "p", "harness": "chat"}], "sources": [source]}
    )
    await log.publish(RunStarted(run=log.run, config=config.decisions()))
    sent: list[str] = []

    async def listen() -> None:
        async for event in log.subscribe(SequenceDispatched.type):
            sent.append(event.fact.id())

    async def none(objects: object) -> None:
        assert not objects

    tasks = [asyncio.create_task(listen())]
    tasks.append(asyncio.create_task(run_core(log, MixerCore(log.run), none, asyncio.Event())))
    try:
        await until(lambda: len(sent) == 3)
        await log.publish(finished("math-000000-1", 1.0))
        await log.publish(finished("math-000000-2", 1.0))
        await until(lambda: len(sent) == 6)
        await limits.change(log, "source", "math", 7)
        await until(lambda: len(sent) == 9)
        await limits.change(log, "source", "math", 0)
        await until(lambda: len(sent) == 6 * 3)
    finally:
        await end_tasks(tasks)
    assert len(set(sent)) == 18


@pytest.fixture
def command(tmp_path: Path, broker: Broker, run_name: str) -> Callable[..., tuple[int, str]]:
    """`packtrain limit` on the recorded run: its status and what it said."""
    update = {"run": run_name, "directory": str(tmp_path), "broker": broker}
    home = tmp_path / "runs" / run_name
    home.mkdir(parents=True)
    (home / "config.toml").write_text(dumps(load(DEMO).model_copy(update=update)))

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["limit", *arguments, "--directory", str(tmp_path)])
        return done.exit_code, done.output

    return run


async def test_the_command_shows_and_changes_what_holds(
    command: Callable[..., tuple[int, str]], log: Log
) -> None:
    def packtrain(*arguments: str) -> asyncio.Future[tuple[int, str]]:
        return asyncio.ensure_future(asyncio.to_thread(command, *arguments))

    assert await packtrain() == (
        0,
        "pool chat: no limit\npool tool: no limit\nsource arithmetic: no limit\nsource calculator: no limit\n",
    )
    assert await packtrain("16", "--pool", "chat") == (0, "pool chat: 16 at once\n")
    assert await packtrain("8", "--source", "arithmetic") == (0, "source arithmetic: 8 at once\n")
    assert await packtrain("0", "--source", "arithmetic") == (0, "source arithmetic: no limit\n")
    status, shown = await packtrain("--json")
    rows = {(row["of"], row["name"]): row for row in map(json.loads, shown.splitlines())}
    assert status == 0
    assert {key: (row["concurrency"], row["number"]) for key, row in rows.items()} == {
        ("pool", "chat"): (16, 1),
        ("pool", "tool"): (0, 0),
        ("source", "arithmetic"): (0, 2),
        ("source", "calculator"): (0, 0),
    }
    facts = [e.fact.subject(log.run).text for e in await changes(log)]
    assert facts == [
        f"rl.{log.run}.limit.changed.chat.pool-1",
        f"rl.{log.run}.limit.changed.arithmetic.source-1",
        f"rl.{log.run}.limit.changed.arithmetic.source-2",
    ]


async def test_what_cannot_be_is_refused_and_changes_nothing(
    command: Callable[..., tuple[int, str]], log: Log
) -> None:
    async def refused(*arguments: str, status: int = 2) -> str:
        found, said = await asyncio.to_thread(command, *arguments)
        assert found == status, said
        return said

    assert "has no pool 'chats'; pools: chat, tool" in await refused("4", "--pool", "chats")
    assert "has no source 'chat'; sources: arithmetic, calculator" in await refused("4", "--source", "chat")
    assert "groups of 8, and 7 have no room for one" in await refused("7", "--source", "arithmetic")
    for wrong in (("4",), ("--pool", "chat"), ("4", "--pool", "chat", "--source", "arithmetic")):
        assert "give N and one of --pool and --source" in await refused(*wrong)
    assert await refused("-1", "--pool", "chat")
    assert await changes(log) == []
    await log.publish(RunStopped(run=log.run, reason="completed", steps=5))
    assert "is over" in await refused("4", "--pool", "chat", status=1)
    assert await changes(log) == []


async def test_of_two_people_at_once_one_is_told_so(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    known = await changes(log)

    async def as_it_was(log: Log, name: str = "*") -> list[object]:
        return list(known)

    await limits.change(log, "pool", "chat", 3)
    monkeypatch.setattr(limits, "changes", as_it_was)
    with pytest.raises(LaunchError, match="was set to 3 at once just now by somebody else"):
        await limits.change(log, "pool", "chat", 9)
    fact = newest(await changes(log), "pool", "chat")
    assert fact is not None
    assert fact.concurrency == 3


async def test_a_pools_limit_holds_back_the_trials_of_a_run(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> None:
    async with staged(tmp_path, broker, run_name, log, store, lambda _: "12") as make:
        s = make(queue_s=60.0)
        pools = [p.model_copy(update={"concurrency": 2}) if p.name == "chats" else p for p in s.config.pools]
        s.config = s.config.model_copy(update={"pools": tuple(pools)})
        s.engine.gate.clear()
        sequences = [await s.dispatch("sums", member) for member in range(8)]
        async with s.running((agent_loop.serve, ""), (harness.serve, "chats"), (harness.serve, "chats")):
            await s.engine.wait_for_prompts(2)
            await until_opened(s, 8)
            assert len(s.engine.prompts) == 2, "two hosts, and two trials at once in both together"
            await limits.change(log, "pool", "chats", 5)
            await s.engine.wait_for_prompts(5)
            s.engine.gate.set()
            for sequence in sequences:
                assert isinstance(await s.outcome("sums", sequence), SequenceFinished)


async def until_opened(stage: Stage, count: int) -> None:
    async with asyncio.timeout(20):
        while len(await stage.facts("sequence.opened")) < count:
            await asyncio.sleep(0.02)
