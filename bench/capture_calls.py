"""What a call costs over a call of the engine alone, beside what it costs through LiteLLM's proxy.

Every call is new to its session: its last message has a number. The two that are compared take turns, and the overhead is
the median of their differences.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
from capture_litellm import litellm
from capture_world import (
    ENDS,
    MAX_TOKENS,
    PATHS,
    SMALL,
    Figure,
    Protocol,
    Talk,
    call_url,
    captures,
    child,
    doubles,
    figure,
    http_client,
    large,
    parsed,
    say,
)

from pipeline.capture.call import ToolChoice
from pipeline.capture.dialogue import steps
from pipeline.capture.renderers.base import Renderer
from pipeline.capture.renderers.choose import load_renderer
from pipeline.engines.policies import TINY, policy_dir
from pipeline.engines.progress import Ask
from pipeline.engines.vllm import GENERATE
from pipeline.engines.vllm_wire import request_body
from pipeline.engines.wire import SamplingParams

GOAL_MS = 2.0
PACE_S = 0.001
"""Between two tokens of a stream: faster than engines give them to one caller."""
PART_OF_LITELLM = 5
_TINY_TOKENS = 16
_TALKS = {"small": SMALL, "large": large()}
_SESSIONS = 200
Timed = Callable[[], Awaitable[float]]
Pair = Callable[[], tuple[Timed, Timed]]


class Calls:
    """Makes calls one after the other, each different from all before."""

    def __init__(self, http: aiohttp.ClientSession, renderer: Renderer) -> None:
        self._http = http
        self._renderer = renderer
        self._numbers = itertools.count()
        self._before: dict[tuple[str, Protocol], list[int]] = {}

    def question(self) -> str:
        return f"Is test number {next(self._numbers)} right now? Say what is wrong."

    async def post(
        self, url: str, body: bytes, expected: bytes, headers: Mapping[str, str] | None = None
    ) -> float:
        """Milliseconds to the end of the answer."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        began = time.perf_counter()
        async with self._http.post(url, data=body, headers=sent) as response:
            answer = await response.read()
            taken = time.perf_counter() - began
        if response.status != 200 or expected not in answer:
            raise SystemExit(f"{response.url.path[:3]}... answered {response.status}: {answer[:500]!r}")
        return 1000 * taken

    def generate_body(
        self,
        talk: Talk,
        protocol: Protocol,
        question: str,
        stream: bool,
        tokens: int,
        seed: int | None = None,
    ) -> bytes:
        """What our server sends to the engine for the same call, made before the clock runs."""
        dialogue = parsed(protocol, talk.body(protocol, question, stream)).dialogue
        last = len(steps(dialogue)) - 1
        if (talk.system, protocol) not in self._before:
            before = self._renderer.steps(dialogue, 0)[:-1]
            self._before[talk.system, protocol] = [token for step in before for token in step]
        ids = [*self._before[talk.system, protocol], *self._renderer.steps(dialogue, last)[0]]
        ids += self._renderer.lead(ToolChoice())[0]
        params = SamplingParams(
            max_tokens=tokens,
            temperature=1.0,
            top_p=1.0,
            seed=seed,
            stop_token_ids=self._renderer.stop_token_ids,
        )
        ask = Ask(ids, params, f"d{next(self._numbers)}", "direct", stream=stream)
        return request_body(ask, lambda _: False)


