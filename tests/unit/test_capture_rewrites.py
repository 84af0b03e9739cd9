"""Whole sessions under random agents that rewrite their history as real ones do, in all three protocols.

Never is a token trained that was not sampled, never one twice, never is one lost; and what a client may rewrite at will
forks nothing: the next prompt goes on from the very tokens that were sampled.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections import Counter
from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.capture.call import Answer
from pipeline.capture.dialects.anthropic import Anthropic
from pipeline.capture.dialects.base import Dialect
from pipeline.capture.dialects.chat import Chat
from pipeline.capture.dialects.responses import Responses
from pipeline.capture.session import Session
from schemas.config import Behaviour
from tests.capture_parts import Script, ScriptedEngine
from tests.scaffolds.policy import thinking_renderer

Json = dict[str, Any]
KEY = b"k" * 32


class Agent:
    """A client of one protocol: what it was answered, in that protocol's form, is its history."""

    def __init__(self) -> None:
        self.history: list[Json] = []

    def ask(self, text: str) -> None:
        raise NotImplementedError

    def take(self, body: Json) -> list[str]:
        """Adds an answer to the history; the ids of its calls."""
        raise NotImplementedError

    def result(self, call: str, text: str) -> None:
        raise NotImplementedError

    def body(self) -> Json:
        raise NotImplementedError

    def mark(self, rng: random.Random) -> None:
        """A rewrite of the form alone."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drops what was thought."""
        raise NotImplementedError

    def rename(self) -> None:
        """Renames the tools that were called and reorders their arguments."""
        raise NotImplementedError


