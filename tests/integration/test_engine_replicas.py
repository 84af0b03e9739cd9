"""Several replicas as one engine: what is lost when one is killed in mid-generation, and who is asked."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pipeline.engines import replicas as module
from pipeline.engines.base import EngineUnavailable
from pipeline.engines.client import open_engine
from pipeline.engines.replicas import Replicas
from pipeline.engines.transport import Broken
from pipeline.engines.vllm import VllmReplica
from pipeline.engines.wire import SamplingParams
from schemas.config import Engine as EngineConfig
from tests.engine_process import engine_processes
from tests.tiny_engine_parts import random_policy, until
from tests.vllm_double import VllmDouble, double

PROMPT = [1, 2, 3]


class Pair:
    """Two doubles behind one engine."""

    def __init__(self, urls: list[str], engine: Replicas, doubles: list[VllmDouble]) -> None:
        self.urls, self.engine, self.doubles = urls, engine, doubles

    async def turn(self, session: str, tokens: int = 3, **more):
        return await self.engine.generate(
            PROMPT, SamplingParams(max_tokens=tokens), f"{session}-r", session, **more
        )

    def of(self, session: str) -> list[int]:
        """How many requests of a session each has had."""
        return [sum(r["request_id"].startswith(f"{session}-") for r in d.requests) for d in self.doubles]

    def up(self) -> list[bool]:
        return [view.up for view in self.engine.views().values()]


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HEALTH_S", 0.05)
    monkeypatch.setattr(module, "_HEALTH_LIMIT_S", 0.2)
    async with AsyncExitStack() as stack:
        doubles = [VllmDouble(), VllmDouble()]
        urls = [await stack.enter_async_context(double(d)) for d in doubles]
        engine = await stack.enter_async_context(Replicas([VllmReplica(url) for url in urls], timeout=20))
        yield Pair(urls, engine, doubles)


@pytest.mark.parametrize("watched", [True, False])
async def test_a_replica_that_is_killed_in_mid_generation_loses_no_token(tmp_path: Path, watched: bool):
    policy = random_policy(tmp_path)
    with engine_processes(policy, 2) as processes:
        urls = list(processes)
        config = EngineConfig(url=urls[0], replicas=(urls[1],))
        seen: list[int] = []
        before = 0
        async with open_engine(config, None, 60) as engine:
            params = SamplingParams(max_tokens=900, seed=5)
            task = asyncio.create_task(
                engine.generate(PROMPT, params, "r", "s", watch=seen.extend if watched else None)
            )

            def busy() -> list[str]:
                return [url for url, view in engine.views().items() if view.in_flight]

            await until(lambda: len(seen) >= 50 if watched else bool(busy()))
            (victim,) = busy()
            if not watched:
                async with asyncio.timeout(20):
                    while await _sampled(victim) < 50:
                        pass
            before = len(seen)
            processes[victim].send_signal(signal.SIGKILL)
            got = await task
            survivor = next(url for url in urls if url != victim)
            scores = await engine.score([*PROMPT, *got.token_ids], 0, "score", "other")
            again = await engine.generate(PROMPT, SamplingParams(max_tokens=2), "r2", "s")
            views = engine.views()
            assert await engine.healthy()
            assert await engine.version() == 0
    assert len(got.token_ids) == len(got.logprobs) == len(got.versions) == 900
    assert got.resumed == 1
    assert set(got.versions) == {0}
    if watched:
        assert tuple(seen) == got.token_ids
        assert 50 <= before < 900
    # The survivor says the same of every token: those of the dead one, and those that it went on with.
    assert scores.logprobs[len(PROMPT) :].tolist() == pytest.approx(got.logprobs, abs=2e-3)
    assert len(again.token_ids) == 2
    assert not views[victim].up
    assert views[survivor].sessions == 2


async def test_scores_that_are_asked_for_anew_have_another_name(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """A server may still be at the first when its client has given it up, and refuses a name that it is at."""
    names: list[str] = []

    async def score(self, token_ids, top_k, request_id, session_id, deadline):
        names.append(request_id)
        if len(names) < 4:
            raise Broken("gone")
        return names

    monkeypatch.setattr(VllmReplica, "score", score)
    assert await pair.engine.score(PROMPT, 0, "s") is names
    assert len(set(names)) == 4


async def _sampled(url: str) -> float:
    import aiohttp

    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        text = await response.text()
    return float(text.split("\npacktrain_engine_sampled_tokens_total ")[1].split()[0])


async def test_a_session_stays_and_new_ones_go_where_least_is_in_flight(pair: Pair):
    await pair.turn("a")
    await pair.turn("b")
    assert (pair.of("a"), pair.of("b")) == ([1, 0], [0, 1])
    for _ in range(3):
        await pair.turn("a")
        await pair.turn("b")
    assert (pair.of("a"), pair.of("b")) == ([4, 0], [0, 4])
    pair.doubles[0].silent = True
    waiting = [asyncio.create_task(pair.turn("a")) for _ in range(3)]
    await until(lambda: pair.of("a") == [7, 0])
    for name in "cdefg":
        await pair.turn(name)
    assert [pair.of(name) for name in "cdefg"] == [[0, 1]] * 5
    pair.doubles[0].silent = False
    await asyncio.gather(*waiting)


async def test_a_replica_that_drains_gets_no_new_session_and_finishes_its_own(pair: Pair):
    await pair.turn("a")
    pair.engine.drain(pair.urls[0])
    pair.doubles[0].silent = True
    under_way = asyncio.create_task(pair.turn("a"))
    await until(lambda: pair.of("a") == [2, 0])
    for name in "bcd":
        await pair.turn(name)
    assert [pair.of(name) for name in "bcd"] == [[0, 1]] * 3
    pair.doubles[0].silent = False
    assert len((await under_way).token_ids) == 3
    pair.engine.drain(pair.urls[0], draining=False)
    await pair.turn("e")
    assert pair.of("e") == [1, 0]
    with pytest.raises(KeyError, match="http://nobody"):
        pair.engine.drain("http://nobody")


async def test_what_one_refuses_to_do_now_another_does_at_once(pair: Pair):
    await pair.turn("a")
    pair.doubles[0].paused = True
    got = await pair.turn("a", within=5)
    assert len(got.token_ids) == 3
    assert pair.of("a") == [2, 1]
    pair.doubles[1].paused = True
    with pytest.raises(EngineUnavailable, match="paused") as caught:
        await pair.turn("a", within=0.4)
    assert all(url in str(caught.value) for url in pair.urls)


async def test_a_replica_whose_answers_cannot_be_used_is_left_for_another(pair: Pair):
    await pair.turn("a")
    pair.doubles[0].mad = True
    got = await pair.turn("a", within=5)
    assert got.logprobs == pytest.approx([-t / 1000 for t in got.token_ids])
    assert pair.of("a") == [2, 1]
    pair.doubles[1].mad = True
    with pytest.raises(EngineUnavailable, match="log-probability -9999"):
        await pair.turn("a")


async def test_a_turn_on_a_replica_that_falls_silent_goes_on_elsewhere(pair: Pair):
    """Nothing closes the connection: only its health checks tell."""
    first = pair.doubles[0]

    def fall_silent(count: int) -> None:
        if count == 5:
            first.silent = first.deaf = True

    first.on_token = fall_silent
    seen: list[int] = []
    got = await pair.turn("a", 12, watch=seen.extend)
    assert got.token_ids == tuple(seen) == tuple(VllmDouble.token(i) for i in range(3, 15))
    assert got.resumed == 1
    assert pair.doubles[1].requests[0]["token_ids"] == [*PROMPT, *got.token_ids[:5]]
    assert pair.up() == [False, True]
    first.silent = first.deaf = False
    first.on_token = lambda count: None
    await until(lambda: pair.up() == [True, True])
    await pair.turn("b")
    assert pair.of("b") == [1, 0]


async def test_a_replica_that_alone_stays_paused_is_left_but_not_when_all_are(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "PAUSED_S", 0.2)
    first, second = pair.doubles
    first.silent = second.silent = True
    task = asyncio.create_task(pair.turn("a", 6))
    await until(lambda: sum(path == "/is_paused" for path, _ in first.controls) >= 12)
    assert (pair.of("a"), pair.up()) == ([1, 0], [True, True])
    second.silent = False
    got = await task
    assert len(got.token_ids) == 6
    assert (pair.of("a"), pair.up()) == ([1, 1], [False, True])
    first.silent = False
    await until(lambda: pair.up() == [True, True])


async def test_the_version_is_the_oldest_of_those_that_are_up(pair: Pair):
    pair.doubles[0].version, pair.doubles[1].version = "4", "3"
    assert await pair.engine.version() == 3
    await pair.turn("a")
    pair.doubles[1].deaf = True
    await until(lambda: pair.up() == [True, False])
    assert await pair.engine.version() == 4


async def test_a_caller_that_goes_away_takes_its_request_along(pair: Pair):
    pair.doubles[0].silent = True
    task = asyncio.create_task(pair.turn("a"))
    await until(lambda: pair.of("a") == [1, 0])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(view.in_flight == 0 for view in pair.engine.views().values())
    assert pair.up() == [True, True]


async def test_sessions_beyond_the_limit_are_forgotten_the_longest_silent_first(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_SESSIONS", 2)
    for name in ("a", "b", "a", "c"):
        await pair.turn(name)
    assert sum(view.sessions for view in pair.engine.views().values()) == 2
    assert list(pair.engine._bound) == ["a", "c"]


def test_one_engine_may_not_be_named_twice():
    with pytest.raises(ValueError, match="twice"):
        open_engine(EngineConfig(url="http://a:1", replicas=("http://a:1/",)), None, 1)
