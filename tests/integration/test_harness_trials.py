"""The built-in harnesses against the real proxy: what the policy does is a verdict, what the world does is a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from pipeline.capture.secret import session_url
from pipeline.capture.server import Capture
from pipeline.capture.session import Session
from pipeline.engines.base import EngineUnavailable
from pipeline.harnesses.base import InfraFailure, Trial, UnknownHarness, Verdict, resolve
from pipeline.harnesses.blocking import on_thread
from pipeline.harnesses.environments.arithmetic import Arithmetic
from pipeline.harnesses.environments.base import Environment, EnvironmentBroken, Outcome, Task, ToolUse
from pipeline.harnesses.environments.calculator import Calculator
from schemas.config import Behaviour
from schemas.names import BadName
from tests.capture_parts import Script, ScriptedEngine, served

KEY = b"k" * 32
CALC = Calculator(0, {})
TASK = CALC.task(0)
EXPRESSION = TASK.prompt.removeprefix("Use the calculator to compute ").removesuffix(".")
CALL = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{EXPRESSION}"}}}}</tool_call>'


@dataclass
class Stage:
    """One session on a real proxy, with a trial that points at it."""

    capture: Capture
    base_url: str
    engine: ScriptedEngine
    sessions: int = 0

    def trial(
        self, environment: Environment, agent_s: float = 20.0, **behaviour: object
    ) -> tuple[Trial, Session]:
        self.sessions += 1
        name = f"s{self.sessions}"
        chosen = Behaviour.model_validate({"max_tokens": 200, **behaviour})
        session = self.capture.open(name, chosen)
        url = session_url(self.base_url, KEY, name)
        return Trial(url, chosen, environment, environment.task(0), agent_s), session


def act(prompt: str) -> str:
    """Calls the tool, then answers with what it said."""
    tail = prompt.rsplit("<|im_start|>tool\n", 1)
    return CALL if len(tail) == 1 else tail[1].split("<|im_end|>")[0]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    engine = ScriptedEngine(act)
    capture = Capture(KEY, engine.renderer, engine, 2000)
    async with served(capture) as base_url:
        yield Stage(capture, base_url, engine)


async def run(stage: Stage, name: str, script: Script, trial: Trial) -> Verdict:
    stage.engine.script = script
    return await resolve(name).run(trial)


async def test_chat_answers_once_and_is_scored(stage: Stage) -> None:
    env = Arithmetic(0, {})
    for answer, reward in ((env.task(0).expected, 1.0), ("wrong", 0.0)):
        trial, session = stage.trial(env)
        assert await run(stage, "chat", lambda _, answer=answer: answer, trial) == Verdict(
            reward, "completed"
        )
        assert session.turns == 1


async def test_tool_loop_runs_the_tool_and_is_verified(stage: Stage) -> None:
    trial, session = stage.trial(CALC, system="Be exact.")
    assert await run(stage, "tool", act, trial) == Verdict(1.0, "completed")
    assert session.turns == 2
    (context,) = session.export().contexts
    assert len(context.loss_spans) == 2
    prompt = stage.engine.renderer.tokenizer.decode(stage.engine.prompts[-1], keep_special=True)
    assert prompt.startswith("<|im_start|>system\nBe exact.\nTools:\n")
    assert f"<|im_start|>tool\n{TASK.expected}<|im_end|>" in prompt


async def test_the_policys_own_ends_are_terminations(stage: Stage) -> None:
    trial, session = stage.trial(CALC, max_turns=3)
    assert await run(stage, "tool", lambda _: CALL, trial) == Verdict(0.0, "max_turns")
    assert session.turns == 3
    trial, _ = stage.trial(CALC, max_tokens=4)
    assert await run(stage, "tool", lambda _: "1234567", trial) == Verdict(0.0, "overlong")
    trial, _ = stage.trial(CALC, system="x" * 4000)
    assert await run(stage, "tool", act, trial) == Verdict(0.0, "overlong")
    trial, _ = stage.trial(CALC)
    assert await run(stage, "tool", lambda _: "<tool_call>{oops</tool_call>", trial) == Verdict(
        0.0, "completed"
    )


async def test_an_agent_out_of_time_is_verified_with_what_it_has(stage: Stage) -> None:
    stage.engine.gate.clear()
    trial, session = stage.trial(CALC, agent_s=0.5)
    assert await run(stage, "tool", act, trial) == Verdict(0.0, "agent_timeout")
    assert session.owed, "by which the agent-loop host knows whose slowness it was"
    await stage.capture.close(session)


async def test_an_answer_that_comes_after_the_agent_went_is_still_the_engines_slowness(stage: Stage) -> None:
    stage.engine.gate.clear()
    trial, session = stage.trial(CALC, agent_s=0.5)
    assert await run(stage, "tool", act, trial) == Verdict(0.0, "agent_timeout")
    stage.engine.gate.set()
    async with asyncio.timeout(10):
        while session.last is None:
            await asyncio.sleep(0.001)
    assert session.owed
    assert session.turns == 1


async def test_what_the_world_does_is_an_infra_failure(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.harnesses.agent.MODEL_RETRIES", 0)

    async def reason(script: Script, trial: Trial, name: str = "tool") -> str:
        with pytest.raises(InfraFailure) as failure:
            await run(stage, name, script, trial)
        assert trial.session_url.split("/")[-2] not in failure.value.detail
        return failure.value.reason

    trial, _ = stage.trial(CALC)
    assert await reason(lambda _: EngineUnavailable("down"), trial) == "engine_unavailable"
    trial, session = stage.trial(CALC)
    await stage.capture.close(session)
    assert await reason(act, trial) == "session_lost"
    nowhere = Trial("http://127.0.0.1:9/s/x/secret-part/v1", Behaviour(), CALC, TASK, 5.0)
    assert await reason(act, nowhere) == "agent_loop_unreachable"

    class BrokenVerifier(Calculator):
        def verify(self, task: Task, outcome: Outcome) -> float:
            raise EnvironmentBroken("exit 137")

    trial, _ = stage.trial(BrokenVerifier(0, {}))
    assert await reason(act, trial) == "verifier"

    class SlowTool(Calculator):
        def call(self, task: Task, name: str, arguments: str) -> ToolUse:
            raise TimeoutError("a socket of the tool's own")

    trial, _ = stage.trial(SlowTool(0, {}))
    assert await reason(act, trial) == "environment", "not the agent's time, which it had enough of"


async def test_many_trials_at_once_do_not_mix(stage: Stage) -> None:
    trials = [stage.trial(CALC) for _ in range(12)]
    verdicts = await asyncio.gather(*(resolve("tool").run(trial) for trial, _ in trials))
    assert verdicts == [Verdict(1.0)] * 12
    assert all(len(session.export().contexts) == 1 for _, session in trials)


def test_harnesses_are_found_by_name() -> None:
    assert type(resolve("pipeline.harnesses.chat:ChatHarness")) is type(resolve("chat"))
    for name in ("chats", "no.such:Thing", "pipeline.harnesses.chat:Nothing"):
        with pytest.raises(UnknownHarness, match=name.split(":")[0]):
            resolve(name)


def test_a_trial_does_not_show_its_url() -> None:
    trial = Trial("http://h/s/x/SECRET/v1", Behaviour(), CALC, TASK, 1.0)
    assert "SECRET" not in repr(trial)


async def test_whatever_a_blocking_call_raises_reaches_whoever_waits() -> None:
    def ends() -> None:
        next(iter(()))

    def quits() -> None:
        raise SystemExit(3)

    async with asyncio.timeout(10):
        assert await on_thread(max, 1, 2) == 2
        with pytest.raises(RuntimeError, match="StopIteration"):
            await on_thread(ends)
        with pytest.raises(SystemExit):
            await on_thread(quits)


@pytest.mark.parametrize("name", ["not a name", "", "x" * 129])
def test_the_reason_of_a_failure_is_countable(name: str) -> None:
    with pytest.raises(BadName, match="reason"):
        InfraFailure(name)
