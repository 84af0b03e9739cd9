"""The capture proxy over real HTTP: its routes, its secrets, its limits, and what trouble looks like in each protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web

from pipeline.capture.journal import HostJournal
from pipeline.capture.rules import Rules
from pipeline.capture.secret import session_secret
from pipeline.capture.server import Limits
from pipeline.engines.base import EngineRefused, EngineUnavailable
from schemas.config import Behaviour
from tests.capture_http_parts import ASK, CALLS, KEY, Proxy, Raw, eventually, form, proxied


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with proxied() as proxy:
        yield proxy


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as http:
        yield http


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_all_three_protocols_with_v1_in_the_base_url_and_without(
    proxy: Proxy, http: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    session = proxy.open()
    for url in (
        f"{proxy.url()}/{path}",
        f"{proxy.url()}/v1/{path}",
        f"{proxy.bare_url()}/{path}?beta=true",
        f"{proxy.bare_url()}/v1/{path}",
    ):
        async with http.post(url, json=body) as response:
            assert response.status == 200
            assert "hello" in await response.text()
    assert session.turns == 1


async def test_the_official_anthropic_client(proxy: Proxy) -> None:
    proxy.open()
    async with anthropic.AsyncAnthropic(base_url=proxy.bare_url(), api_key="x", max_retries=0) as client:
        counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "q"}])
        done = await client.messages.create(
            model="m", max_tokens=100, messages=[{"role": "user", "content": "q"}]
        )
        assert counted.input_tokens == done.usage.input_tokens == len(proxy.engine.prompts[0])
        (model,) = (await client.models.list()).data
        assert (model.id, (await client.models.retrieve("other")).id) == ("policy", "other")
        with pytest.raises(anthropic.BadRequestError) as overflow:
            await client.messages.create(
                model="m", max_tokens=100, messages=[{"role": "user", "content": "x" * 20_000}]
            )
    assert "prompt is too long" in str(overflow.value)


async def test_the_official_clients_stream_with_pings_in_between() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with proxied(lambda _: "hello <tool_call>", limits=Limits(ping_s=0.02)) as proxy:
            session = proxy.open()
            async with proxy.client() as client:
                proxy.engine.held = 3
                stream = await client.responses.create(model="m", input="q", stream=True)
                events: list[Any] = []
                async for event in stream:
                    events.append(event)
                    # Pings of this protocol are events: two of them came while the engine was held.
                    if [e.type for e in events].count("response.in_progress") > 2:
                        proxy.engine.go.set()
            assert [e.sequence_number for e in events] == list(range(len(events)))
            assert events[-1].type == "response.completed"
            deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
            assert "".join(deltas) == events[-1].response.output_text
            assert len(deltas) > 1
            async with anthropic.AsyncAnthropic(
                base_url=proxy.bare_url(), api_key="x", max_retries=0
            ) as other:
                proxy.engine.gate.clear()
                async with other.messages.stream(
                    model="m", max_tokens=100, messages=[{"role": "user", "content": "another"}]
                ) as messages:
                    heard = [event async for event in _opening(messages, proxy)]
                    final = await messages.get_final_message()
            assert heard[0].type == "message_start"
            assert heard[0].message.usage.input_tokens == len(proxy.engine.prompts[-1])
            assert final.content[0].type == "text"
            assert final.stop_reason == "end_turn"
            assert final.usage.output_tokens == len(proxy.engine.generations[-1].token_ids)
        assert session.turns == 2


async def _opening(stream: Any, proxy: Proxy) -> AsyncIterator[Any]:
    """The stream's events; the engine goes on once the stream has begun, which only a ping can have made it do."""
    async for event in stream:
        proxy.engine.gate.set()
        yield event


async def test_models_in_either_form(proxy: Proxy, http: aiohttp.ClientSession) -> None:
    proxy.open()
    async with http.get(f"{proxy.url()}/models") as response:
        assert (await response.json())["object"] == "list"
    async with http.get(f"{proxy.url()}/models", headers={"anthropic-version": "2023-06-01"}) as response:
        assert (await response.json())["has_more"] is False
    async with http.get(f"{proxy.url()}/models/{'x' * 300}") as response:
        assert response.status == 404


