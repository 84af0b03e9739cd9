"""`packtrain runs`: what is listed, and what stop, resume, cancel and rm do to real runs with real launchers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from pipeline.config import dumps, load
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.bucket import ensure_bucket
from schemas.config import Broker
from schemas.config import Store as StoreConfig
from schemas.facts import RunStarted, RunStopped, StepTrained
from schemas.payload import Ref
from services.cli import archive, launcher, run_control, run_removal
from services.cli.embedded import DirectoryLock, LaunchError
from services.cli.launcher import find_launcher
from services.cli.reach import embedded_broker
from services.cli.run_list import list_runs
from services.cli.where import Where
from tests import commands
from tests.launched import CHAT_ONLY, Launched
from tests.natsserver import NatsServer
from tests.s3server import S3Server

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


def packtrain(*arguments: str | Path, status: int = 0, fresh: bool = False) -> str:
    """What the command printed; stderr when it has to fail."""
    done = commands.packtrain(*arguments, timeout_s=90, fresh=fresh)
    assert done.returncode == status, done.stderr + done.stdout
    return done.stderr if status else done.stdout


def rows(*arguments: str | Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in packtrain("runs", "list", "--json", *arguments).splitlines()]


def recorded(directory: Path, run: str, broker: Broker) -> Path:
    """A run's record as its launcher leaves it."""
    store = StoreConfig(url=(directory / "objects").as_uri())
    config = load(DEMO).model_copy(
        update={"run": run, "directory": str(directory), "broker": broker, "store": store}
    )
    home = directory / "runs" / run
    home.mkdir(parents=True)
    (home / "config.toml").write_text(dumps(config))
    (home / "logs").mkdir()
    return home


async def begin(broker: Broker, run: str, steps: int = 0, reason: str | None = None) -> str:
    """A log with so many steps; the id of its first event."""
    log = await Log.connect(broker, run, "test")
    await log.create()
    started = await log.publish(RunStarted(run=run, config=load(DEMO).decisions()))
    ref = Ref(key="k", bytes=1, crc32c=1)
    for step in range(1, steps + 1):
        await log.publish(
            StepTrained(
                step=step, parent=None, weights=ref, optimizer=ref, loss=0.0, grad_norm=0.0, kl=0.0, loss_tokens=1, seconds=0.1
            )
        )  # fmt: skip
    if reason is not None:
        await log.publish(RunStopped.model_validate({"run": run, "reason": reason, "steps": steps}))
    await log.close()
    return started.event.id


@pytest.fixture
def server(tmp_path: Path):
    server = NatsServer(tmp_path / "server", sync="2m")
    server.start()
    yield server
    server.stop()


def place(server: NatsServer) -> tuple[str, ...]:
    return ("--nats", server.broker.url, "--nats-token-file", server.broker.token_file)


async def test_the_list_tells_every_run_of_a_broker_the_newest_last(
    server: NatsServer, tmp_path: Path
) -> None:
    await begin(server.broker, "done", 5, "completed")
    await begin(server.broker, "half", 2)
    await begin(server.broker, "ended", 1, "cancelled")
    log = await Log.connect(server.broker, "empty", "test")
    await log.create()
    # What is no event hides no fact: not the newest, and not the one whose subject it is on.
    await log.js.publish("rl.empty.rubbish.a.b.c", b"")
    await log.js.publish("rl.half.rubbish.a.b.c", b"")
    await log.js.publish("rl.ended.run.stopped.all.ended", b"rubbish")
    await log.js.publish("rl.done.step.trained.all.000005", b"rubbish")
    await log.js.add_stream(name="RL_not legal".replace(" ", "_") + "$", subjects=["other"])
    await log.js.add_stream(name="KV_RL_done", subjects=["kv"])
    await log.close()
    found = rows(*place(server), "--directory", tmp_path)
    told = [(r["run"], r["state"], r["steps"], r["wanted"], r["events"]) for r in found]
    assert told == [
        ("empty", "not begun", 0, None, 1),
        ("done", "completed", 5, 5, 8),
        ("half", "unfinished", 2, 5, 4),
        ("ended", "cancelled", 1, 5, 4),
    ]
    assert [row["last"] for row in found] == [None, "run.stopped", "step.trained", "run.stopped"]
    lines = packtrain("runs", "list", *place(server), "--directory", tmp_path, fresh=True)
    assert "2/5" in lines
    assert "\x1b" not in lines


