"""Processes, dialogues and figures of the benchmark of capture."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
from report import Figure

from pipeline.capture.call import Call, Reply, ToolChoice
from pipeline.capture.dialects.anthropic import Anthropic
from pipeline.capture.dialects.base import Dialect
from pipeline.capture.dialects.chat import Chat
from pipeline.capture.dialects.responses import Responses
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import Message
from pipeline.capture.renderers.base import Renderer
from pipeline.capture.secret import session_url

Protocol = Literal["chat", "messages", "responses"]
PATHS: dict[Protocol, str] = {
    "chat": "chat/completions",
    "messages": "messages",
    "responses": "responses",
}
ENDS: dict[Protocol, bytes] = {
    "chat": b"[DONE]",
    "messages": b"message_stop",
    "responses": b"response.completed",
}
"""What a stream has at its end when all went well."""
DIALECTS: dict[Protocol, Dialect] = {"chat": Chat(), "messages": Anthropic(), "responses": Responses()}
KEY = bytes(range(32))
"""Of the run: the sessions' secrets come from it. The benchmark listens on loopback, for minutes."""
ANSWER = "I read the file and found the cause: the index is taken before the lock. I will change the order and run the tests."
"""What the double of an engine samples."""
MAX_CONTEXT = 4_000_000
MAX_TOKENS = 1024


def say(text: str) -> None:
    """Progress, for a person: standard output is the table's."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def figure(name: str, value: float, unit: str, goal: float, against: float, better: str = "lower") -> Figure:
    """`goal` 0: none, it is told only."""
    return {
        "name": f"capture.{name}",
        "value": round(value, 4),
        "unit": unit,
        "goal": round(goal, 4),
        "better": better,
        "against": round(against, 4),
    }


@contextmanager
def child(script: str, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs a script of this directory, which reads `given` as a line of JSON, answers with one, which is yielded, and
    serves until its standard input is closed."""
    command = [sys.executable, str(Path(__file__).with_name(script))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{script} did not start: exit status {process.wait(10)}")
        yield json.loads(line)
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def doubles(renderer: Renderer, *each: Mapping[str, float]) -> Iterator[list[str]]:
    """Doubles of an engine in one process, one for each of these (see `capture_double`); their URLs."""
    with child("capture_double.py", {"ids": answer_ids(renderer), "text": ANSWER, "doubles": each}) as told:
        yield told["urls"]


@contextmanager
def captures(directory: Path, *each: tuple[str, int, int]) -> Iterator[dict[str, Any]]:
    """Capture servers in one process, one for each (engine's URL, sessions, most tokens of a turn): see `capture_host`."""
    given = [
        {"engine": engine, "sessions": count, "behaviour": {"max_turns": 10_000, "max_tokens": tokens}}
        for engine, count, tokens in each
    ]
    whole = {"key": KEY.hex(), "max_context": MAX_CONTEXT, "journal": str(directory), "captures": given}
    with child("capture_host.py", whole) as told:
        yield told


def answer_ids(renderer: Renderer) -> list[int]:
    """A double's answer, in the tiny policy's vocabulary."""
    text = renderer.steps(Dialogue((Message("assistant", ANSWER),)), 1)[0]
    lead, _ = renderer.lead(ToolChoice())
    return text[len(lead) : -len(renderer.tail(text[:-1]))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until_answers(url: str, process: subprocess.Popen[Any], within: float, why: Callable[[], str]) -> None:
    """Waits until a GET gives 200. Ends the benchmark, with `why`, when the process ends before or time is over."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise SystemExit(f"{url} did not answer: {why()}")


def said(output: Path) -> str:
    return output.read_text(errors="replace")[-1500:]


def http_client() -> aiohttp.ClientSession:
    """Keep-alive connections, as many as there are calls."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 18)


def call_url(base_url: str, session: str, protocol: Protocol) -> str:
    return f"{session_url(base_url, KEY, session)}/{PATHS[protocol]}"


def parsed(protocol: Protocol, body: bytes) -> Call:
    return DIALECTS[protocol].parse(body, Reply("", 0, b""))


@dataclass(frozen=True, slots=True)
class Talk:
    """A dialogue that an agent sends: its system text, the tools that it offers, and rounds of (what the policy said, the
    arguments of its tool call, the result), before the question."""

    system: str
    tools: tuple[dict[str, Any], ...] = ()
    rounds: tuple[tuple[str, dict[str, Any], str], ...] = ()

    def body(self, protocol: Protocol, question: str, stream: bool, **more: Any) -> bytes:
        """A request as the protocol's client sends it."""
        made = {"chat": self._chat, "messages": self._messages, "responses": self._responses}[protocol]
        whole = {"model": "policy", **made(question), **more}
        if stream:
            whole["stream"] = True
        return json.dumps(whole).encode()

    def _chat(self, question: str) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}]
        messages.append({"role": "user", "content": "Fix the failing test."})
        for number, (text, arguments, result) in enumerate(self.rounds):
            function = {"name": self.tools[0]["name"], "arguments": json.dumps(arguments)}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": text, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
        messages.append({"role": "user", "content": question})
        tools = [{"type": "function", "function": tool} for tool in self.tools]
        return {"messages": messages, **({"tools": tools} if tools else {})}

    def _messages(self, question: str) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix the failing test."}]
        for number, (text, arguments, result) in enumerate(self.rounds):
            use = {"type": "tool_use", "id": f"call_{number}", "name": self.tools[0]["name"]}
            said = [{"type": "text", "text": text}, {**use, "input": arguments}]
            given = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": result}
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [given]}]
        messages.append({"role": "user", "content": question})
        tools = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in self.tools
        ]
        return {
            "max_tokens": 1024,
            "system": [{"type": "text", "text": self.system, "cache_control": {"type": "ephemeral"}}],
            "messages": messages,
            **({"tools": tools} if tools else {}),
        }

    def _responses(self, question: str) -> dict[str, Any]:
        items: list[dict[str, Any]] = [_item("user", "input_text", "Fix the failing test.")]
        for number, (text, arguments, result) in enumerate(self.rounds):
            call = {"type": "function_call", "call_id": f"call_{number}", "name": self.tools[0]["name"]}
            items.append(_item("assistant", "output_text", text))
            items.append({**call, "arguments": json.dumps(arguments)})
            items.append({"type": "function_call_output", "call_id": f"call_{number}", "output": result})
        items.append(_item("user", "input_text", question))
        tools = [{"type": "function", **tool, "strict": False} for tool in self.tools]
        return {
            "instructions": self.system,
            "input": items,
            "store": False,
            **({"tools": tools} if tools else {}),
        }


