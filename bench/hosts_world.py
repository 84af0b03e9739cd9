"""The broker, the hosts and the trials of the benchmark of hosts."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from capture_world import child
from report import Figure

from pipeline.log import Log, end_tasks
from schemas.config import Broker, RunConfig
from schemas.facts import SequenceOpened, SequenceVerified
from schemas.names import attempt_id, sample_id, sequence_id

POOL = SOURCE = "bench"
HOST = "bench-loop"
"""The agent-loop host, to which the verdicts go: it is this process."""
ROOT = Path(__file__).resolve().parents[1]
TASKS = ROOT / "examples" / "tasks"
_WITHIN_S = 240.0
_TICK_S = 0.01


def figure(name: str, value: float, unit: str, goal: float, against: float, better: str = "lower") -> Figure:
    """`goal` 0: none, it is told only."""
    return {
        "name": f"hosts.{name}",
        "value": round(value, 4),
        "unit": unit,
        "goal": round(goal, 4),
        "better": better,
        "against": round(against, 4),
    }


class Stage:
    """One run, with one source and one pool, whose trials begin and end here."""

    def __init__(self, log: Log, config: RunConfig, directory: Path) -> None:
        self.log = log
        self.config = config
        self._directory = directory
        self._numbers = itertools.count()
        self._open: dict[str, asyncio.Future[SequenceVerified]] = {}

    def host(self) -> AbstractContextManager[dict[str, Any]]:
        """A harness host of the pool, as a process: see `hosts_host`."""
        given = {
            "config": self.config.model_dump(mode="json"),
            "pool": POOL,
            "log": str(self._directory / "host.log"),
        }
        return child("hosts_host.py", given)

    async def trials(self, count: int, url: str = "http://127.0.0.1:1", over_s: float = 0.0) -> float:
        """Opens so many attempts, evenly over so many seconds, and waits for their verdicts, which have to be rewards of 1.

        Seconds until the last one.
        """
        began = time.perf_counter()
        wanted = [self._attempt(url) for _ in range(count)]
        ended = [
            self._open.setdefault(fact.id(), asyncio.get_running_loop().create_future()) for fact in wanted
        ]
        sent = 0
        while sent < count:
            due = count if not over_s else int(count * min(1.0, (time.perf_counter() - began) / over_s))
            if due > sent:
                await self.log.publish_all([(fact, None) for fact in wanted[sent:due]])
                sent = due
            else:
                await asyncio.sleep(_TICK_S)
        async with asyncio.timeout(_WITHIN_S):
            found = await asyncio.gather(*ended)
        for fact in found:
            if fact.reward != 1.0:
                raise SystemExit(f"a trial ended with {fact}: see {self._directory / 'host.log'}")
        return time.perf_counter() - began

    def _attempt(self, url: str) -> SequenceOpened:
        number = next(self._numbers)
        sample = sample_id(SOURCE, number)
        sequence = sequence_id(sample, 0)
        return SequenceOpened(
            source=SOURCE,
            sample=sample,
            sequence=sequence,
            attempt=1,
            pool=POOL,
            task_index=number,
            host=HOST,
            base_url=url,
            session=attempt_id(sequence, 1),
            budget_s=_WITHIN_S,
        )

    async def hear(self) -> None:
        """Gives the verdicts to whoever waits for them."""
        async for event in self.log.subscribe(SequenceVerified.type, source=HOST):
            fact = event.fact
            assert isinstance(fact, SequenceVerified)
            self._open.pop(fact.id()).set_result(fact)


@asynccontextmanager
async def staged(
    broker: Broker, directory: Path, pool: dict[str, Any], environment: dict[str, Any]
) -> AsyncIterator[Stage]:
    """A run of its own, with that pool and environment."""
    run = f"bench{secrets.token_hex(4)}"
    place = directory / run
    place.mkdir()
    key = place / "run.key"
    key.write_text(secrets.token_hex(32))
    config = RunConfig.model_validate(
        {
            "run": run,
            "broker": broker.model_dump(),
            "store": {"url": f"file://{place}/objects"},
            "agent_loop": {"run_key_file": str(key), "trial_budget_s": _WITHIN_S},
            "pools": [{"name": POOL, **pool}],
            "sources": [{"name": SOURCE, "pool": POOL, "groups": 1, "environment": environment}],
        }
    )
    log = await Log.connect(broker, run, "bench")
    await log.create()
    stage = Stage(log, config, place)
    hearing = asyncio.create_task(stage.hear())
    try:
        yield stage
    finally:
        await end_tasks([hearing])
        await log.close()