async def test_clients_that_knock_first(proxy: Proxy, http: aiohttp.ClientSession) -> None:
    proxy.open()
    for url in (proxy.url(), proxy.bare_url(), f"{proxy.bare_url()}/", f"{proxy.bare_url()}/api/hello"):
        async with http.head(url) as response:
            assert response.status == 200
            assert await response.read() == b""
    async with http.head(proxy.bare_url()[:-1] + "0x") as response:
        assert response.status == 404
    async with http.get(f"{proxy.base_url}/healthz") as response:
        assert await response.json() == {"sessions": 1}


async def test_a_websocket_is_refused_so_that_its_client_falls_back(
    proxy: Proxy, http: aiohttp.ClientSession
) -> None:
    proxy.open()
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await http.ws_connect(f"{proxy.url()}/responses")
    assert refused.value.status == 426
    async with http.get(f"{proxy.url()}/responses") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert form(await response.json()) == "openai"


async def test_nothing_is_told_without_the_secret(proxy: Proxy, http: aiohttp.ClientSession) -> None:
    proxy.open()
    right = session_secret(KEY, "s1")
    for path, body in CALLS:
        answers = set()
        for session, secret in (
            ("s1", "0" * 64),
            ("s2", right),
            ("s2", session_secret(KEY, "s2")),
            ("s1", "\u00e9"),
            ("s1", right[:-1]),
        ):
            async with http.post(f"{proxy.base_url}/s/{session}/{secret}/v1/{path}", json=body) as response:
                answers.add((response.status, await response.text()))
            async with http.get(f"{proxy.base_url}/s/{session}/{secret}/v1/models") as response:
                assert response.status == 404
        assert len(answers) == 1
        assert answers.pop()[0] == 404
    assert proxy.engine.prompts == []


async def test_two_sessions_do_not_share_answers(proxy: Proxy) -> None:
    first, second = proxy.open("s1"), proxy.open("s2")
    async with proxy.client("s1") as client:
        one = await client.chat.completions.create(**ASK)
    assert (first.turns, second.turns) == (1, 0)
    async with proxy.client("s2") as client:
        other = await client.chat.completions.create(**ASK)
    assert (first.turns, second.turns) == (1, 1)
    assert one.id != other.id
    assert len(proxy.engine.prompts) == 2