def _item(role: str, kind: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def prose(words: int, seed: int) -> str:
    """Text like that of a prompt or a tool's output: the same for the same seed."""
    stock = [
        "the",
        "run",
        "reads",
        "each",
        "file",
        "of",
        "the",
        "directory",
        "and",
        "writes",
        "def",
        "test_value(self):",
        "return",
        "self.index[key]",
        "where",
        "an",
        "error",
        "stops",
        "it",
        "with",
        "a",
        "traceback",
        "at",
        "line",
        "120",
        "of",
        "pipeline/feed.py",
        "while",
        "other",
        "tests",
        "pass",
        "in",
        "0.31",
        "s",
    ]
    at, found = seed * 2654435761 % 4294967296, list[str]()
    for _ in range(words):
        at = (at * 1664525 + 1013904223) % 4294967296
        found.append(stock[at >> 16 % len(stock) and at % len(stock)])
    return " ".join(found)


SMALL = Talk("You are a careful engineer. Answer briefly.")
"""0.3 KB of JSON: what is left is the cost of a call as such."""


def large(rounds: int = 10) -> Talk:
    """About 45 KB of JSON: what a coding agent sends after some turns."""
    tools = tuple(
        {
            "name": f"tool_{number}",
            "description": prose(60, number),
            "parameters": {
                "type": "object",
                "properties": {
                    field: {"type": "string", "description": prose(12, number)}
                    for field in ("path", "command", "pattern", "content")
                },
                "required": ["path"],
            },
        }
        for number in range(12)
    )
    turns = tuple(
        (
            prose(30, number),
            {"path": f"pipeline/part_{number}.py", "command": prose(6, number)},
            prose(220, number),
        )
        for number in range(rounds)
    )
    return Talk(prose(1200, 1), tools, turns)