async def differences(rounds: int, pairs: Sequence[Pair]) -> list[tuple[float, float]]:
    """(median of the first's time over the second's, median of the second's), in ms, of each pair; all take turns.

    The first tenth of the rounds, in which connections are made and code is warmed up, does not count.
    """
    taken: list[list[tuple[float, float]]] = [[] for _ in pairs]
    for number in range(rounds + max(rounds // 10, 2)):
        # Made before any is timed: what makes them takes the caches from those who answer.
        made = [make() for make in pairs]
        for place, (first, second) in enumerate(made):
            # Each comes first every other time.
            if number % 2:
                one, two = await first(), await second()
            else:
                two, one = await second(), await first()
            taken[place].append((one - two, two))
    kept = [each[-rounds:] for each in taken]
    return [
        (statistics.median(over for over, _ in each), statistics.median(alone for _, alone in each))
        for each in kept
    ]


async def overheads(directory: Path, rounds: int, with_litellm: bool) -> list[Figure]:
    """On doubles of an engine, one that answers at once and one that paces its streams, and on the tiny engine."""
    renderer = load_renderer(policy_dir(TINY))
    with (
        doubles(renderer, {}, {"pace_s": PACE_S}) as (fast, paced),
        child("capture_double.py", {"tiny": True}) as tiny,
        captures(
            directory / "calls",
            (fast, _SESSIONS, MAX_TOKENS),
            (paced, _SESSIONS, MAX_TOKENS),
            (tiny["urls"][0], 1, _TINY_TOKENS),
        ) as host,
    ):
        async with http_client() as http:
            calls = Calls(http, renderer)
            ways = [
                _Way(calls, *urls) for urls in zip((fast, paced, *tiny["urls"]), host["urls"], strict=True)
            ]
            figures = await _over_the_engine(ways[0], ways[1], rounds)
            figures += await _over_the_tiny_engine(ways[2], rounds)
            if with_litellm:
                models = {"once": f"{fast}/v1", "paced": f"{paced}/v1"}
                with litellm(models, directory) as peer:
                    figures += await _beside_litellm(ways[0], peer, "once", rounds)
                    figures += await _beside_litellm(ways[1], peer, "paced", rounds)
            return figures


@dataclass(frozen=True, slots=True)
class _Way:
    """To an engine, alone and through capture."""

    calls: Calls
    engine: str
    host: str

    def pair(self, session: int, talk: Talk, protocol: Protocol, stream: bool) -> tuple[Timed, Timed]:
        """The same call through capture, and of the engine alone."""
        calls, question = self.calls, self.calls.question()
        url = call_url(self.host, f"s{session}", protocol)
        body = talk.body(protocol, question, stream)
        direct = calls.generate_body(talk, protocol, question, stream, MAX_TOKENS)
        return (
            lambda: calls.post(url, body, ENDS[protocol] if stream else b"tests"),
            lambda: calls.post(f"{self.engine}{GENERATE}", direct, b"finish_reason"),
        )


async def _over_the_engine(at_once: _Way, paced: _Way, rounds: int) -> list[Figure]:
    whole: dict[str, Pair] = {}
    streams: dict[str, Pair] = {}
    for place, (size, talk) in enumerate(_TALKS.items()):
        for protocol in PATHS:
            whole[f"{protocol}.{size}"] = partial(at_once.pair, place, talk, protocol, False)
            streams[f"{protocol}.{size}.stream"] = partial(paced.pair, place, talk, protocol, True)
    fresh = itertools.count(len(_TALKS))
    told: dict[str, Pair] = {
        "chat.small.burst": partial(at_once.pair, 0, SMALL, "chat", True),
        "chat.large.first": lambda: at_once.pair(next(fresh), _TALKS["large"], "chat", False),
    }
    figures: list[Figure] = []
    # Streams wait between their tokens, and whole calls are not to find the machine asleep.
    for named, goal, times in ((whole, GOAL_MS, 5), (streams, GOAL_MS, 1), (told, 0.0, 1)):
        found = await differences(rounds * times, list(named.values()))
        for name, (over, alone) in zip(named, found, strict=True):
            say(f"call.{name}: {over:.2f} over {alone:.2f} ms")
            figures.append(figure(f"call.{name}", over, "ms", goal, alone))
    return figures


async def _over_the_tiny_engine(way: _Way, rounds: int) -> list[Figure]:
    """Both ask for the same tokens, with the same seed."""
    calls, url, seeds = way.calls, call_url(way.host, "s0", "chat"), itertools.count()

    def pair(stream: bool) -> tuple[Timed, Timed]:
        question, seed = calls.question(), next(seeds)
        body = SMALL.body("chat", question, stream, seed=seed)
        direct = calls.generate_body(SMALL, "chat", question, stream, _TINY_TOKENS, seed)
        return (
            lambda: calls.post(url, body, b"policy"),
            lambda: calls.post(f"{way.engine}{GENERATE}", direct, b"finish_reason"),
        )

    found = await differences(rounds, [partial(pair, False), partial(pair, True)])
    figures: list[Figure] = []
    for name, (over, alone) in zip(("call.tiny", "call.tiny.stream"), found, strict=True):
        say(f"{name}: {over:.2f} over {alone:.2f} ms")
        figures.append(figure(name, over, "ms", GOAL_MS, alone))
    return figures


async def _beside_litellm(
    way: _Way, peer: tuple[str, dict[str, str]], model: str, rounds: int
) -> list[Figure]:
    """Chat Completions, which both speak: what LiteLLM adds to the endpoint behind it, and what we add to the engine."""
    calls, (url, headers), stream = way.calls, peer, model == "paced"
    end = ENDS["chat"] if stream else b"tests"
    figures: list[Figure] = []
    for place, (size, talk) in enumerate(_TALKS.items()):

        def theirs(talk: Talk = talk) -> tuple[Timed, Timed]:
            body = talk.body("chat", calls.question(), stream, model=model)
            return (
                lambda: calls.post(f"{url}/chat/completions", body, end, headers),
                lambda: calls.post(f"{way.engine}/v1/chat/completions", body, end),
            )

        ours = partial(way.pair, place, talk, "chat", stream)
        (mine, _), (other, _) = await differences(rounds, [ours, theirs])
        name = f"litellm.{size}{'.stream' if stream else ''}"
        say(f"{name}: {mine:.2f} ms, LiteLLM {other:.2f} ms")
        figures.append(figure(name, mine, "ms", other / PART_OF_LITELLM, other))
    return figures
