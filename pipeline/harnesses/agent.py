"""The loop that the built-in harnesses share: model call, tool calls, model call, ... through the OpenAI SDK.

Promises: what ended the agent is told apart. The policy's own ends (turn limit, overflow, a turn cut at its length, the
agent's time) are terminations of an outcome that is still verified; the world's (engine, session, sandbox) raise
`InfraFailure`. An agent that ran out of time is told by the caller from one whose engine did not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.capture.messages import Tool
from pipeline.harnesses.base import InfraFailure, Trial, Verdict
from pipeline.harnesses.blocking import on_thread
from pipeline.harnesses.environments.base import EnvironmentBroken, Outcome, ToolUse
from pipeline.harnesses.sandbox import SandboxUnavailable

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

MODEL_RETRIES = 4


class Agent:
    """Made once a host: importing the SDK takes 1 s and making its HTTP client 0.1 s, on the event loop of all tenants."""

    def __init__(self) -> None:
        import openai

        # The SDK's HTTP client logs URLs, which hold session secrets.
        for name in ("openai", "httpx", "httpx2", "httpcore", "httpcore2"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._sdk = openai
        # Every trial has a URL of its own: this one is never called.
        self._client = openai.AsyncOpenAI(
            base_url="http://session.invalid", api_key="session", max_retries=MODEL_RETRIES
        )

    async def run(self, trial: Trial, tools: Sequence[Tool]) -> Verdict:
        """Runs the agent, then verifies what it left behind."""
        uses: list[ToolUse] = []
        answer = [""]
        clock = asyncio.timeout(trial.agent_s)
        try:
            client = self._client.with_options(base_url=trial.session_url, timeout=trial.agent_s)
            async with clock:
                termination = await _converse(client, trial, tools, uses, answer)
        except self._sdk.APITimeoutError:
            termination = "agent_timeout"
        except TimeoutError as error:
            if not clock.expired():
                raise InfraFailure(
                    "environment", f"a tool call met a time-out of its own: {error!r}"
                ) from error
            termination = "agent_timeout"
        except self._sdk.BadRequestError as error:
            termination = _termination(error)
        except self._sdk.APIStatusError as error:
            gone = error.status_code in (404, 410)
            reason = "session_lost" if gone else "engine_unavailable"
            raise InfraFailure(reason, f"status {error.status_code}") from error
        except self._sdk.APIConnectionError as error:
            raise InfraFailure("agent_loop_unreachable", type(error.__cause__ or error).__name__) from error
        except (EnvironmentBroken, SandboxUnavailable) as error:
            raise InfraFailure("environment", str(error)) from error
        return Verdict(await verify(trial, Outcome(answer[0], tuple(uses))), termination)


async def verify(trial: Trial, outcome: Outcome) -> float:
    """The environment's reward, found on a thread; raises `InfraFailure`."""
    try:
        return await on_thread(trial.environment.verify, trial.task, outcome)
    except (EnvironmentBroken, SandboxUnavailable) as error:
        raise InfraFailure("verifier", str(error)) from error


async def _converse(
    client: AsyncOpenAI, trial: Trial, tools: Sequence[Tool], uses: list[ToolUse], answer: list[str]
) -> str:
    """Appends to `uses` and sets `answer[0]`, so that they survive a timeout; returns the termination."""
    behaviour = trial.behaviour
    messages: list[Any] = [{"role": "system", "content": behaviour.system}] if behaviour.system else []
    messages.append({"role": "user", "content": trial.task.prompt})
    # The session samples as its behaviour says, so nothing about sampling is sent.
    asked: dict[str, Any] = {"model": "policy", "messages": messages}
    if tools:
        asked["tools"] = [_definition(tool) for tool in tools]
    create: Any = client.chat.completions.create  # its overloads cannot tell a dict's fields
    for _ in range(behaviour.max_turns):
        response: ChatCompletion = await create(**asked)
        choice = response.choices[0]
        answer[0] = choice.message.content or ""
        if choice.finish_reason == "length":
            return "overlong"
        calls = choice.message.tool_calls
        if not calls or not tools:
            return "completed"
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in calls:
            if call.type != "function":
                raise InfraFailure("protocol", f"the proxy returned a tool call of type {call.type!r}")
            function = call.function
            use = await on_thread(trial.environment.call, trial.task, function.name, function.arguments)
            uses.append(use)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": use.output})
    return "max_turns"


def _termination(error: Any) -> str:
    code = error.code
    if code == "context_length_exceeded":
        return "overlong"
    if code == "max_turns":
        return "max_turns"
    raise InfraFailure("bad_request", f"code {code}: {error.message}") from error


def _definition(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
