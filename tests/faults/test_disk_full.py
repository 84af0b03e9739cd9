"""A broker whose disk is full, for real: a small tmpfs in a namespace of the server's own.

nats-server 2.15 stores nothing in a stream after a failed write until it is restarted: so there is room again, and then a
restart, as a person (or the launcher, for the broker that it started) does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import Store as StoreConfig
from schemas.facts import SampleGraded
from tests.integration.test_publish import stored
from tests.launched import CHAT_ONLY, Launched, check_history, history
from tests.log_parts import Tries
from tests.natsserver import NatsServer

pytestmark = pytest.mark.timeout(150)


def graded(number: int) -> SampleGraded:
    return SampleGraded(
        source="math", sample=f"math-{number:06d}", grader="none", rewards=(), fallback=f"{number:06d}" * 60
    )


class SmallDisk:
    """A tmpfs of so many MiB in a mount namespace that outlives the server in it."""

    def __init__(self, directory: Path, mib: int) -> None:
        self.mount = directory / "disk"
        self.mount.mkdir()
        script = f"mount -t tmpfs -o size={mib}m tmpfs {self.mount} && echo ready && exec cat"
        self._holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._holder.stdout is not None
        self.refusal = self._holder.stdout.readline().decode().strip().removeprefix("ready")
        self.inside = Path(f"/proc/{self._holder.pid}/root{self.mount}")
        self.wrap = ["nsenter", f"--target={self._holder.pid}", "--user", "--mount", "--preserve-credentials"]

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path, 12)
    if disk.refusal:
        disk.close()
        pytest.skip(f"this machine allows no mount in a user namespace: {disk.refusal}")
    yield disk
    disk.close()


async def test_a_full_disk_is_waited_for_told_and_loses_nothing(
    disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = NatsServer(tmp_path / "server", wrap=disk.wrap, store=disk.mount / "js")
    server.start()
    log = await Log.connect(server.broker, "full", "writer")
    await log.create()
    ballast = disk.inside / "ballast"
    ballast.write_bytes(b"\0" * (11 * 1024 * 1024))
    total = 3000
    confirmed: list[int] = []
    tries = Tries(log)

    async def write() -> None:
        for number in range(0, total, 10):
            # Singly and in bursts: both meet the full disk.
            if number % 20:
                results = [await log.publish(graded(i)) for i in range(number, number + 10)]
            else:
                results = await log.publish_all([(graded(i), None) for i in range(number, number + 10)])
            assert all(r.won for r in results)
            confirmed.extend(r.event.seq for r in results)

    with caplog.at_level(logging.WARNING, "packtrain.log"):
        writing = asyncio.create_task(write())
        async with asyncio.timeout(60):
            while "storage is full" not in caplog.text:
                assert not writing.done(), "the disk never got full"
                await asyncio.sleep(0.05)
        before, began = tries.count, time.monotonic()
        await asyncio.wait([writing], timeout=4)
        assert tries.count - before <= 10 * (time.monotonic() - began + 2), "a busy loop"
        reached = len(confirmed)
        assert 0 < reached < total
        # Readers read on meanwhile: what was acknowledged is there.
        assert len(await stored(log)) >= reached
        assert "no space left on device" in server.told()
        ballast.unlink()
        server.stop()
        server.start()
        await asyncio.wait_for(writing, 60)
    assert len(set(confirmed)) == total
    events = await stored(log)
    assert [e.fact.id() for e in events] == [graded(i).id() for i in range(total)]
    alerts = [r for r in caplog.records if "storage is full" in r.message]
    assert len(alerts) == 1
    assert alerts[0].levelname == "ERROR"
    assert "restart nats-server" in alerts[0].message
    await log.close()
    server.stop()


def fill(ballast: Path) -> None:
    """Until nothing more can be written."""
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)


async def test_a_reader_that_comes_while_the_disk_is_full_waits_too(
    disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A service that is started again, or whose connection breaks, declares its consumer anew: that is a write of the broker."""
    server = NatsServer(tmp_path / "server", wrap=disk.wrap, store=disk.mount / "js")
    server.start()
    log = await Log.connect(server.broker, "full", "reader")
    await log.create()
    first = await log.publish(graded(1))
    await (await log.work("known", "sample.graded", ack_wait_s=30)).close()
    ballast = disk.inside / "ballast"
    fill(ballast)
    with caplog.at_level(logging.WARNING, "packtrain.log"):
        works = [
            asyncio.create_task(log.work(name, "sample.graded", ack_wait_s=30)) for name in ("known", "new")
        ]
        durable = log.subscribe(durable="d")
        subscribing = asyncio.ensure_future(anext(durable))
        waiting = [*works, subscribing]
        async with asyncio.timeout(30):
            while "storage is full" not in caplog.text:
                assert not [task for task in waiting if task.done()]
                await asyncio.sleep(0.05)
        assert len(await stored(log)) == 1
        await asyncio.wait(waiting, timeout=3, return_when=asyncio.FIRST_COMPLETED)
        assert not [task for task in waiting if task.done()]
        ballast.unlink()
        server.stop()
        server.start()
        async with asyncio.timeout(60):
            for work in works:
                [delivery] = await (await work).fetch(1, 10)
                assert delivery.event == first.event
            assert await subscribing == first.event
    assert len([r for r in caplog.records if "storage is full" in r.message]) == 1, caplog.text
    await log.close()
    server.stop()


async def test_a_run_waits_for_room_on_its_disk_and_goes_on_by_itself(
    disk: SmallDisk, tmp_path: Path
) -> None:
    # Without the tool's source: its sandbox may make no namespaces within this one.
    config = CHAT_ONLY.replace("dp = 1", "dp = 2").replace("groups = 2", "groups = 4")
    text = f'{config}\n[store]\nurl = "file://{tmp_path}/objects"\n'
    run = Launched(
        tmp_path / "run", text, wrap=disk.wrap, state=disk.mount / "state", seen=disk.inside / "state"
    )
    run.start()
    log = await run.log()
    ballast = disk.inside / "ballast"
    try:
        async for _ in log.subscribe("sequence.finished"):
            break
        fill(ballast)
        async with asyncio.timeout(60):
            while "the broker stores no events" not in run.told():
                await asyncio.sleep(0.05)
            # Stuck for good, were it not for the launcher: publishing fails until the broker is started again.
            stuck = await stored(log)
            while len(again := await stored(log)) > len(stuck):
                stuck = again
        ballast.unlink()
        events = await asyncio.wait_for(history(run, log), 90)
        await check_history(events, ObjectStore.open(StoreConfig(url=f"file://{tmp_path}/objects")), 2)
    finally:
        await log.close()
    assert await asyncio.to_thread(run.finish, 30) == 0, run.told()
    assert "has room again" in run.told()
    assert "broker is started again" in run.told()
