"""Chat Completions over real sockets: the official client, and raw ones that break off."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from aiohttp import web
from openai.types.chat import ChatCompletionChunk

from pipeline.capture.server import Capture, Limits
from pipeline.engines.base import EngineUnavailable
from tests.capture_http_parts import ASK, KEY, PacedEngine, Proxy, Raw, eventually, proxied
from tests.dialect_http_parts import warnings_are_errors

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
TWO_CALLS = (
    'look <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    '<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'
)
PING_S = 0.05
STREAM: dict[str, Any] = {**ASK, "stream": True}


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings_are_errors():
        yield


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with proxied(limits=Limits(ping_s=PING_S)) as proxy:
        yield proxy


async def test_the_official_client_whole(proxy: Proxy) -> None:
    session = proxy.open()
    async with proxy.client() as client:
        done = await client.chat.completions.create(**ASK)
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("any/name")).id == "any/name"
    assert done.choices[0].message.content == "hello"
    assert done.choices[0].finish_reason == "stop"
    (context,) = session.export().contexts
    assert context.generated == len(proxy.engine.generations[0].token_ids)


async def test_the_official_client_streaming(proxy: Proxy) -> None:
    proxy.open()
    async with proxy.client() as client:
        stream = await client.chat.completions.create(**STREAM, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(**ASK)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(text or "" for text in texts) == "hello"
    # As the tokens came, not at once.
    assert sum(bool(text) for text in texts) > 1
    # The same call in the other form is the same turn.
    assert whole.choices[0].message.content == "hello"
    assert {chunk.id for chunk in chunks} == {whole.id}
    assert chunks[-1].usage == whole.usage
    assert len(proxy.engine.prompts) == 1


async def test_the_sync_client(proxy: Proxy) -> None:
    proxy.open()

    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=proxy.url(), api_key="x", max_retries=0) as client:
            whole = client.chat.completions.create(**ASK)
            with client.chat.completions.create(**STREAM) as stream:
                streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content, streamed

    assert await asyncio.to_thread(ask) == ("hello", "hello")


async def test_several_tool_calls_and_their_results() -> None:
    async with proxied(lambda prompt: "done" if "result-2" in prompt else TWO_CALLS) as proxy:
        session = proxy.open()
        async with proxy.client() as client:
            messages: list[Any] = [{"role": "user", "content": "q"}]
            async with client.chat.completions.stream(
                model="m",
                messages=messages,
                tools=[TOOL],  # pyright: ignore[reportArgumentType]
            ) as stream:
                first = (await stream.get_final_completion()).choices[0]
            calls = first.message.tool_calls
            assert calls is not None
            assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1}, {"a": 2}]
            assert first.finish_reason == "tool_calls"
            assert first.message.content == "look"
            messages += [
                {"role": "assistant", "content": "look", "tool_calls": [call.model_dump() for call in calls]},
                *(
                    {"role": "tool", "tool_call_id": call.id, "content": f"result-{i}"}
                    for i, call in enumerate(calls, 1)
                ),
            ]
            second = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])  # pyright: ignore[reportArgumentType]
        assert second.choices[0].message.content == "done"
        # One context: the sampled turn was recognized by its call ids.
        (context,) = session.export().contexts
        assert context.generated == sum(len(made.token_ids) for made in proxy.engine.generations)


async def test_stop_and_length_are_told() -> None:
    async with proxied(lambda _: "one END two") as proxy:
        proxy.open()
        async with proxy.client() as client:
            stopped = await client.chat.completions.create(**ASK, stop=["END"])
            cut = await client.chat.completions.create(**ASK, max_completion_tokens=2)
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("one", "stop")
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 2


async def test_events_come_in_order_with_pings_while_nothing_else_does(proxy: Proxy) -> None:
    proxy.open()
    proxy.engine.held = 3
    raw = await proxy.raw("chat/completions", STREAM)
    status, headers = await raw.head()
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    text = b""
    while b": ping\n\n: ping\n\n" not in text:
        text += await raw.chunk() or b""
    proxy.engine.go.set()
    rest, ended = await raw.events()
    assert ended
    await raw.close()
    sent = (text.decode() + rest).split("\n\n")
    assert sent[-2:] == ["data: [DONE]", ""]
    data = [event.removeprefix("data: ") for event in sent[:-2] if event.startswith("data: ")]
    chunks = [ChatCompletionChunk.model_validate_json(event, strict=True) for event in data]
    assert len(data) + sent.count(": ping") == len(sent) - 2
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"


async def test_pings_begin_before_the_first_token(proxy: Proxy) -> None:
    proxy.open()
    proxy.engine.gate.clear()
    raw = await proxy.raw("chat/completions", STREAM)
    assert (await raw.head())[0] == 200
    first = await raw.chunk() or b""
    while not first.endswith(b": ping\n\n"):
        first += await raw.chunk() or b""
    assert first.startswith(b'data: {"id":')
    proxy.engine.gate.set()
    rest, ended = await raw.events()
    assert ended
    assert rest.endswith("data: [DONE]\n\n")
    await raw.close()


async def test_an_engine_that_is_down_is_a_status_not_a_stream() -> None:
    async with proxied() as proxy:
        proxy.open()
        replies: list[str | Exception] = [EngineUnavailable("http://engine:1 is down"), "hello"]
        proxy.engine.script = lambda _: replies.pop(0)
        raw = await proxy.raw("chat/completions", STREAM)
        status, headers = await raw.head()
        assert (status, headers["retry-after"]) == (503, "1")
        told = await raw.reader.readexactly(int(headers["content-length"]))
        assert b"engine:1" not in told
        await raw.close()
        async with proxy.client(retries=1) as client:
            stream = await client.chat.completions.create(**STREAM)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"


async def test_trouble_in_mid_stream_breaks_it_off_and_the_same_body_starts_anew(proxy: Proxy) -> None:
    session = proxy.open()
    proxy.engine.held, proxy.engine.broken = 3, EngineUnavailable("gone")
    raw = await proxy.raw("chat/completions", STREAM)
    assert (await raw.head())[0] == 200
    await proxy.engine.waiting.wait()
    proxy.engine.go.set()
    text, ended = await raw.events()
    assert not ended
    last = json.loads(text.split("data: ")[-1])
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "engine_unavailable")
    await raw.close()
    async with proxy.client() as client:
        stream = await client.chat.completions.create(**STREAM)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"
    (context,) = session.export().contexts
    assert context.generated == len(proxy.engine.generations[-1].token_ids)


async def test_the_client_is_told_of_trouble_in_mid_stream(proxy: Proxy) -> None:
    proxy.open()
    proxy.engine.held, proxy.engine.broken = 3, EngineUnavailable("gone")
    async with proxy.client() as client:
        stream = await client.chat.completions.create(**STREAM)
        proxy.engine.go.set()
        with pytest.raises(openai.APIError) as told:
            [chunk async for chunk in stream]
    assert told.value.code == "engine_unavailable"


async def test_a_session_that_ends_in_mid_stream_says_so(proxy: Proxy) -> None:
    session = proxy.open()
    proxy.engine.held = 3
    raw = await proxy.raw("chat/completions", STREAM)
    assert (await raw.head())[0] == 200
    await proxy.engine.waiting.wait()
    await proxy.capture.close(session)
    text, ended = await raw.events()
    assert ended
    assert json.loads(text.split("data: ")[-1])["error"]["code"] == "session_closed"
    await raw.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_is_cut_off_loses_nothing(proxy: Proxy, stream: bool) -> None:
    session = proxy.open()
    body = {**ASK, "stream": stream}
    if stream:
        proxy.engine.held = 3
    else:
        proxy.engine.gate.clear()
    raw = await proxy.raw("chat/completions", body)
    if stream:
        assert (await raw.head())[0] == 200
        await proxy.engine.waiting.wait()
    else:
        await proxy.engine.wait_for_prompts(1)
    raw.cut()
    await eventually(lambda: session._left)
    # While it is still under way, the same body joins it.
    again = await proxy.raw("chat/completions", body)
    proxy.engine.go.set()
    proxy.engine.gate.set()
    status, headers = await again.head()
    assert status == 200
    if stream:
        text, ended = await again.events()
        assert ended
        assert text.endswith("data: [DONE]\n\n")
    else:
        done = json.loads(await again.reader.readexactly(int(headers["content-length"])))
        assert done["choices"][0]["message"]["content"] == "hello"
    await again.close()
    assert len(proxy.engine.prompts) == session.turns == 1
    assert not session.owed


async def test_a_client_that_reads_nothing_holds_little_and_is_cut_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = PacedEngine(lambda _: "word " * 1500)
    capture = Capture(KEY, engine.renderer, engine, 10_000, Limits(ping_s=PING_S, stall_s=0.5))
    runner = capture.runner(1)
    await runner.setup()
    # Small buffers of the system, so that what is not read shows in ours.
    listening, sock = socket.socket(), socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    listening.bind(("127.0.0.1", 0))
    await web.SockSite(runner, listening).start()
    proxy = Proxy(capture, engine, f"http://127.0.0.1:{listening.getsockname()[1]}")
    try:
        session = proxy.open(max_tokens=10_000)
        await asyncio.get_running_loop().run_in_executor(None, sock.connect, listening.getsockname())
        raw = Raw(*await asyncio.open_connection(sock=sock))
        raw.writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
        await proxy.send(raw, "chat/completions", STREAM)
        # What it does not take is not piled up for it, and the turn ends all the same.
        most = 0
        await eventually(lambda: runner.server and runner.server.connections)
        async with asyncio.timeout(20):
            while (server := runner.server) is not None and (open_ := server.connections):
                buffers = [c.transport.get_write_buffer_size() for c in open_ if c.transport is not None]
                most = max([most, *buffers])
                await asyncio.sleep(0.005)
        assert 0 < most < 200_000
        await eventually(lambda: session.last is not None)
        raw.cut()
    finally:
        await runner.cleanup()
    # Nobody's error.
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert session.owed
    (context,) = session.export().contexts
    assert context.generated == len(engine.generations[0].token_ids) > 5000
