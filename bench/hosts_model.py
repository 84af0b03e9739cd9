"""Model servers whose answers are written: tool calls, and then a text.

Reads a line of JSON: `delays_s`, how long an answer takes, of a server each; `calls`, of a rollout. Answers with {"urls"} and
serves until its standard input is closed. Chat Completions at any path: the n-th call of a dialogue, by the tool results in it,
is answered with a call of `step`, the last one with `done`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import orjson
import uvloop
from aiohttp import web


def _answer(message: dict[str, Any], finish: str) -> bytes:
    return orjson.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}],
            "usage": {"prompt_tokens": 900, "completion_tokens": 60, "total_tokens": 960},
        }
    )


def application(delay_s: float, calls: int) -> web.Application:
    step = {"name": "step", "arguments": '{"path": "src/lock.py"}'}
    said = "I read the file before I change it: the index may be taken before the lock. " * 2
    tool = _answer(
        {"content": said, "tool_calls": [{"id": "call_1", "type": "function", "function": step}]},
        "tool_calls",
    )
    text = _answer({"content": "done"}, "stop")

    async def complete(request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        await asyncio.sleep(delay_s)
        taken = sum(message["role"] == "tool" for message in asked["messages"])
        return web.Response(body=tool if taken < calls - 1 else text, content_type="application/json")

    app = web.Application()
    app.router.add_post("/{session:.*}/chat/completions", complete)
    return app


async def main() -> None:
    given = json.loads(sys.stdin.readline())
    runners = [
        web.AppRunner(application(delay_s, given["calls"]), access_log=None) for delay_s in given["delays_s"]
    ]
    for runner in runners:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(json.dumps({"urls": [f"http://127.0.0.1:{each.addresses[0][1]}" for each in runners]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for runner in runners:
        await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(main())
