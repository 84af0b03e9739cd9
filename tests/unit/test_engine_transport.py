"""What an engine's answers other than 200 become."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from pipeline.engines.base import EngineRefused, EngineUnavailable
from pipeline.engines.transport import Broken, Transport


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A server that answers as its path says, and says back whose key it is."""

    async def answer(request: web.Request) -> web.Response:
        said = f"no such key: {request.headers['Authorization'].removeprefix('Bearer ')}."
        return web.Response(status=int(request.match_info["status"]), text=said)

    application = web.Application()
    application.router.add_route("*", "/{status}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("status", "kind"), [(400, EngineRefused), (401, EngineUnavailable), (503, Broken)])
async def test_the_token_is_in_no_message_also_where_the_engine_says_it_back(
    url: str, status: int, kind: type[Exception]
) -> None:
    transport = Transport(url, "s3cret")
    try:
        with pytest.raises(kind) as raised:
            await transport.whole(f"/{status}", b"{}", {}, time.monotonic() + 20)
        with pytest.raises(EngineUnavailable) as controlled:
            await transport.control("GET", f"/{status}", 20)
    finally:
        await transport.close()
    for error in (raised, controlled):
        assert str(status) in str(error.value)
        assert "no such key: [token]." in str(error.value)
