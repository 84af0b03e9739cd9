"""The shell harness in real workspaces, against the real proxy, with a scripted policy."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.capture.secret import session_url
from pipeline.capture.server import Capture
from pipeline.capture.session import Session
from pipeline.harnesses.base import InfraFailure, Trial, Verdict, resolve
from pipeline.harnesses.environments.calculator import Calculator
from pipeline.harnesses.shell import SYSTEM, ShellHarness, cut, submitted, told
from pipeline.harnesses.workspaces import cgroups
from pipeline.harnesses.workspaces.base import Ended
from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import Behaviour, Broker, RunConfig
from schemas.facts import SequenceFailed, SequenceFinished, SequenceVerified
from services import agent_loop, harness
from tests.capture_parts import ScriptedEngine, served
from tests.lifecycle_parts import running, tasks, trial
from tests.rollout_stage import Stage as Rollout
from tests.rollout_stage import staged

KEY = b"k" * 32
ANSWERED = '[ "$(cat answer)" = 42 ]; echo $((1 - $?)) > /logs/verifier/reward.txt'


def call(command: str, name: str = "bash", **more: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'command': command, **more}})}</tool_call>"


def plays(*turns: str) -> Callable[[str], str]:
    """A policy that says these turns, one after the other; the last one again and again."""

    def script(prompt: str) -> str:
        return turns[min(prompt.count("<|im_start|>assistant") - 1, len(turns) - 1)]

    return script


@dataclass
class Stage:
    capture: Capture
    engine: ScriptedEngine
    base_url: str
    folder: Path
    made: int = 0

    async def run(
        self,
        *turns: str,
        test: str = ANSWERED,
        agent_s: float = 60.0,
        command_s: float = 10.0,
        output_bytes: int = 2000,
        **behaviour: Any,
    ) -> tuple[Verdict, Session, str]:
        """The verdict, the session, and the last prompt as text."""
        self.made += 1
        name = f"s{self.made}"
        chosen = Behaviour.model_validate({"max_tokens": 400, "max_turns": 20, **behaviour})
        session = self.capture.open(name, chosen)
        of = trial(
            tasks(self.folder / name, test, disk_mb=64),
            f"{name}-{self.folder.name}"[:100],
            url=session_url(self.base_url, KEY, name),
            agent_s=agent_s,
            behaviour=chosen,
        )
        self.engine.script = plays(*turns)
        options = {"command_s": command_s, "output_bytes": output_bytes}
        verdict = await resolve("shell", options).run(of)
        said = self.engine.renderer.tokenizer.decode(self.engine.prompts[-1], keep_special=True)
        return verdict, session, said


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    engine = ScriptedEngine(plays("done"))
    capture = Capture(KEY, engine.renderer, engine, 20_000)
    async with served(capture) as base_url:
        yield Stage(capture, engine, base_url, tmp_path)


async def test_a_policy_works_by_commands_until_it_submits(stage: Stage) -> None:
    verdict, session, said = await stage.run(
        call("echo 4 > answer; X=1; cd /tmp; echo out; echo err >&2; echo out again; exit 7"),
        call('pwd; echo "[$X]"; ls'),
        call("echo 42 > answer && cat answer && submit"),
        "never said",
    )
    assert verdict == Verdict(1.0, "completed")
    assert session.turns == 3
    [context] = session.export().contexts
    assert len(context.loss_spans) == 3
    assert f"system\n{SYSTEM}" in said
    assert "<|im_start|>user\nDo the task.<|im_end|>" in said
    assert "out\nerr\nout again\n[exit status 7]<|im_end|>" in said
    assert "/app\n[]\nanswer\n<|im_end|>" in said, "a new shell in the workdir; files are kept"


async def test_a_command_over_its_time_is_stopped_and_the_trial_goes_on(stage: Stage) -> None:
    verdict, session, said = await stage.run(
        call("echo so far; (trap '' TERM; sleep 986.5) & sleep 986.5"),
        call("echo 42 > answer; submit"),
        command_s=1.5,
    )
    assert verdict == Verdict(1.0, "completed")
    assert session.turns == 2
    assert "so far\n[stopped: the command ran over its limit of time" in said
    assert running("986.5") == []


async def test_what_a_policy_asks_wrongly_is_answered(stage: Stage) -> None:
    verdict, _, said = await stage.run(
        call("ls", name="sh"),
        call("ls", timeout=3),
        call("a\0b"),
        call("for x in $(seq 20000); do echo $x; done; python3 -c 'print(1)\n"),
        call("for x in $(seq 20000); do echo $x; done; printf '\\xff\\xfe'; false"),
        call("grep -c . /proc/sys/kernel/hostname /bin/submit 2>/dev/null; type submit | head -1; true"),
        "I am done.",
    )
    assert verdict == Verdict(0.0, "completed"), "an answer without a call"
    assert "error: there is no tool 'sh'; the tool is 'bash'" in said
    assert "error: bad arguments: " in said
    assert "error: bad arguments: the command holds a null character" in said
    assert "unexpected EOF" in said
    assert "\n1\n2\n3\n" in said or "1\n2\n3\n" in said
    assert " bytes left out ...]\n" in said
    assert "20000\n\ufffd\ufffd\n[exit status 1]<|im_end|>" in said
    assert "submit is a function" in said


async def test_the_policys_own_ends(stage: Stage) -> None:
    work = call("echo 42 > answer")
    verdict, session, _ = await stage.run(work, max_turns=3)
    assert (verdict, session.turns) == (Verdict(1.0, "max_turns"), 3)
    verdict, _, _ = await stage.run(work, "word " * 200, max_tokens=100)
    assert verdict == Verdict(1.0, "overlong")
    verdict, _, _ = await stage.run(
        work, call("head -c 15000 /dev/zero | tr '\\0' '\\377'"), output_bytes=16_000
    )
    assert verdict == Verdict(1.0, "overlong"), "the context is full"
    verdict, _, _ = await stage.run(work, call("echo; cat answer"), max_session_tokens=150)
    assert verdict == Verdict(1.0, "overlong"), "the session's tokens are spent"


async def test_an_agent_out_of_time_is_stopped_in_its_command_and_verified(stage: Stage) -> None:
    verdict, session, _ = await stage.run(call("echo 42 > answer; sleep 986.75"), agent_s=2.0, command_s=60.0)
    assert verdict == Verdict(1.0, "agent_timeout")
    assert not session.owed, "nobody owed it an answer: the agent's own doing"
    assert running("986.75") == []


async def test_its_commands_reach_nothing(stage: Stage) -> None:
    port = stage.base_url.rpartition(":")[2]
    tried = f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo open || echo shut; wc -l < /proc/net/tcp; env"
    _, session, said = await stage.run(call(tried), "done")
    answer = said.rsplit("<|im_start|>tool\n", 1)[1]
    assert answer.startswith("shut\n1\n"), "no socket in it, not even one that leads to the session"
    assert session_url("", KEY, session.id).split("/")[-2] not in answer
    assert "PYTHONPATH" not in answer


async def test_an_environment_without_task_folders_is_refused(stage: Stage) -> None:
    shell = ShellHarness()
    with pytest.raises(ValueError, match=r"Calculator has no task folders.*environment.kind harbor"):
        shell.check(Calculator(0, {}), Behaviour())
    shell.check(tasks(stage.folder, ANSWERED), Behaviour())
    calculator = Calculator(0, {})
    wrong = Trial("http://x/v1", Behaviour(), calculator, calculator.task(0), 1.0)
    with pytest.raises(InfraFailure, match="has no task folders"):
        await shell.run(wrong)
    with pytest.raises(ValidationError, match="command_s"):
        resolve("shell", {"command_s": 0})
    with pytest.raises(ValidationError, match="nothing"):
        resolve("chat", {"nothing": 1})


@pytest.mark.parametrize(("size", "most"), [(100, 100), (101, 100), (10_000, 256), (10_001, 257)])
def test_an_output_is_cut_in_the_middle(size: int, most: int) -> None:
    text = "a" + "é" * ((size - 1) // 2) + "z" * ((size - 1) % 2)
    found = cut(text, most)
    assert (found == text) == (size <= most)
    if size > most:
        begin, note, end = found.split("\n")
        left_out = int(note.split()[1])
        assert text.startswith(begin)
        assert text.endswith(end)
        assert most - 4 <= len(begin.encode()) + len(end.encode()) <= most
        assert left_out == size - 2 * (most // 2)


def test_what_is_submitted_is_found_without_holding_up_the_event_loop() -> None:
    mark = "submitted-0123"
    assert submitted(f"a\n{mark} \nb", mark)
    assert not submitted(f"a\nsaid {mark}\nb", mark)
    long = "y\n" * (2 << 20)
    began = time.thread_time()
    assert not submitted(long, mark)
    assert time.thread_time() - began < 0.1


def test_how_a_command_ended_is_told() -> None:
    assert told(Ended(0, b"", b""), "", 100) == "[no output]"
    assert told(Ended(0, b"", b""), "x\n", 100) == "x\n"
    assert told(Ended(2, b"", b""), "x\n", 100) == "x\n[exit status 2]"
    assert told(Ended(2, b"", b""), "\n", 100) == "[exit status 2]"
    assert "out of memory" in told(Ended(137, b"", b"", oom=True), "x", 100)
    assert "wrote more than it may" in told(Ended(137, b"", b"", stopped="output"), "x", 100)
    assert "limit of time, 9 s" in told(Ended(137, b"", b"", stopped="time", seconds=9.1), "x", 100)


async def test_effects_decide_over_what_an_end_does_in_a_run(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> None:
    """Two sources with the same policy, which never comes to an end: one keeps that, the other has it tried again."""
    tasks(tmp_path, ANSWERED, disk_mb=64)
    left = [folder / f"{cgroups.PREFIX}{os.getpid()}-1-{run_name}" for folder in cgroups.find().folders()]
    for folder in left:
        folder.mkdir()
    source = {
        "pool": "shell",
        "groups": 1,
        "behaviour": {"max_tokens": 200, "max_turns": 2},
        "environment": {"kind": "harbor", "options": {"tasks": str(tmp_path / "tasks"), "disk_mb": 64}},
    }
    script = plays(call("echo 42 > answer"))
    async with staged(tmp_path, broker, run_name, log, store, script) as make:
        made = make()
        whole = {
            **made.config.model_dump(mode="json"),
            "pools": [{"name": "shell", "harness": "shell", "options": {"command_s": 5}}],
            "sources": [
                {"name": "kept", **source, "effects": {"max_turns": "mask"}},
                {"name": "again", **source, "effects": {"max_turns": "retry"}},
            ],
        }
        s = Rollout(RunConfig.model_validate(whole), log, store, made.engine)
        async with s.running((agent_loop.serve, ""), (harness.serve, "shell")):
            kept, again = [await s.dispatch(name) for name in ("kept", "again")]
            finished, failed = await asyncio.gather(s.outcome("kept", kept), s.outcome("again", again))
    assert not any(folder.exists() for folder in left), "what a killed host left is removed by the next"
    assert isinstance(finished, SequenceFinished), finished
    assert (finished.reward, finished.termination, finished.attempt) == (1.0, "max_turns", 1)
    assert isinstance(failed, SequenceFailed)
    assert (failed.attempts, failed.failure.kind, failed.failure.reason) == (2, "infra", "max_turns")
    for fact in await s.facts("sequence.verified"):
        assert isinstance(fact, SequenceVerified)
        assert list(fact.seconds) == ["queue", "start", "agent", "verify"]
        assert {a.name for a in fact.artefacts} == {"verifier_stdout", "verifier_reward"}
        assert fact.peak_bytes > 0
        for artefact in fact.artefacts:
            assert f"/artefacts/{fact.id()}/" in artefact.ref.key
            await store.get(artefact.ref)


FIRST = """
import asyncio, sys
from aiohttp import web
from pipeline.harnesses.agent import Agent
from pipeline.harnesses.base import Trial
from pipeline.harnesses.environments.base import Task
from schemas.config import Behaviour

async def chat(request):
    message = {"role": "assistant", "content": "42"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return web.json_response({"id": "x", "object": "chat.completion", "created": 1, "model": "p", "choices": [choice]})

async def main():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    agent = Agent()
    before = set(sys.modules)
    trial = Trial(f"http://127.0.0.1:{port}/v1", Behaviour(max_tokens=9), None, Task(0, "p", "e"), 20)
    assert await agent.converse(trial, (), None, seconds=20) == "completed"
    # What asyncio itself needs to look a name up.
    print(sorted(set(sys.modules) - before - {"concurrent.futures.thread"}))
    await runner.cleanup()

asyncio.run(main())
"""


def test_the_first_call_of_a_host_imports_nothing() -> None:
    """On the event loop of all its tenants."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
