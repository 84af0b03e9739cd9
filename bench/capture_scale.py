"""Many sessions in one process: how late its event loop runs, what a session costs in memory, how many calls it serves."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from capture_world import (
    ENDS,
    MAX_TOKENS,
    PATHS,
    Figure,
    Protocol,
    call_url,
    captures,
    doubles,
    figure,
    http_client,
    large,
    parsed,
    say,
)

from pipeline.capture.dialogue import Dialogue
from pipeline.capture.messages import Message
from pipeline.capture.renderers.base import Renderer
from pipeline.capture.renderers.choose import load_renderer
from pipeline.engines.policies import TINY, policy_dir
from pipeline.engines.progress import Ask
from pipeline.engines.vllm import GENERATE
from pipeline.engines.vllm_wire import request_body
from pipeline.engines.wire import SamplingParams

LAG_MS = 50.0
_PROTOCOLS: tuple[Protocol, ...] = tuple(PATHS)
_TALK = large(2)
_CALLERS = 32
_KINDS = 2 * len(_PROTOCOLS)
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Load:
    """So many sessions at once, of so many turns each. The engine takes `delay_s` to twice that for a turn, and the
    sessions begin evenly over `delay_s`."""

    sessions: int
    turns: int
    delay_s: float


async def scale(directory: Path, load: Load, seconds: float) -> list[Figure]:
    """The load, then calls of those who wait for nothing else for so many seconds, in one process."""
    renderer = load_renderer(policy_dir(TINY))
    with (
        doubles(renderer, {"delay_s": load.delay_s, "jitter_s": load.delay_s}, {}) as (slow, fast),
        captures(
            directory / "scale",
            (slow, load.sessions + _KINDS, MAX_TOKENS),
            (fast, _CALLERS, MAX_TOKENS),
        ) as host,
    ):
        async with http_client() as http:
            figures = await _many_sessions(http, host, load, renderer)
            return figures + await _calls_a_second(http, fast, host["urls"][1], seconds, renderer)


async def _many_sessions(
    http: aiohttp.ClientSession, host: dict[str, Any], load: Load, renderer: Renderer
) -> list[Figure]:
    """Agents of all three protocols, every other one with streams, each of which sends its next turn at once."""
    url, control = host["urls"][0], host["control"]
    # What a process loads with the first call of each kind is no session's.
    for extra in range(_KINDS):
        await _agent(http, url, load.sessions + extra, replace(load, turns=1, delay_s=0.0))
    await _state(http, control)
    await asyncio.sleep(1.0)
    idle = await _state(http, control)
    began = time.perf_counter()
    await asyncio.gather(*(_agent(http, url, number, load) for number in range(load.sessions)))
    took = time.perf_counter() - began
    loaded = await _state(http, control)
    calls = load.sessions * load.turns
    late, before = 1000 * _p99(loaded["late"]), 1000 * _p99(idle["late"])
    each = (loaded["resident"] - idle["resident"]) / load.sessions / 1024
    cpu = (loaded["cpu_s"] - idle["cpu_s"]) / calls * 1000
    held = sum(_tokens(renderer, number, load) for number in range(3)) / 3 * 4 / 1024
    say(
        f"{load.sessions} sessions: {calls / took:.0f} calls/s, {cpu:.1f} ms of CPU a call, loop p99 {late:.1f} ms late "
        f"(idle {before:.1f}), {each:.0f} KiB a session, of which the tokens are {held:.0f}"
    )
    return [
        figure("many.lag", late, "ms", LAG_MS, max(before, 0.001)),
        figure("many.memory", each, "KiB", 0, held),
        figure("many.cpu", cpu, "ms/call", 0, 1000 * took / calls),
    ]


async def _calls_a_second(
    http: aiohttp.ClientSession, engine: str, host: str, seconds: float, renderer: Renderer
) -> list[Figure]:
    """Against calls of the engine alone, whole ones with a prompt of that length."""
    numbers = itertools.count()

    async def through(caller: int) -> None:
        protocol, stream = _PROTOCOLS[caller % 3], caller % 2 == 0
        body = _TALK.body(protocol, f"Call {next(numbers)}.", stream)
        await _post(http, call_url(host, f"s{caller}", protocol), body, protocol, stream)

    ids = _prompt(renderer, "chat", _TALK.body("chat", "Call 1.", False))
    direct = request_body(Ask(ids, SamplingParams(max_tokens=MAX_TOKENS), "r", "direct"), lambda _: False)

    async def alone(caller: int) -> None:
        async with http.post(f"{engine}{GENERATE}", data=direct, headers=_JSON) as response:
            await response.read()

    # Each session's first call brings its whole dialogue; it is not what goes on.
    await asyncio.gather(*(through(caller) for caller in range(_CALLERS)))
    ours, theirs = await _rate(through, seconds), await _rate(alone, seconds)
    say(f"{_CALLERS} callers: {ours:.0f} calls/s, the engine alone {theirs:.0f}")
    return [figure("rate", ours, "calls/s", 0, theirs, "higher")]


async def _rate(call: Callable[[int], Awaitable[None]], seconds: float) -> float:
    began = time.perf_counter()
    made = 0

    async def caller(number: int) -> None:
        nonlocal made
        while time.perf_counter() < began + seconds:
            await call(number)
            made += 1

    await asyncio.gather(*(caller(number) for number in range(_CALLERS)))
    return made / (time.perf_counter() - began)


async def _agent(http: aiohttp.ClientSession, host: str, number: int, load: Load) -> None:
    protocol, stream = _PROTOCOLS[number % 3], number % 2 == 0
    url = call_url(host, f"s{number}", protocol)
    await asyncio.sleep(load.delay_s * number / load.sessions)
    for turn in range(load.turns):
        await _post(http, url, _TALK.body(protocol, _step(number, turn), stream), protocol, stream)


def _step(number: int, turn: int) -> str:
    return f"Step {turn} of agent {number}. " + "This is more of the output. " * 20


async def _post(http: aiohttp.ClientSession, url: str, body: bytes, protocol: Protocol, stream: bool) -> None:
    async with http.post(url, data=body, headers=_JSON) as response:
        answer = await response.read()
    if response.status != 200 or (ENDS[protocol] if stream else b"tests") not in answer:
        raise SystemExit(f"a session's call was answered {response.status}: {answer[:500]!r}")


async def _state(http: aiohttp.ClientSession, control: str) -> dict[str, Any]:
    async with http.get(control) as response:
        return await response.json()


def _p99(late: list[float]) -> float:
    return late[int(0.99 * (len(late) - 1))]


def _prompt(renderer: Renderer, protocol: Protocol, body: bytes) -> list[int]:
    call = parsed(protocol, body)
    ids = [token for step in renderer.steps(call.dialogue, 0) for token in step]
    return ids + renderer.lead(call.tool_choice)[0]


def _tokens(renderer: Renderer, number: int, load: Load) -> float:
    """Tokens that a session of the load holds: its dialogue once, and what each turn brought."""
    protocol = _PROTOCOLS[number % 3]
    once = len(_prompt(renderer, protocol, _TALK.body(protocol, _step(number, 0), False)))
    more = renderer.steps(Dialogue((Message("user", _step(number, 1)),)), 1)[0]
    return once + (load.turns - 1) * len(more)
