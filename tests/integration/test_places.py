"""Services that are given no index, as processes: packers that take the places of one directory, hosts named by their machine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest

from pipeline.feed.feed import open_feed
from pipeline.feed.server import SocketTaken
from pipeline.hosts.report import reports
from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import Broker, RunConfig
from schemas.facts import SequenceFinished, SequenceOpened
from services.cli.status import status_of
from tests.log_parts import until
from tests.packer_parts import check, packer, take, yield_batch
from tests.rollout_stage import by_expression, spawn, staged, write_config

pytestmark = pytest.mark.timeout(120)


class Spawned:
    """A service as a process, with a directory of its own for what it says."""

    def __init__(self, config: RunConfig, home: Path, *arguments: str) -> None:
        home.mkdir()
        self._log = home / f"{arguments[0]}.log"
        self.process = spawn(write_config(config, home), *arguments)

    def written(self) -> str:
        return self._log.read_text()

    def said(self) -> list[str]:
        """Messages so far."""
        if not self._log.exists():
            return []
        lines = self._log.read_text().splitlines(keepends=True)
        return [orjson.loads(line)["message"] for line in lines if line.endswith("\n")]

    async def says(self, text: str) -> str:
        """The first message that has the text, once there is one."""

        def found() -> str:
            assert self.process.poll() is None, self._log.read_text()
            return next((line for line in self.said() if text in line), "")

        await until(lambda: bool(found()), poll_s=0.02)
        return found()

    async def stopped(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, 30)


@contextmanager
def ending(spawned: list[Spawned]) -> Iterator[list[Spawned]]:
    try:
        yield spawned
    finally:
        for each in spawned:
            each.process.kill()
            each.process.wait()


async def test_of_three_packers_two_serve_and_the_third_takes_the_place_of_one_that_is_killed(
    packer_config: RunConfig, log: Log, store: ObjectStore, tmp_path: Path, sockets: Path
) -> None:
    await yield_batch(log, store, 1)
    config = packer_config.model_copy(
        update={"metrics": packer_config.metrics.model_copy(update={"bind": "127.0.0.1:0"})}
    )
    with ending([Spawned(config, tmp_path / f"p{i}", "packer") for i in range(3)]) as packers:
        said = await asyncio.gather(*(asyncio.create_task(_place(each)) for each in packers))
        assert sorted(said) == [
            f"packer 0 of 2, at {sockets}/packer-0.sock",
            f"packer 1 of 2, at {sockets}/packer-1.sock",
            f"standing by: all 2 places in {sockets} are taken",
        ]
        spare = packers[said.index(next(line for line in said if "standing by" in line))]
        assert await _ready(spare) == 200
        victim = packers[said.index(f"packer 0 of 2, at {sockets}/packer-0.sock")]
        with open_feed(config, 0, timeout_s=40) as feed:
            asked = asyncio.create_task(asyncio.to_thread(take, feed, 1))
            check(1, 0, await asked)
            victim.process.kill()
            assert victim.process.wait() == -signal.SIGKILL
            # On the same connection's end: the rank asks whoever serves there now.
            check(1, 0, await asyncio.to_thread(take, feed, 1))
        assert await spare.says("packer 0 of 2") == f"packer 0 of 2, at {sockets}/packer-0.sock"
        assert sum("standing by" in line for line in spare.said()) == 1
        # Nobody took the other one's.
        with open_feed(config, 1, timeout_s=40) as feed:
            check(1, 1, await asyncio.to_thread(take, feed, 1))
        with pytest.raises(SocketTaken, match=r"stop it, or set packer\.socket_dir to another directory"):
            async with packer(config, log, store, index=1) as told:
                await told
        late = Spawned(config, tmp_path / "p3", "packer")
        packers.append(late)
        await late.says("standing by")
        assert await late.stopped() == 0


async def _place(packer: Spawned) -> str:
    await until(lambda: any("packer-" in m or "standing" in m for m in packer.said()), poll_s=0.02)
    return next(m for m in packer.said() if "packer-" in m or "standing" in m)


async def _ready(packer: Spawned) -> int:
    """What its /readyz answers."""
    metrics = (await packer.says("metrics at")).rpartition(" ")[2]
    async with (
        aiohttp.ClientSession() as session,
        session.get(metrics.replace("/metrics", "/readyz")) as answer,
    ):
        return answer.status


async def test_hosts_are_named_by_their_machine_and_reached_where_the_broker_sees_it(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> None:
    async with staged(tmp_path, broker, run_name, log, store, by_expression) as make:
        s = make(bind="0.0.0.0")
        hosts = [
            Spawned(s.config, tmp_path / "loop", "agent-loop"),
            *(Spawned(s.config, tmp_path / f"tools-{i}", "harness", "--pool", "tools") for i in range(2)),
        ]
        with ending(hosts):
            sequence = await s.dispatch("calc")
            finished = await s.outcome("calc", sequence)
            opened = (await s.facts("sequence.opened"))[0]
            async with asyncio.timeout(40):
                while len(found := (await reports(log))[0]) < 3:
                    await asyncio.sleep(0.05)
            assert [await host.stopped() for host in hosts] == [0, 0, 0]
    assert isinstance(finished, SequenceFinished), finished
    assert isinstance(opened, SequenceOpened)
    assert urlsplit(opened.base_url).hostname == "127.0.0.1"
    loop, first, second = (report.host for report in found)
    assert loop.startswith("agent-loop-")
    assert first.startswith("harness-tools-")
    assert second == f"{first}-2"
    assert opened.host.startswith(f"al-{loop.removeprefix('agent-loop-')}-")
    told = {row.host: row.silent for row in status_of(s.config, found, 0, datetime.now(UTC)).rows}
    assert told["harness-chats-0"], "numbered hosts of other pools are missed"
    assert not {"agent-loop-0", "harness-tools-0"} & set(told)