class ChatAgent(Agent):
    dialect: Dialect = Chat()

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def take(self, body: Json) -> list[str]:
        message = body["choices"][0]["message"]
        self.history.append(message)
        return [call["id"] for call in message.get("tool_calls") or ()]

    def result(self, call: str, text: str) -> None:
        self.history.append({"role": "tool", "tool_call_id": call, "content": text})

    def body(self) -> Json:
        tool = {"name": "t", "description": "d", "parameters": {"type": "object"}}
        system = {"role": "system", "content": "be good"}
        return {
            "model": "m",
            "messages": [system, *self.history],
            "tools": [{"type": "function", "function": tool}],
        }

    def mark(self, rng: random.Random) -> None:
        for message in self.history:
            if isinstance(message["content"], str) and rng.random() < 0.5:
                message["content"] = [
                    {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
                ]
            elif isinstance(message["content"], list):
                message["content"] = message["content"][0]["text"]

    def forget(self) -> None:
        for message in self.history:
            message.pop("reasoning_content", None)
            message.pop("reasoning", None)

    def rename(self) -> None:
        for message in self.history:
            for call in message.get("tool_calls") or ():
                arguments = json.loads(call["function"]["arguments"])
                call["function"] = {
                    "arguments": json.dumps(dict(reversed(arguments.items())), indent=1),
                    "name": "T2",
                }


class AnthropicAgent(Agent):
    dialect: Dialect = Anthropic()

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def take(self, body: Json) -> list[str]:
        self.history.append({"role": "assistant", "content": body["content"]})
        return [block["id"] for block in body["content"] if block["type"] == "tool_use"]

    def result(self, call: str, text: str) -> None:
        self.history.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": text}]}
        )

    def body(self) -> Json:
        tool = {"name": "t", "description": "d", "input_schema": {"type": "object"}}
        return {
            "model": "m",
            "max_tokens": 500,
            "system": "be good",
            "messages": self.history,
            "tools": [tool],
        }

    def mark(self, rng: random.Random) -> None:
        for message in self.history:
            content = message["content"]
            if isinstance(content, str) and content and rng.random() < 0.5:
                message["content"] = [
                    {"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}
                ]
            elif isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
                message["content"] = content[0]["text"]
            elif isinstance(content, list) and content:
                content[-1]["cache_control"] = {"type": "ephemeral"}

    def forget(self) -> None:
        for message in self.history:
            if isinstance(message["content"], list):
                message["content"] = [b for b in message["content"] if b["type"] != "thinking"]

    def rename(self) -> None:
        for message in self.history:
            for block in message["content"] if isinstance(message["content"], list) else ():
                if block["type"] == "tool_use":
                    block["name"], block["input"] = "T2", dict(reversed(block["input"].items()))


class ResponsesAgent(Agent):
    dialect: Dialect = Responses()

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def take(self, body: Json) -> list[str]:
        self.history += body["output"]
        return [item["call_id"] for item in body["output"] if item["type"] == "function_call"]

    def result(self, call: str, text: str) -> None:
        self.history.append({"type": "function_call_output", "call_id": call, "output": text})

    def body(self) -> Json:
        tool = {
            "type": "function",
            "name": "t",
            "description": "d",
            "parameters": {"type": "object"},
            "strict": False,
        }
        return {
            "model": "m",
            "instructions": "be good",
            "input": self.history,
            "tools": [tool],
            "store": False,
        }

    def mark(self, rng: random.Random) -> None:
        for item in self.history:
            if item.get("role") == "user":
                content = item["content"]
                text = content if isinstance(content, str) else content[0]["text"]
                item["content"] = [{"type": "input_text", "text": text}] if rng.random() < 0.5 else text
            elif rng.random() < 0.5:
                item.pop("status", None)

    def forget(self) -> None:
        self.history = [item for item in self.history if item.get("type") != "reasoning"]

    def rename(self) -> None:
        for item in self.history:
            if item.get("type") == "function_call":
                arguments = json.loads(item["arguments"])
                item |= {"name": "T2", "arguments": json.dumps(dict(reversed(arguments.items())), indent=1)}


AGENTS: list[type[Agent]] = [ChatAgent, AnthropicAgent, ResponsesAgent]
TURNS = [
    "plain {n}",
    "  spaced {n} \n",
    '<tool_call>{{"name": "t", "arguments": {{"a": {n}, "b": [1, {{"c": null}}]}}}}</tool_call>',
    'both {n} <tool_call>{{"name": "t", "arguments": {{"b": "x", "a": {n}}}}}</tool_call>'
    '<tool_call>{{"name": "t", "arguments": {{}}}}</tool_call>',
    "<tool_call>{{broken {n}</tool_call>",
    "<think>so {n} it is</think>thought {n}",
    '<think>hm {n}</think><tool_call>{{"name": "t", "arguments": {{"a": {n}}}}}</tool_call>',
]


class Thinking(ScriptedEngine):
    """Plays turns with reasoning marks, too."""

    def __init__(self, script: Script) -> None:
        super().__init__(script, thinking_renderer())

    def turn(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in re.split("(</?think>)", text):
            mark = self.renderer.tokenizer.special(piece)
            ids += [mark] if mark is not None else super().turn(piece)[:-1]
        return [*ids, self.renderer.stop_token_ids[0]]


class World:
    """One session, and the agents that share it."""

    def __init__(self, kind: type[Agent]) -> None:
        self.engine = Thinking(lambda _: self.turns.pop(0))
        self.turns: list[str] = []
        self.dialect = cast(Any, kind).dialect
        self.tenant = Session(
            "s", Behaviour(max_tokens=500, max_turns=1000), 100_000, self.engine.renderer, self.engine, KEY
        )
        self.number = 0

    async def send(self, body: Json, turn: str, shuffled: random.Random | None = None) -> Json:
        if shuffled is not None:
            body = shuffle(body, shuffled)
        self.turns = [turn.format(n=self.number)]
        self.number += 1
        reply = self.tenant.reply(0)
        call = self.dialect.parse(orjson.dumps(body), reply)
        answer: Answer = await self.tenant.answer(call, {}).whole()
        return orjson.loads(orjson.dumps(self.dialect.response(call, answer, reply)))

    def check(self) -> None:
        """Against what the engine sampled, of which it kept its own account."""
        export = self.tenant.export()
        tokens, mask = export.columns["tokens"], export.columns["loss_mask"] == 1
        trained = Counter(zip(tokens[mask].tolist(), export.columns["logprobs"][mask].tolist(), strict=True))
        sampled = Counter(
            pair for g in self.engine.generations for pair in zip(g.token_ids, g.logprobs, strict=True)
        )
        assert trained == sampled
        contexts = [tokens[c.offset : c.offset + c.tokens].tolist() for c in export.contexts]
        for prompt, generation in zip(self.engine.prompts, self.engine.generations, strict=True):
            whole = [*prompt, *generation.token_ids]
            assert any(context[: len(whole)] == whole for context in contexts)
        assert sum(c.generated for c in export.contexts) == sum(sampled.values())


def shuffle(value: Any, rng: random.Random) -> Any:
    """The same JSON with its keys in another order."""
    if isinstance(value, dict):
        items = list(cast(Json, value).items())
        rng.shuffle(items)
        return {key: shuffle(inner, rng) for key, inner in items}
    return [shuffle(inner, rng) for inner in value] if isinstance(value, list) else value


def answered(agent: Agent, body: Json, text: str) -> None:
    """Takes an answer, and goes on as agents do: with the results of its calls, else with a word."""
    calls = agent.take(body)
    for call in calls:
        agent.result(call, f"result {text}")
    if not calls:
        agent.ask(f"and {text}?")


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "go",
                "go",
                "go",
                "mark",
                "forget",
                "rename",
                "shuffle",
                "remind",
                "branch",
                "retry",
                "truncate",
                "rewrite",
            ]
        ),
        st.integers(0, 7),
        st.sampled_from(TURNS),
    ),
    max_size=16,
)