async def test_trouble_is_classified_for_the_clients_retries(proxy: Proxy) -> None:
    session = proxy.open(max_turns=1)
    async with proxy.client() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x" * 20_000}]
            )
        assert bad.value.code == "context_length_exceeded"
        assert "maximum context length is 10000 tokens" in str(bad.value)
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="m", messages=[], n=2)
        assert bad.value.param == "messages"
        proxy.engine.script = lambda _: EngineUnavailable("down")
        with pytest.raises(openai.InternalServerError) as down:
            await client.chat.completions.create(**ASK)
        assert (down.value.status_code, down.value.response.headers["Retry-After"]) == (503, "1")
        proxy.engine.script = lambda _: EngineRefused("no such token")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(**ASK)
        assert bad.value.code == "engine_refused"
        proxy.engine.script = lambda _: "hello"
        await client.chat.completions.create(**ASK)
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "again"}])
        assert bad.value.code == "max_turns"
        await proxy.capture.close(session)
        with pytest.raises(openai.APIStatusError) as over:
            await client.chat.completions.create(**ASK)
        assert over.value.status_code == 410


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [(*call, status) for call, status in zip(CALLS, (503, 503, 529), strict=True)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_away_is_each_protocols_own_status(
    proxy: Proxy, http: aiohttp.ClientSession, path: str, body: dict[str, Any], status: int, stream: bool
) -> None:
    proxy.open()
    proxy.engine.script = lambda _: EngineUnavailable("http://engine:8000 does not answer")
    async with http.post(f"{proxy.url()}/{path}", json={**body, "stream": stream}) as response:
        told = await response.text()
        assert (response.status, response.headers["Retry-After"]) == (status, "1")
    assert form(json.loads(told)) == ("anthropic" if path == "messages" else "openai")
    assert "engine:8000" not in told


async def test_a_bug_is_a_500_that_tells_nothing(
    proxy: Proxy, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.open()
    proxy.engine.script = lambda _: KeyError("inner detail")
    async with http.post(f"{proxy.url()}/chat/completions", json=ASK) as response:
        assert response.status == 500
        told = await response.json()
    assert told["error"]["type"] == "server_error"
    assert "inner detail" not in str(told)
    assert "inner detail" in caplog.text


async def test_the_sdk_rides_out_an_engine_that_is_away_for_a_while(proxy: Proxy) -> None:
    replies: list[str | Exception] = [EngineUnavailable("away"), EngineUnavailable("away"), "hello"]
    proxy.engine.script = lambda _: replies.pop(0)
    session = proxy.open()
    async with proxy.client(retries=3) as client:
        done = await client.chat.completions.create(**ASK)
    assert done.choices[0].message.content == "hello"
    assert session.turns == 1


async def test_unknown_paths_and_methods_are_told_in_the_protocols_form(
    proxy: Proxy, http: aiohttp.ClientSession
) -> None:
    proxy.open()
    for method, url, headers, status, whose in (
        ("GET", f"{proxy.url()}/nothing", {}, 404, "openai"),
        ("POST", f"{proxy.url()}/embeddings", {}, 404, "openai"),
        ("GET", f"{proxy.url()}/nothing", {"anthropic-version": "2023-06-01"}, 404, "anthropic"),
        ("POST", f"{proxy.url()}/messages/batches", {}, 404, "anthropic"),
        ("GET", f"{proxy.url()}/messages", {}, 405, "anthropic"),
        ("PUT", f"{proxy.url()}/chat/completions", {}, 405, "openai"),
        ("GET", f"{proxy.base_url}/", {}, 404, "openai"),
    ):
        async with http.request(method, url, headers=headers) as response:
            assert response.status == status
            assert form(await response.json()) == whose
            assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("take", [lambda proxy: proxy.url(), lambda proxy: proxy.bare_url()])
async def test_no_secret_is_logged(
    proxy: Proxy,
    http: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
    take: Callable[[Proxy], str],
) -> None:
    caplog.set_level(logging.DEBUG)
    proxy.open()
    url = take(proxy)
    async with http.post(f"{url}/chat/completions", json=ASK) as response:
        assert response.status == 200
    proxy.engine.script = lambda _: EngineUnavailable("away")
    for path, body in (*CALLS, ("nothing", {})):
        async with http.post(f"{url}/{path}", json={**body, "stream": True, "x": 1}) as response:
            assert response.status in (404, 503, 529)
    # A request line that does not parse, which aiohttp quotes in its own error.
    raw = await Raw.connect(proxy.base_url)
    raw.writer.write(
        f"GET {url.removeprefix(proxy.base_url)}/m\u00e9 HTTP/1.1\r\nHost: x\r\n\r\n".encode("latin-1")
    )
    assert b" 400 " in await raw.reader.readline()
    await raw.close()
    # A client that goes while it is sent its answer.
    proxy.engine.script = lambda _: "hello " * 200
    for _ in range(5):
        raw = await proxy.raw("chat/completions", {**ASK, "stream": True, "seed": _})
        await raw.head()
        raw.cut()
    door = proxy.capture._doors["s1"]
    await eventually(lambda: door.calls == 0)
    assert "Error handling request" in caplog.text
    assert session_secret(KEY, "s1") not in caplog.text


async def test_a_header_that_is_no_text_names_an_agent_all_the_same(proxy: Proxy, tmp_path: Path) -> None:
    journal = HostJournal(tmp_path, "h1")
    proxy.capture.open("s1", Behaviour(max_turns=9), Rules(agent_header="x-agent"), journal=journal)
    for name, turns in ((b"\xff", 1), (b"\xfe", 2), (b"\xff", 2)):
        raw = await Raw.connect(proxy.base_url)
        target = proxy.url().removeprefix(proxy.base_url)
        body = json.dumps(ASK).encode()
        raw.writer.write(
            f"POST {target}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
            + b"X-Agent: %b\r\n\r\n%b" % (name, body)
        )
        assert (await raw.head())[0] == 200
        assert len(proxy.engine.prompts) == turns
        await raw.close()
    journal.forget("s1")
    journal.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_an_answer_that_its_client_did_not_take_whole_is_owed(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], stream: bool
) -> None:
    session = proxy.open()
    sending = asyncio.Event()

    async def held(self: web.StreamResponse, data: bytes = b"") -> None:
        sending.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(web.StreamResponse if stream else web.Response, "write_eof", held)
    raw = await proxy.raw(path, {**body, "stream": stream})
    async with asyncio.timeout(20):
        await sending.wait()
    assert not session.owed
    raw.cut()
    await eventually(lambda: session.owed)
