"""The example consumers as processes, on a real server that has a recorded run: late, killed, restarted, refused."""

from __future__ import annotations

import ast
import asyncio
import json
import runpy
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nats
import pyarrow.parquet as pq
import pytest
from aiohttp import web

from pipeline.config import dumps
from pipeline.log import Log
from schemas.config import RunConfig
from schemas.envelope import EXPECTED_LAST
from schemas.facts import FACTS, RunStopped, SequenceFinished
from tests.natsserver import NatsServer, free_port
from tests.recorded import Recorded, demo_events, demo_messages
from tests.unit.factories import config

ROOT = Path(__file__).parents[2]
CONSUMERS = ROOT / "examples" / "consumers"
RUN = "demo"
DEADLINE_S = 60.0
FINISHED = [e for e in demo_events() if isinstance(e.fact, SequenceFinished)]
HALF = 900


def command(name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(CONSUMERS / f"{name}.py"), *map(str, arguments)]


def finished(name: str, *arguments: object) -> str:
    """What the consumer printed; it must end by itself, well."""
    done = subprocess.run(command(name, *arguments), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def until(
    condition: Callable[[], bool], what: str, process: subprocess.Popen[bytes] | None = None
) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited {DEADLINE_S:.0f} s for {what}"
        assert process is None or process.poll() is None, f"ended with {process.poll()} before {what}"
        await asyncio.sleep(0.01)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(20)


async def publish_raw(server: NatsServer, messages: list[Recorded]) -> None:
    """The messages as they were recorded, headers and all; in order."""
    client = await nats.connect(server.broker.url, token=server.token)
    js = client.jetstream()
    try:
        for message in messages:
            ack = await js.publish(message.subject, message.body, headers=message.headers)
            assert (ack.seq, ack.duplicate) == (message.seq, None)
    finally:
        await client.close()


async def make_run(server: NatsServer, messages: list[Recorded]) -> None:
    log = await Log.connect(server.broker, RUN, "test")
    try:
        await log.create()
    finally:
        await log.close()
    await publish_raw(server, messages)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server with the whole recorded run: it has stopped long ago."""
    server = NatsServer(tmp_path_factory.mktemp("ended"))
    server.start()
    asyncio.run(make_run(server, list(demo_messages())))
    yield server
    server.stop()


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server with the run's first half."""
    server = NatsServer(tmp_path / "running")
    server.start()
    await make_run(server, list(demo_messages()[:HALF]))
    yield server
    server.stop()


def config_file(server: NatsServer, directory: Path) -> Path:
    made: RunConfig = config(run=RUN, broker=server.broker.model_dump())
    file = directory / "config.toml"
    file.write_text(dumps(made))
    return file


@pytest.mark.parametrize("name", ["rewards_parquet", "webhooks", "plain_nats"])
def test_each_says_what_it_does_and_is_short(name: str) -> None:
    assert f"python examples/consumers/{name}.py" in finished(name, "--help")
    assert len((CONSUMERS / f"{name}.py").read_text().splitlines()) <= 110


def check_rewards(directory: Path) -> None:
    table = pq.read_table(directory).sort_by("seq").to_pylist()
    assert [(row["seq"], row["sequence"], row["reward"]) for row in table] == [
        (event.seq, event.fact.sequence, event.fact.reward)
        for event in FINISHED
        if isinstance(event.fact, SequenceFinished)
    ]


def test_rewards_of_a_run_that_ended_long_ago(ended: NatsServer, tmp_path: Path) -> None:
    file, out = config_file(ended, tmp_path), tmp_path / "rewards"
    finished("rewards_parquet", file, out)
    check_rewards(out)
    (part,) = out.iterdir()
    table = pq.read_table(out)
    first = FINISHED[0]
    assert isinstance(first.fact, SequenceFinished)
    row = table.sort_by("seq").to_pylist()[0]
    assert row["time"] == first.time
    assert row["tokens"] == sum(context.tokens for context in first.fact.contexts)
    assert row["source"] == first.fact.source
    # Once more: nothing is new, nothing is doubled.
    finished("rewards_parquet", file, out)
    assert list(out.iterdir()) == [part]


async def test_rewards_killed_in_the_midst_are_there_once(
    running: NatsServer, tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    file, out = config_file(running, tmp_path), tmp_path / "rewards"
    middle, end = list(demo_messages()[HALF:1200]), list(demo_messages()[1200:])

    def parts() -> list[Path]:
        return sorted(out.glob("*.parquet"))

    quick = subprocess.Popen(command("rewards_parquet", file, out, "--every", 0.05))
    processes.append(quick)
    await until(lambda: len(parts()) == 1, "the first part", quick)
    quick.kill()
    quick.wait(20)
    await publish_raw(running, middle)
    known = await delivered(running)
    # This one has rows in hand, and has written none of them.
    slow = subprocess.Popen(command("rewards_parquet", file, out, "--every", 1000))
    processes.append(slow)
    newest = max(event.seq for event in FINISHED if event.seq <= 1200)
    while newest not in await delivered(running):
        assert slow.poll() is None
    slow.kill()
    slow.wait(20)
    assert newest not in known
    assert len(parts()) == 1
    (out / "_unfinished").write_bytes(b"PAR1")
    await publish_raw(running, end)
    finished("rewards_parquet", file, out)
    assert len(parts()) == 2
    check_rewards(out)


@dataclass
class Receiver:
    """An HTTP server that takes events as CloudEvents, after it has failed `fails` times."""

    fails: int = 0
    hold: bool = False
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    refused: int = 0
    held: int = 0
    port: int = 0

    async def hook(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.hold:
            self.held += 1
            await asyncio.Event().wait()
        if self.refused < self.fails:
            self.refused += 1
            return web.Response(status=(503, 500, 429, 302)[self.refused % 4])
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.got.append((headers["ce-type"], headers, body))
        return web.Response(status=204)

    def ids(self, type_: str = "") -> list[str]:
        return [headers["ce-id"] for got, headers, _ in self.got if type_ in ("", got)]


@asynccontextmanager
async def serving(receiver: Receiver, port: int = 0) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/hook", receiver.hook)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port or free_port())
    await site.start()
    try:
        yield f"{site.name}/hook"
    finally:
        await runner.cleanup()


async def posted(file: Path, url: str, *arguments: object) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command("webhooks", file, url, *arguments), stderr=asyncio.subprocess.PIPE
    )
    _, told = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    return process.returncode or 0, told.decode()


async def test_webhooks_of_a_run_that_ended_reach_a_server_that_fails_first(
    ended: NatsServer, tmp_path: Path
) -> None:
    receiver, file = Receiver(fails=4), config_file(ended, tmp_path)
    chosen = {"step.trained", "policy.published", "run.stopped"}  # whose version is the recorded one
    async with serving(receiver) as url:
        code, told = await posted(file, url, *(a for t in sorted(chosen) for a in ("--type", t)))
        assert code == 0, told
        assert receiver.refused == 4
        expected = [m for m in demo_messages() if m.headers["ce-type"] in chosen]
        assert len(expected) == 11
        for message, (type_, headers, body) in zip(expected, receiver.got, strict=True):
            assert type_ == message.headers["ce-type"]
            assert body == message.body
            given = {name: value for name, value in message.headers.items() if name.startswith("ce-")}
            assert {name: headers[name] for name in given} == given
            assert headers["content-type"] == "application/json"
            assert EXPECTED_LAST.lower() not in headers
        # The broker keeps the place: nothing is new.
        code, told = await posted(file, url, *(a for t in sorted(chosen) for a in ("--type", t)))
        assert (code, len(receiver.got)) == (0, 11), told


async def test_a_webhook_that_gives_up_goes_on_with_the_same_event(ended: NatsServer, tmp_path: Path) -> None:
    receiver, file = Receiver(fails=10_000), config_file(ended, tmp_path)
    arguments = ("--name", "impatient", "--type", "step.trained")
    async with serving(receiver) as url:
        code, told = await posted(file, url, *arguments, "--patience", 0.5)
        assert code == 1
        assert "webhooks: gave up: event" in told
        assert "the URL answered" in told
        assert "Traceback" not in told
        receiver.fails = 0
        code, told = await posted(file, url, *arguments)
        assert code == 0, told
    assert receiver.ids() == [e.id for e in demo_events() if e.fact.type == "step.trained"]


async def test_webhooks_killed_in_the_midst_lose_nothing(
    running: NatsServer, tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    receiver, file = Receiver(), config_file(running, tmp_path)
    arguments = ("--type", "sequence.finished")
    async with serving(receiver) as url:
        first = subprocess.Popen(command("webhooks", file, url, *arguments), stderr=subprocess.DEVNULL)
        processes.append(first)
        await until(lambda: len(receiver.got) >= 20, "20 posts", first)
        receiver.hold = True
        await until(lambda: receiver.held > 0, "a post in flight", first)
        first.send_signal(signal.SIGKILL)
        first.wait(20)
        seen = set(receiver.ids())
        receiver.hold = False
        second = subprocess.Popen(command("webhooks", file, url, *arguments), stderr=subprocess.DEVNULL)
        processes.append(second)
        await publish_raw(running, list(demo_messages()[HALF:]))
        await until(lambda: second.poll() is not None, "the end of the run")
        assert second.returncode == 0
    ids, expected = receiver.ids(), [event.id for event in FINISHED]
    assert list(dict.fromkeys(ids)) == expected, "every event, in order of its first post"
    # At least once, not over and over: what was in flight, and what a quick reader had not acknowledged yet.
    assert len(ids) - len(expected) < len(seen)


async def test_webhooks_of_a_server_that_is_away_wait_for_it(
    running: NatsServer, tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    receiver, file = Receiver(), config_file(running, tmp_path)
    async with serving(receiver) as url:
        process = subprocess.Popen(
            command("webhooks", file, url, "--type", "sequence.finished"), stderr=subprocess.DEVNULL
        )
        processes.append(process)
        await until(lambda: len(receiver.got) >= 20, "20 posts", process)
        running.kill()
        running.start()
        await publish_raw(running, list(demo_messages()[HALF:]))
        await until(lambda: process.poll() is not None, "the end of the run")
        assert process.returncode == 0
    assert list(dict.fromkeys(receiver.ids())) == [event.id for event in FINISHED]


def mean_rewards() -> list[str]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for event in FINISHED:
        assert isinstance(event.fact, SequenceFinished)
        rewards[event.fact.source].append(event.fact.reward)
    return [f"{s} {len(r)} {sum(r) / len(r):.6f}" for s, r in sorted(rewards.items())]


def plain(server: NatsServer) -> tuple[str, ...]:
    return ("--nats", server.broker.url, "--token-file", server.broker.token_file, "--run", RUN)


def test_a_consumer_without_our_code_reads_a_run_that_ended(ended: NatsServer, tmp_path: Path) -> None:
    assert finished("plain_nats", *plain(ended)).splitlines() == [*mean_rewards(), "skipped {}"]
    imported = {
        (name if isinstance(node, ast.ImportFrom) and (name := node.module) else alias.name).partition(".")[0]
        for node in ast.walk(ast.parse((CONSUMERS / "plain_nats.py").read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported - set(sys.stdlib_module_names) == {"nats"}


def test_a_consumer_without_our_code_understands_what_runs_write_today() -> None:
    versions = runpy.run_path(str(CONSUMERS / "plain_nats.py"))["VERSIONS"]
    assert [type_ for type_, known in versions.items() if str(FACTS[type_].version) not in known] == []


async def test_a_consumer_without_our_code_keeps_the_rules(
    running: NatsServer, tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """Strangers write: a copy without compare-and-set, rubbish, a newer version, a second event; and the server is killed."""
    client = await nats.connect(running.broker.url, token=running.token)
    js = client.jetstream()
    message = next(m for m in demo_messages() if m.headers["ce-type"] == "sequence.finished")
    other = json.loads(message.body) | {"sequence": "arithmetic-900000-0", "sample": "arithmetic-900000"}
    subject = f"rl.{RUN}.sequence.finished.{other['source']}.{other['sequence']}"
    good = {k: v for k, v in message.headers.items() if not k.startswith("Nats-")}
    checked = {**good, EXPECTED_LAST: "0"}
    bare = await js.publish(message.subject, message.body, headers=good)
    await js.publish(message.subject, message.body, headers={**good, EXPECTED_LAST: str(bare.seq)})
    await js.publish(subject, b'{"reward": 1', headers=checked)
    await js.publish(f"{subject}0", json.dumps(other).encode(), headers=checked)
    await js.publish(f"{subject}1", b"{}", headers={**checked, "ce-typeversion": "99"})
    await client.close()
    out = tmp_path / "out"
    with out.open("wb") as stdout:
        process = subprocess.Popen(command("plain_nats", *plain(running)), stdout=stdout)
    processes.append(process)
    while not any(await delivered(running)):
        assert process.poll() is None
    running.kill()
    running.start()
    client = await nats.connect(running.broker.url, token=running.token)
    try:
        for late in demo_messages()[HALF:]:
            await client.jetstream().publish(late.subject, late.body, headers=late.headers)
    finally:
        await client.close()
    await until(lambda: process.poll() is not None, "the end of the run")
    assert process.returncode == 0
    lines = out.read_text().splitlines()
    assert lines[-3:-1] == mean_rewards()
    skipped = {
        "published without compare-and-set": 1, "not the first event on its subject": 1, "invalid": 2,
        "unknown type or version": 1,
    }  # fmt: skip
    assert lines[-1] == f"skipped {skipped}"


async def delivered(server: NatsServer) -> set[int]:
    """The stream sequences that the consumers of the run's stream have got to."""
    client = await nats.connect(server.broker.url, token=server.token)
    try:
        found = await client.jetstream().consumers_info(f"RL_{RUN}")
        return {each.delivered.stream_seq for each in found if each.delivered is not None}
    finally:
        await client.close()


def test_the_recorded_run_has_stopped() -> None:
    assert isinstance(demo_events()[-1].fact, RunStopped)