@pytest.mark.parametrize("kind", AGENTS)
@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.randoms(use_true_random=False))
def test_random_rewrites(kind: type[Agent], actions: list[tuple[str, int, str]], rng: random.Random) -> None:
    async def run() -> None:
        world = World(kind)
        agents = [kind()]
        agents[0].ask("begin")
        last: Json | None = None
        for action, which, turn in actions:
            agent = agents[which % len(agents)]
            match action:
                case "mark":
                    agent.mark(rng)
                case "forget":
                    agent.forget()
                case "rename":
                    agent.rename()
                case "remind":
                    agent.ask(f"<system-reminder>{which}</system-reminder>")
                case "branch":
                    other = kind()
                    other.history = copy.deepcopy(agent.history)
                    other.ask(f"branch {which}")
                    agents.append(other)
                case "truncate":
                    agent.history = copy.deepcopy(agent.history[which:])
                    agent.ask(f"so far {which}")
                case "rewrite":
                    for message in agent.history:
                        if message.get("role") == "assistant" and isinstance(message.get("content"), str):
                            message["content"] = f"rewritten {which}"
                    agent.ask("go on")
                case "retry" if last is not None:
                    before = len(world.engine.prompts)
                    await world.send(last, turn, rng)
                    assert len(world.engine.prompts) == before
                case _:
                    agents_body = agent.body()
                    last = copy.deepcopy(agents_body)
                    before = len(world.engine.prompts)
                    body = await world.send(agents_body, turn, rng if action == "shuffle" else None)
                    if len(world.engine.prompts) > before:
                        answered(agent, body, str(which))
                    else:
                        agent.ask(f"again {which}")
        world.check()

    asyncio.run(run())


@pytest.mark.parametrize("kind", AGENTS)
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("rewrite", ["mark", "forget", "rename", "shuffle"])
async def test_what_a_client_may_rewrite_at_will_forks_nothing(
    kind: type[Agent], turn: str, rewrite: str
) -> None:
    world, agent, rng = World(kind), kind(), random.Random(7)
    agent.ask("begin")
    for number in range(4):
        body = await world.send(agent.body(), turn, rng if rewrite == "shuffle" else None)
        answered(agent, body, str(number))
        if rewrite == "mark":
            agent.mark(rng)
        elif rewrite == "forget":
            agent.forget()
        elif rewrite == "rename":
            agent.rename()
    world.check()
    (context,) = world.tenant.export().contexts
    assert context.label == "main"
    for i in range(3):
        known = [*world.engine.prompts[i], *world.engine.generations[i].token_ids]
        assert world.engine.prompts[i + 1][: len(known)] == known
