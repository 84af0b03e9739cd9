"""A teacher service that is killed at its work: each sequence is scored, and answered once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path

from aiohttp import web

from pipeline.config import dumps
from pipeline.engines.tiny.engine import TinyEngine
from pipeline.engines.tiny.server import create_app, serve
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.config import Broker
from schemas.facts import SequenceScored
from tests.teacher_parts import answers, finished, teaching, tokens
from tests.tiny_engine_parts import random_policy

ROOT = Path(__file__).parents[2]
ROWS = [(tokens(40), [(5, 9), (30, 40)])]
SERVICE = """
import sys
from pathlib import Path
from services import teacher
from services.cli.service import serve
teacher.ACK_WAIT_S = 2.0
serve("teacher", Path(sys.argv[1]), 0, "")
"""


class Held:
    """A teacher that answers so many requests and then holds its answers back, until it is let. arrived: their sequences."""

    def __init__(self, policy: Path, free: int) -> None:
        self.arrived: list[str] = []
        self._free, self._open, self._grown = free, asyncio.Event(), asyncio.Condition()
        self.app = create_app(TinyEngine(policy))

        @web.middleware
        async def hold(request: web.Request, handler) -> web.StreamResponse:
            if request.method == "POST":
                await self._held(request.headers["X-Session-ID"])
            return await handler(request)

        self.app.middlewares.append(hold)

    def let(self) -> None:
        self._open.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(60), self._grown:
            await self._grown.wait_for(lambda: len(set(self.arrived)) >= count)

    async def _held(self, name: str) -> None:
        async with self._grown:
            self.arrived.append(name)
            answered = len(self.arrived) <= self._free
            self._grown.notify_all()
        if not answered:
            await self._open.wait()


async def started(file: Path, log: Path) -> Process:
    with log.open("ab") as out:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVICE, str(file), cwd=ROOT, stdout=out, stderr=out
        )


async def test_a_killed_teacher_service_loses_no_sequence_and_answers_none_twice(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> None:
    held = Held(random_policy(tmp_path), free=2)
    runner, port = await serve(held.app, "127.0.0.1", 0, None)
    large = {"name": "large", "kind": "vllm", "url": f"http://127.0.0.1:{port}", "top_k": 2, "concurrency": 2}
    config = teaching(tmp_path, broker, run_name, [large], math=["large"])
    file = tmp_path / "config.toml"
    file.write_text(dumps(config))
    facts = [await finished(store, run_name, "math", member, ROWS) for member in range(6)]
    await log.publish_all([(fact, None) for fact in facts])
    first = await started(file, tmp_path / "first.log")
    second: Process | None = None
    try:
        # Two are answered, two more are with the teacher.
        await held.wait_for(4)
        assert len(await answers(log, 2)) == 2
        second = await started(file, tmp_path / "second.log")
        # The one beside it takes what nobody has.
        await held.wait_for(6)
        taken = held.arrived[2:4]
        first.kill()
        assert await first.wait() == -signal.SIGKILL
        held.let()
        found = await answers(log, 6)
        os.kill(second.pid, signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await second.wait() == 0, (tmp_path / "second.log").read_text()
    finally:
        held.let()
        for process in (first, second):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
        await runner.cleanup()
    # What was with the killed one was asked again, what it had answered was not.
    assert [held.arrived.count(name) for name in held.arrived[:2]] == [1, 1]
    assert min(held.arrived.count(name) for name in taken) >= 2
    head, told = await log.head(), []
    async for event in log.subscribe():
        if isinstance(event.fact, SequenceScored):
            told.append(event.fact.sequence)
        if event.seq >= head:
            break
    assert sorted(told) == [fact.sequence for fact in facts]
    rows = set()
    for fact in found.values():
        assert fact.scores is not None, fact.failure
        columns = await read_columns(store, fact.scores, ["logprobs", "top_ids", "top_logprobs"])
        rows.add(columns["logprobs"].tobytes())
    assert len(rows) == 1