async def test_a_broker_that_is_away_is_told_for_its_runs_and_the_others_are_listed(
    server: NatsServer, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    recorded(home, "here", server.broker)
    recorded(home, "away", Broker(url="nats://127.0.0.1:9"))
    recorded(home, "lost", server.broker)
    await begin(server.broker, "here", 1)
    await begin(server.broker, "of-somebody-else")
    states = {row["run"]: row["state"] for row in rows("--directory", home)}
    assert states == {
        "here": "unfinished",
        "away": "broker nats://127.0.0.1:9 not reachable",
        "lost": "no log",
    }
    assert "not reachable" in packtrain("runs", "list", "--nats", "nats://127.0.0.1:9", status=1)


async def test_hundreds_of_runs_are_listed_fast(server: NatsServer, tmp_path: Path) -> None:
    await asyncio.gather(*(begin(server.broker, f"run-{i}", i % 3) for i in range(300)))
    began = time.monotonic()
    assert len(rows(*place(server), "--directory", tmp_path)) == 300
    assert time.monotonic() - began < 10


async def test_cancel_ends_a_run_of_any_broker_once(server: NatsServer, tmp_path: Path) -> None:
    await begin(server.broker, "far", 3)
    where = (*place(server), "--directory", tmp_path)
    said = packtrain("runs", "stop", "far", "--cancel", *where, fresh=True)
    assert said == "run far is cancelled after 3 steps\n"
    assert "over already: cancelled after 3 steps" in packtrain("runs", "stop", "far", "--cancel", *where)
    assert rows(*where)[0]["state"] == "cancelled"
    assert "has no run 'none'" in packtrain("runs", "stop", "none", "--cancel", *where, status=1)
    hint = f"stop far --cancel --directory {tmp_path} ends it for good"
    assert hint in packtrain("runs", "stop", "far", "--directory", tmp_path, status=1)


async def test_cancel_waits_for_no_launcher_of_another_broker(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(server.broker, "twin", 1)
    home = recorded(tmp_path, "twin", Broker(url="nats://127.0.0.1:9"))
    monkeypatch.setattr(run_control, "STOP_S", 0.1)
    said: list[str] = []
    with DirectoryLock(tmp_path):  # as its launcher, which runs the other twin and goes on
        (home / "processes.json").write_text(json.dumps({"launcher": os.getpid()}))
        await asyncio.to_thread(run_control.cancel, tmp_path, "twin", server.broker, said.append)
    assert said == ["run twin is cancelled after 1 step"]


@pytest.mark.parametrize("run", ["../other", "a/b", "RL_*", "", "a b", "x" * 129])
@pytest.mark.parametrize("command", [("stop",), ("stop", "--cancel"), ("resume",), ("rm", "--yes")])
def test_what_is_no_name_is_refused(tmp_path: Path, command: tuple[str, ...], run: str) -> None:
    assert "is not a legal name" in packtrain("runs", *command, "--directory", tmp_path, "--", run, status=2)


async def test_rm_removes_all_of_one_run_and_nothing_of_another(server: NatsServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    store = ObjectStore.open(StoreConfig(url=(home / "objects").as_uri()))
    for run in ("one", "one-2"):
        recorded(home, run, server.broker)
        name = await begin(server.broker, run, 1)
        await store.create(f"runs/{run}/run.json", orjson.dumps({"log": name}))
        await store.create(f"runs/{run}/payloads/a/b.safetensors", b"x" * 1000)
        (home / "secrets").mkdir(exist_ok=True)
        (home / f"secrets/run-key-{run}").write_text("secret")
    log = await Log.connect(server.broker, "one", "test")
    bucket = await log.js.create_key_value(bucket="RL_one")
    await bucket.put("a", b"b")
    where = ("--directory", home)
    assert "--yes removes it" in packtrain("runs", "rm", "one", *where, status=1)
    assert await log.exists()
    said = packtrain("runs", "rm", "one", "--yes", *where, fresh=True)
    assert "removed run one: 2 events" in said
    assert "2 objects (1.0 KiB)" in said
    assert sorted(info.config.name or "" for info in await log.js.streams_info()) == ["RL_one-2"]
    await log.close()
    left = {str(path.relative_to(home)) for path in home.rglob("*") if "one" in path.name}
    assert left == {"objects/runs/one-2", "runs/one-2", "secrets/run-key-one-2"}
    assert sorted([key async for key, _ in store.list()]) == [
        "runs/one-2/payloads/a/b.safetensors",
        "runs/one-2/run.json",
    ]
    assert "has no run 'one'" in packtrain("runs", "rm", "one", "--yes", *where, status=1)


async def test_rm_finishes_what_was_interrupted_and_leaves_the_objects_of_another_log(
    server: NatsServer, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    store = ObjectStore.open(StoreConfig(url=(home / "objects").as_uri()))
    recorded(home, "cut", server.broker)
    await store.create("runs/cut/payloads/a", b"1")  # its claim, stream and secrets are gone already
    assert "1 object (1 B)" in packtrain("runs", "rm", "cut", "--yes", "--directory", home)
    assert [path for path in home.rglob("*") if path.is_file() and path.name != "lock"] == []
    recorded(home, "twin", server.broker)
    await begin(server.broker, "twin")
    await store.create("runs/twin/run.json", orjson.dumps({"log": "of another broker"}))
    said = packtrain("runs", "rm", "twin", "--yes", "--directory", home)
    assert f"the objects below runs/twin stay in {store.url}: they are of another run twin" in said
    assert [key async for key, _ in store.list()] == ["runs/twin/run.json"]


async def test_rm_leaves_objects_whose_claim_names_a_log_that_is_not_in_the_broker(
    server: NatsServer, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    store = ObjectStore.open(StoreConfig(url=(home / "objects").as_uri()))
    # As a launcher leaves it that was refused the store: a record, and no log, or one that has not begun.
    for run in ("refused", "not-begun"):
        recorded(home, run, server.broker)
        await store.create(f"runs/{run}/run.json", orjson.dumps({"log": "of another broker"}))
        await store.create(f"runs/{run}/weights/000001", b"dear")
    log = await Log.connect(server.broker, "not-begun", "test")
    await log.create()
    await log.close()
    for run in ("refused", "not-begun"):
        said = packtrain("runs", "rm", run, "--yes", "--directory", home)
        assert f"the objects below runs/{run} stay" in said
        assert sorted([key async for key, _ in store.list(f"runs/{run}")]) == [
            f"runs/{run}/run.json",
            f"runs/{run}/weights/000001",
        ]


async def test_a_copied_directory_is_its_own_and_rm_in_it_leaves_the_original(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    async with embedded_broker(original) as broker:
        recorded(original, "one", broker)
        name = await begin(broker, "one", 1)
    store = ObjectStore.open(StoreConfig(url=(original / "objects").as_uri()))
    await store.create("runs/one/run.json", orjson.dumps({"log": name}))
    shutil.copytree(original, copy)
    (original / "nats.log").unlink()
    assert "run.started" in packtrain("events", "list", "--directory", copy)
    said = packtrain("runs", "rm", "one", "--yes", "--directory", copy)
    assert "2 events" in said
    assert "1 object" in said
    assert str(original) not in said
    assert not (original / "nats.log").exists(), "the original's broker was started"
    assert [row.run for row in await list_runs(copy, None)] == []
    assert [key async for key, _ in store.list()] == ["runs/one/run.json"]
    assert [(row.run, row.events) for row in await list_runs(original, None)] == [("one", 2)]


async def test_the_broker_of_a_directory_listens_when_it_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with embedded_broker(tmp_path) as broker:
        await begin(broker, "one")
    assert [r.getMessage() for r in caplog.records if "Connect call failed" in r.getMessage()] == []


async def test_rm_waits_for_no_launcher_that_is_about_to_begin(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    async with embedded_broker(home) as broker:
        # Its lock is held, and no record of processes says by whom: so it is between its first step and its services.
        recorded(home, "one", broker)
        await begin(broker, "one", 1)
        said = packtrain("runs", "rm", "one", "--yes", "--directory", home, status=1)
        assert f"in use by process {os.getpid()}" in said
    assert [row.run for row in await list_runs(home, None)] == ["one"]


async def test_rm_looks_again_after_the_answer(server: NatsServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    recorded(home, "one", server.broker)
    await begin(server.broker, "one", 1)

    def ask(told: str) -> bool:
        # While a person reads, somebody goes on with the run.
        asyncio.run(begin(server.broker, "one", 2))
        return True

    def remove() -> None:
        run_removal.remove(home, "one", None, lambda told: _elsewhere(ask, told), print)

    with pytest.raises(LaunchError, match="changed"):
        await asyncio.to_thread(remove)
    assert [(row.run, row.steps) for row in await list_runs(home, None)] == [("one", 2)]


async def test_rm_leaves_a_run_whose_launcher_began_while_it_asked(
    server: NatsServer, tmp_path: Path
) -> None:
    recorded(tmp_path, "one", server.broker)
    await begin(server.broker, "one", 1)
    began: list[subprocess.Popen[bytes]] = []

    def ask(told: str) -> bool:
        with (tmp_path / "lock").open("w") as held:
            began.append(subprocess.Popen(["sleep", "60"], stdin=held))
        (tmp_path / "lock").write_text(f"{began[0].pid}\n")
        return True

    try:
        with pytest.raises(LaunchError, match="in use by process"):
            await asyncio.to_thread(run_removal.remove, tmp_path, "one", None, ask, print)
        assert [row.events for row in await list_runs(tmp_path, None)] == [2]
    finally:
        began[0].kill()
        began[0].wait()


def _elsewhere(ask, told: str) -> bool:
    """The answer of somebody who has an event loop of his own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask, told).result()


def test_rm_follows_no_link_out_of_the_directory(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    (home / "runs").mkdir(parents=True)
    (other / "dear").mkdir(parents=True)
    (home / "runs" / "one").symlink_to(other)
    (home / "nats").mkdir()
    said = packtrain("runs", "rm", "one", "--yes", "--directory", home, status=1)
    assert "is a link" in said
    assert (other / "dear").is_dir()


async def test_rm_refuses_a_run_whose_services_are_at_work(server: NatsServer, tmp_path: Path) -> None:
    await begin(server.broker, "busy")
    log = await Log.connect(server.broker, "busy", "test")
    work = await log.work("grader", "sample.completed", ack_wait_s=5.0)
    pulling = asyncio.create_task(work.fetch(1, 30.0))
    while not (await log.js.consumer_info(log.stream, "grader")).num_waiting:
        await asyncio.sleep(0.01)
    where = (*place(server), "--directory", tmp_path)
    said = packtrain("runs", "rm", "busy", "--yes", *where, status=1)
    assert "run busy is running: its consumers grader are being read" in said
    pulling.cancel()
    await log.close()
    assert "no record here names the run's store" in packtrain("runs", "rm", "busy", "--yes", *where)


@pytest.mark.parametrize("kind", ["file", "s3"])
async def test_removed_objects_are_gone_the_others_stay_and_a_second_time_is_no_error(
    kind: str, tmp_path: Path
) -> None:
    server = S3Server(tmp_path / "s3") if kind == "s3" else None
    config = StoreConfig(url=(tmp_path / "objects").as_uri())
    try:
        if server is not None:
            server.start()
            config = StoreConfig(
                url="s3://removal/x", endpoint=server.endpoint, credentials_file=str(server.credentials_file)
            )
            await asyncio.to_thread(ensure_bucket, config)
        store = ObjectStore.open(config)
        keys = [f"runs/a/{i}" for i in range(1200)]
        await asyncio.gather(*(store.create(key, b"x") for key in [*keys, "runs/b/1"]))
        await store.remove([*keys[:1100], "runs/a/never-there"])
        assert sorted([key async for key, _ in store.list("runs")]) == sorted([*keys[1100:], "runs/b/1"])
        await store.remove(keys)
        assert [key async for key, _ in store.list("runs")] == ["runs/b/1"]
    finally:
        if server is not None:
            server.stop()


def test_only_the_holder_of_the_lock_is_a_launcher(tmp_path: Path) -> None:
    home = tmp_path / "runs" / "r"
    home.mkdir(parents=True)
    record = home / "processes.json"
    (tmp_path / "lock").write_text(f"{os.getpid()}\n")
    record.write_text(json.dumps({"launcher": os.getpid()}))
    assert find_launcher(tmp_path) is None  # our number, but we do not hold it
    with DirectoryLock(tmp_path):
        found = find_launcher(tmp_path)
        assert found is not None
        assert (found.pid, found.run) == (os.getpid(), "r")
        os.utime(record, (1, 1))
        assert find_launcher(tmp_path) is None  # the record of a process that had our number before
        record.write_text(json.dumps({"launcher": 1}))
        assert find_launcher(tmp_path) is None
        record.write_text("{")
        assert find_launcher(tmp_path) is None


def test_stop_signals_nobody_but_the_launcher_that_was_found(tmp_path: Path) -> None:
    """Between finding and signalling, its number became another's, or the directory got another launcher."""
    home = tmp_path / "runs" / "r"
    home.mkdir(parents=True)
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        (tmp_path / "lock").write_text(f"{stranger.pid}\n")
        (home / "processes.json").write_text(json.dumps({"launcher": stranger.pid}))
        launcher.stop(tmp_path, launcher.Launcher(stranger.pid, "r"), 0.1)
        # It may hold the lock by now, with another run.
        with (tmp_path / "lock").open() as held:
            other = subprocess.Popen(["sleep", "60"], stdin=held)
        try:
            (tmp_path / "lock").write_text(f"{other.pid}\n")
            (home / "processes.json").write_text(json.dumps({"launcher": other.pid}))
            assert find_launcher(tmp_path) == launcher.Launcher(other.pid, "r")
            launcher.stop(tmp_path, launcher.Launcher(other.pid, "before"), 0.1)
            assert (stranger.poll(), other.poll()) == (None, None)
            launcher.stop(tmp_path, launcher.Launcher(other.pid, "r"), 10.0)
            assert other.wait(10) == -signal.SIGTERM
        finally:
            other.kill()
            other.wait()
    finally:
        stranger.kill()
        stranger.wait()


async def move(source: Path, target: Path, file: Path, payloads: bool) -> None:
    await asyncio.to_thread(archive.export, Where(directory=source, run="small"), file, payloads, print)
    place = archive.Target(target, Broker(), StoreConfig())
    await asyncio.to_thread(archive.import_file, file, place, print)


@pytest.mark.timeout(300)  # whole runs, on a machine that may be busy
async def test_a_run_is_stopped_resumed_and_completed_then_removed(tmp_path: Path) -> None:
    launched = Launched(tmp_path / "here", CHAT_ONLY.replace("steps = 2", "steps = 4"))
    where = ("--directory", tmp_path / "here" / "state")
    launched.start()
    log = await launched.log()
    # Without its trainer it is not over before it is stopped, on a machine that has other work.
    trainer = await launched.pid("trainer-0")
    os.kill(trainer, signal.SIGSTOP)
    async for _ in log.subscribe("sequence.finished"):
        break
    # In this process: the run is over in seconds.
    state = Path(where[1])
    assert [(row.run, row.state) for row in await list_runs(state, None)] == [("small", "running")]
    with pytest.raises(LaunchError, match=r"run small is running \(launcher \d+\)"):
        run_removal.remove(state, "small", None, lambda _: True, print)
    with pytest.raises(LaunchError, match="runs small"):
        run_control.stop(state, "other", print)
    told: list[str] = []
    os.kill(trainer, signal.SIGCONT)
    await asyncio.to_thread(run_control.stop, state, "small", told.append)
    assert told == [
        f"run small is stopped and unfinished; packtrain runs resume small --directory {state} goes on with it"
    ]
    assert launched.finish(1) == 130
    await log.close()
    assert [row.state for row in await list_runs(state, None)] == ["unfinished"]
    with pytest.raises(LaunchError, match="no launcher runs in"):
        run_control.stop(state, "small", print)
    # Its events alone, elsewhere: to be read, but not to go on with.
    events_only = tmp_path / "events"
    await move(state, events_only, tmp_path / "events.tar", payloads=False)
    refused = packtrain("runs", "resume", "small", "--plain", "--directory", events_only, status=1)
    assert "does not hold its objects" in refused
    # All of it, elsewhere: it goes on there, and comes to its end; and so does the one that was stopped here.
    elsewhere = tmp_path / "elsewhere"
    await move(state, elsewhere, tmp_path / "all.tar", payloads=True)
    for there in (elsewhere, state):
        said = packtrain("runs", "resume", "small", "--plain", "--directory", there)
        assert "it goes on where it stopped" in said
        assert [(row.state, row.steps) for row in await list_runs(there, None)] == [("completed", 4)]
        assert not (there / "runs" / "small" / "journal").exists()
    packtrain("runs", "rm", "small", "--yes", *where)
    # What is left of a stream the broker clears away beside its other work, now or when it is started again.
    async with asyncio.timeout(60):
        while list(state.rglob("*small*")):
            assert await list_runs(state, None) == []


@pytest.mark.timeout(300)  # whole runs, on a machine that may be busy
async def test_a_cancelled_run_ends_its_launcher_and_is_over(tmp_path: Path) -> None:
    launched = Launched(tmp_path, CHAT_ONLY)
    where = ("--directory", tmp_path / "state")
    launched.start()
    log = await launched.log()
    async for _ in log.subscribe("sequence.dispatched"):
        break
    assert "run small is cancelled after 0 steps" in packtrain("runs", "stop", "small", "--cancel", *where)
    assert launched.finish(1) == 1
    await log.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in launched.pids().values())
    assert [row["state"] for row in rows(*where)] == ["cancelled"]
    assert "is over" in packtrain("runs", "resume", "small", *where, status=1, fresh=True)
