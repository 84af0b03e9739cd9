"""The loop that the built-in harnesses share: model call, tool calls, model call, ... through the OpenAI SDK.

Promises: what ended the agent is told apart. The policy's own ends (turn limit, overflow, a turn cut at its length, the
agent's time) are terminations of an outcome that is still verified; the world's (engine, session, sandbox) raise
`InfraFailure`. An agent that ran out of time is told by the caller from one whose engine did not answer.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from pipeline.capture.messages import Tool
from pipeline.harnesses.base import InfraFailure, Trial, Verdict
from pipeline.harnesses.blocking import on_thread
from pipeline.harnesses.clock import clocked
from pipeline.harnesses.endings import REFUSALS
from pipeline.harnesses.environments.base import EnvironmentBroken, Outcome, ToolUse
from pipeline.harnesses.sandbox import SandboxUnavailable

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MODEL_RETRIES = 4


class NoOptions(BaseModel):
    """Of a harness that has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class Said:
    """What a tool call is answered with; `done`: it was the agent's last."""

    output: str
    done: bool = False


Call = Callable[[str, str], Awaitable[Said]]
"""Runs one tool call: (name, arguments as the policy wrote them)."""


class Agent:
    """Made once a host: importing the SDK takes 1 s and reading certificates 20 ms, on the event loop of all tenants."""

    def __init__(self) -> None:
        import anyio
        import openai

        # The SDK's HTTP client would import the rest of it at the first call; where no loop runs, this does nothing.
        anyio.Event()
        # The SDK's HTTP client logs URLs, which hold session secrets.
        for name in ("openai", "httpx", "httpx2", "httpcore", "httpcore2"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._sdk = openai
        self._certificates = ssl.create_default_context()
        # Every trial has a URL of its own: this one is never called.
        self._client = openai.AsyncOpenAI(
            base_url="http://session.invalid", api_key="session", max_retries=MODEL_RETRIES
        )

    async def run(self, trial: Trial, tools: Sequence[Tool]) -> Verdict:
        """Runs the agent with the environment's tools, then verifies what it left behind."""
        uses: list[ToolUse] = []
        answer = [""]

        async def call(name: str, arguments: str) -> Said:
            use = await on_thread(trial.environment.call, trial.task, name, arguments)
            uses.append(use)
            return Said(use.output)

        with clocked(trial.took, "agent"):
            termination = await self.converse(trial, tools, call, seconds=trial.agent_s, answer=answer)
        with clocked(trial.took, "verify"):
            return Verdict(await verify(trial, Outcome(answer[0], tuple(uses))), termination)

    async def converse(
        self,
        trial: Trial,
        tools: Sequence[Tool],
        call: Call,
        *,
        seconds: float,
        system: str = "",
        answer: list[str] | None = None,
    ) -> str:
        """The agent's whole dialogue, within `seconds`; its termination. Raises `InfraFailure`, and what `call` raises.

        `system`: the prompt where the behaviour has none. `answer[0]` gets the text of each turn, so that the last is there
        after a time-out too.
        """
        clock = asyncio.timeout(seconds)
        try:
            # A pool of connections for each trial: one looks through all that it has at each request, and has 1,000 at most.
            pool = self._sdk.DefaultAsyncHttpxClient(verify=self._certificates)
            async with clock, pool:
                client = self._client.with_options(
                    base_url=trial.session_url, timeout=seconds, http_client=pool
                )
                return await _converse(client, trial, tools, call, system, [""] if answer is None else answer)
        except self._sdk.APITimeoutError:
            return "agent_timeout"
        except TimeoutError as error:
            if not clock.expired():
                raise InfraFailure(
                    "environment", f"a tool call met a time-out of its own: {error!r}"
                ) from error
            return "agent_timeout"
        except self._sdk.BadRequestError as error:
            ended = REFUSALS.get(error.code or "")
            if ended is None:
                raise InfraFailure("bad_request", f"code {error.code}: {error.message}") from error
            return ended
        except self._sdk.APIStatusError as error:
            gone = error.status_code in (404, 410)
            reason = "session_lost" if gone else "engine_unavailable"
            raise InfraFailure(reason, f"status {error.status_code}") from error
        except self._sdk.APIConnectionError as error:
            raise InfraFailure("agent_loop_unreachable", type(error.__cause__ or error).__name__) from error
        except (EnvironmentBroken, SandboxUnavailable) as error:
            raise InfraFailure("environment", str(error)) from error


async def verify(trial: Trial, outcome: Outcome) -> float:
    """The environment's reward, found on a thread; raises `InfraFailure`."""
    try:
        return await on_thread(trial.environment.verify, trial.task, outcome)
    except (EnvironmentBroken, SandboxUnavailable) as error:
        raise InfraFailure("verifier", str(error)) from error


async def _converse(
    client: AsyncOpenAI, trial: Trial, tools: Sequence[Tool], call: Call, system: str, answer: list[str]
) -> str:
    from openai.types.chat import ChatCompletion

    behaviour = trial.behaviour
    system = behaviour.system or system
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": trial.task.prompt})
    # The session samples as its behaviour says, so nothing about sampling is sent.
    asked: dict[str, Any] = {"model": "policy", "messages": messages}
    if tools:
        asked["tools"] = [_definition(tool) for tool in tools]
    for _ in range(behaviour.max_turns):
        # Past `completions.create`, which looks up every message's types at each call: 0.3 ms a message, on the event loop.
        response = await client.post("/chat/completions", cast_to=ChatCompletion, body=asked)
        choice = response.choices[0]
        answer[0] = choice.message.content or ""
        if choice.finish_reason == "length":
            return "overlong"
        calls = choice.message.tool_calls
        if not calls or not tools:
            return "completed"
        messages.append(choice.message.model_dump(exclude_none=True))
        for each in calls:
            if each.type != "function":
                raise InfraFailure("protocol", f"the proxy returned a tool call of type {each.type!r}")
            said = await call(each.function.name, each.function.arguments)
            if said.done:
                return "completed"
            messages.append({"role": "tool", "tool_call_id": each.id, "content": said.output})
    return "max_turns"


def _definition(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
