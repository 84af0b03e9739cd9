"""One trial of the harbor harness, whole: a task folder, a workspace, a scaffold in it, capture on a socket, the verifier."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from pipeline.capture.export import Export
from pipeline.capture.rules import load_rules, pool_rules
from pipeline.capture.secret import session_secret, session_url
from pipeline.capture.server import Capture, Limits
from pipeline.capture.session import Session
from pipeline.harnesses.base import Phases, Trial, Verdict, resolve
from pipeline.harnesses.environments.base import make_environment
from schemas.config import Behaviour, Environment, Pool
from tests.scaffolds.install import ROOT, SCAFFOLDS
from tests.scaffolds.policy import Play, Policy
from tests.scaffolds.wire import Answers, Wire

KEY = b"k" * 32
SESSION = "run-1"
TASKS = Path(__file__).resolve().parents[2] / "examples/tasks"


@dataclass(slots=True)
class Kept:
    """Artefacts in memory."""

    data: dict[str, bytes] = field(default_factory=dict[str, bytes])

    async def save(self, name: str, data: bytes) -> None:
        assert name not in self.data
        self.data[name] = data

    def text(self, name: str) -> str:
        return self.data.get(name, b"").decode(errors="replace")


@dataclass(slots=True)
class Stand:
    """What a trial stands on; `pool` and `trial` may be changed before it runs."""

    session: Session
    policy: Policy
    wire: Wire
    runner: web.AppRunner
    trial: Trial
    kept: Kept
    options: dict[str, Any]

    async def run(self) -> Verdict:
        return await resolve("harbor", self.options).run(self.trial)


@dataclass(slots=True)
class Solved:
    """A trial that is over; as `played.Played`, for its checks."""

    verdict: Verdict
    trial: Trial
    kept: Kept
    policy: Policy
    wire: Wire
    export: Export
    notes: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def labels(self) -> list[str]:
        return [context.label for context in self.export.contexts]

    def context(self, index: int) -> list[int]:
        meta = self.export.contexts[index]
        return self.export.columns["tokens"][meta.offset : meta.offset + meta.tokens].tolist()


@asynccontextmanager
async def stand(
    options: Mapping[str, Any],
    play: Play,
    task: str,
    tasks: Path = TASKS,
    fault: Answers = lambda _: None,
    agent_s: float = 150,
    max_context: int = 200_000,
    workspaces: str = "overlay",
    memory_mb: int = 2048,
    **behaviour: Any,
) -> AsyncIterator[Stand]:
    """A session on a socket of this machine, and a trial of one task in `tasks` that has it."""
    pool = Pool(name="pool", harness="harbor", options={"folder": str(ROOT), **options})
    policy, wire = Policy(play), Wire(fault)
    policy.on_portion = wire.cut_now
    capture = Capture(KEY, policy.renderer, policy, max_context, Limits(ping_s=0.5))
    given = Behaviour(**{"max_turns": 20, "max_tokens": 4096, **behaviour})
    session = capture.open(SESSION, given, load_rules(pool_rules(pool)))
    wire.session = session
    runner = capture.runner(1)
    wire.around(runner.app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        environment = make_environment(
            Environment(
                kind="harbor",
                options={
                    "tasks": str(tasks),
                    "names": [task],
                    "workspaces": workspaces,
                    "memory_mb": memory_mb,
                },
            )
        )
        kept = Kept()
        trial = Trial(
            session_url=session_url(f"http://{host}:{port}", KEY, SESSION),
            behaviour=given,
            environment=environment,
            task=environment.task(0),
            agent_s=agent_s,
            name=f"{SESSION}-{os.getpid()}-{time.monotonic_ns()}",
            deadline=time.monotonic() + 2 * agent_s,
            phases=Phases(60, agent_s, 60),
            artefacts=kept,
        )
        yield Stand(session, policy, wire, runner, trial, kept, dict(pool.options))
    finally:
        await runner.cleanup()
        await session.close()


async def solved(options: Mapping[str, Any], play: Play, task: str, **given: Any) -> Solved:
    """Runs the trial to its verdict."""
    async with stand(options, play, task, **given) as ready:
        verdict = await ready.run()
        done = Solved(verdict, ready.trial, ready.kept, ready.policy, ready.wire, ready.session.export())
        _note(done, ready.options)
        secret = session_secret(KEY, SESSION).encode()
        assert not [name for name, data in ready.kept.data.items() if secret in data]
        return done


def _note(done: Solved, options: Mapping[str, Any]) -> None:
    """A row for whoever makes the table of `docs/scaffolds.md`."""
    name = options["agent"]
    if (path := os.environ.get("PACKTRAIN_SCAFFOLD_TABLE")) and name in SCAFFOLDS:
        found = SCAFFOLDS[name]
        row = {
            "scaffold": name,
            "version": found.version,
            "wire": options.get("wire") or found.wires[0],
            "task": getattr(done.trial.task, "name", ""),
            "reward": done.verdict.reward,
            "requests": len(done.wire.calls),
            "contexts": len(done.export.contexts),
            "tokens": len(done.export.columns["tokens"]),
            "generated": int(done.export.columns["loss_mask"].sum()),
            "seconds": round(done.trial.took["agent"], 1),
            "memory": max(done.trial.peak_bytes, default=0),
        }
        with Path(path).open("a") as table:
            table.write(json.dumps(row) + "\n")
