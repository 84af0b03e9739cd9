"""An answer's readers and the clients behind them: who comes late, who leaves, who takes nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web

from pipeline.capture.call import Answer, Text
from pipeline.capture.server import Limits
from pipeline.capture.turn import Turn
from tests.capture_http_parts import CALLS, eventually, proxied


async def test_a_reader_in_the_middle_of_a_turn_that_ends_gets_the_rest_once() -> None:
    turn = Turn("s", lambda: None)
    ended: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    async def sampled() -> Answer:
        return await ended

    task = asyncio.create_task(sampled())
    turn.run(task)
    for text in "abc":
        turn.add([Text(text)])
    slow, left = turn.pieces(), turn.pieces()
    read = [await anext(slow)]
    await anext(left)
    ended.set_result(Answer(1, "abc", (), "stop", 0, 1, 3))
    await task
    await asyncio.sleep(0)
    await left.aclose()  # pyright: ignore[reportAttributeAccessIssue]  # a generator, as which it can be left
    read += [piece async for piece in slow]
    assert read == [Text("a"), Text("b"), Text("c")]
    assert [piece async for piece in turn.pieces()] == [Text("abc")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_a_client_that_takes_nothing_loses_its_connection_and_not_its_answer(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], stream: bool
) -> None:
    async def stuck(self: web.StreamResponse, data: bytes = b"") -> None:
        await asyncio.Event().wait()

    async with proxied(limits=Limits(stall_s=0.1)) as proxy:
        session = proxy.open()
        with monkeypatch.context() as patch:
            if stream:
                patch.setattr(web.StreamResponse, "write", stuck)
            else:
                patch.setattr(web.Response, "write_eof", stuck)
            raw = await proxy.raw(path, {**body, "stream": stream})
            async with asyncio.timeout(20):
                with suppress(ConnectionError):
                    while await raw.reader.read(1 << 16):
                        pass
            await eventually(lambda: session.owed)
        again = await proxy.raw(path, body)
        assert (await again.head())[0] == 200
        await eventually(lambda: not session.owed)
        assert len(proxy.engine.prompts) == 1
        await again.close()
