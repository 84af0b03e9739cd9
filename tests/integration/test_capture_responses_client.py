"""The Responses dialect over real sockets: the official `openai` client, its warnings as errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pipeline.capture.server import Limits
from pipeline.engines.base import EngineUnavailable
from tests.capture_http_parts import Proxy
from tests.dialect_http_parts import (
    assert_append_only,
    assert_captured_once,
    called,
    thinking,
    thought,
    warnings_are_errors,
)
from tests.dialect_parts import PNG, events

ASK: dict[str, Any] = {"model": "m", "input": "q"}
BASH: Any = {
    "type": "function",
    "name": "bash",
    "description": "runs",
    "parameters": {"type": "object"},
    "strict": False,
}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "edits"}
PICTURE: Any = {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{PNG}"}


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with warnings_are_errors():
        yield


def client(proxy: Proxy, retries: int = 0) -> openai.AsyncOpenAI:
    return proxy.client(retries=retries)


async def test_whole_and_streamed_are_the_same_turn() -> None:
    async with thinking(lambda _: thought("hm") + "hello there") as proxy:
        session = proxy.open()
        async with client(proxy) as api:
            async with api.responses.stream(**ASK) as stream:
                said = [event async for event in stream]
                streamed = await stream.get_final_response()
            raw: list[Any] = [event async for event in await api.responses.create(**ASK, stream=True)]
            whole = await api.responses.create(**ASK)
        deltas = [event.delta for event in said if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "hello there"
        assert len(deltas) > 1
        thoughts = [event.delta for event in said if event.type == "response.reasoning_summary_text.delta"]
        assert "".join(thoughts) == "hm"
        assert whole.output_text == streamed.output_text == "hello there"
        assert whole.id == streamed.id
        assert [item.to_dict() for item in whole.output] == [
            item.to_dict() for item in raw[-1].response.output
        ]
        assert whole.usage is not None
        assert whole.usage == streamed.usage
        assert whole.usage.input_tokens == len(proxy.engine.prompts[0])
        assert whole.usage.output_tokens == len(proxy.engine.generations[0].token_ids)
        assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
        assert len(proxy.engine.prompts) == 1
        assert_captured_once(session, proxy)


def scripted(prompt: str) -> str:
    if "third" in prompt:
        return "all done"
    if "first" in prompt:
        return thought("again") + "one more" + called("agents.spawn", '{"n": 1.0}')
    return (
        thought("two at once") + called("bash", '{"cmd":  "a"}') + called("apply_patch", '{"input": "*** x"}')
    )


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("keeps", ["everything", "no ids", "no reasoning", "strings"])
async def test_a_tool_loop_with_thinking_is_one_context(streaming: bool, keeps: str) -> None:
    """As clients with `store: false` do it: all the items go back, or what a client keeps of them."""
    async with thinking(scripted) as proxy, client(proxy) as api:
        session = proxy.open()
        history: list[Any] = [
            {"role": "developer", "content": "Be careful."},
            {"role": "user", "content": "q"},
        ]
        results: list[list[Any]] = [["first", [{"type": "input_text", "text": "second"}, PICTURE]], ["third"]]
        while True:
            asked: dict[str, Any] = {
                "model": "m",
                "instructions": "Be brief.",
                "input": history,
                "tools": [
                    BASH,
                    PATCH,
                    {
                        "type": "namespace",
                        "name": "agents",
                        "description": "d",
                        "tools": [{**BASH, "name": "spawn"}],
                    },
                    {"type": "web_search"},
                ],
                "store": False,
                "include": ["reasoning.encrypted_content"],
            }
            if streaming:
                stream = await api.responses.create(**asked, stream=True)
                said = [event async for event in stream]
                assert said[-1].type == "response.completed"
                made: Any = said[-1].response
                assert [event.sequence_number for event in said] == list(range(len(said)))
            else:
                made = await api.responses.create(**asked)
            for item in [one.to_dict() for one in made.output]:
                if keeps == "no reasoning" and item["type"] == "reasoning":
                    continue
                if keeps == "no ids":
                    item.pop("id")
                bare = keeps == "strings" and item["type"] == "message"
                history.append({"role": "assistant", "content": item["content"][0]["text"]} if bare else item)
            calls = [item for item in made.output if item.type in ("function_call", "custom_tool_call")]
            if not calls:
                break
            for call, result in zip(calls, results.pop(0), strict=True):
                kind = (
                    "custom_tool_call_output" if call.type == "custom_tool_call" else "function_call_output"
                )
                history.append({"type": kind, "call_id": call.call_id, "output": result})
        assert made.output_text == "all done"
        assert [item["input"] for item in history if item.get("type") == "custom_tool_call"] == ["*** x"]
        spawned = next(item for item in history if item.get("namespace"))
        assert (spawned["name"], json.loads(spawned["arguments"])) == ("spawn", {"n": 1.0})
        assert len(proxy.engine.generations) == 3
        assert_captured_once(session, proxy)
        assert_append_only(proxy)
        assert len(proxy.engine.images[-1]) == 1
        assert proxy.capture.ignored["tools.web_search"] == 3


async def test_a_cut_turns_items_in_the_next_request() -> None:
    """A client that kept the finished items of a stream that broke asks on from them."""
    async with thinking(lambda p: "second" if "first" in p else thought("hm") + "first") as proxy:
        session = proxy.open()
        async with client(proxy) as api:
            made = await api.responses.create(**ASK, store=False)
            history: list[Any] = [
                {"role": "user", "content": "q"},
                *(
                    item.to_dict()
                    for item in made.output
                    if item.type == "reasoning" or item.type == "message"
                ),
            ]
            more = await api.responses.create(model="m", input=history, store=False)
            history += [item.to_dict() for item in more.output]
            last = await api.responses.create(
                model="m", input=[*history, {"role": "user", "content": "go on"}], store=False
            )
        assert (more.output_text, last.output_text) == ("second", "second")
        assert_captured_once(session, proxy)
        assert_append_only(proxy)


async def test_length_and_choice() -> None:
    async with thinking(
        lambda p: ' {"cmd": 1}}\n</tool_call>' if p.endswith('"arguments":') else "one two"
    ) as proxy:
        proxy.open()
        async with client(proxy) as api:
            cut = await api.responses.create(**ASK, max_output_tokens=2)
            async with api.responses.stream(**ASK, max_output_tokens=2) as stream:
                last = [event async for event in stream][-1]
            forced = await api.responses.create(
                **ASK,
                tools=[BASH],
                tool_choice={"type": "function", "name": "bash"},
                parallel_tool_calls=False,
            )
    assert cut.status == "incomplete"
    assert last.type == "response.incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage is not None
    assert cut.usage.output_tokens == 2
    (call,) = forced.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"cmd": 1}


async def test_overflow_is_final_and_overload_is_not() -> None:
    replies: list[str | Exception] = [EngineUnavailable("away"), "hello"]
    async with thinking(lambda _: replies.pop(0), max_context=60) as proxy:
        proxy.open()
        async with client(proxy, retries=5) as api:
            for streaming in (False, True):
                with pytest.raises(openai.BadRequestError, match="exceeds the context window") as over:
                    await api.responses.create(model="m", input="x" * 100, stream=streaming)
                assert over.value.code == "context_length_exceeded"
            assert len(proxy.engine.prompts) == 0
            assert (await api.responses.create(**ASK)).output_text == "hello"
            assert len(proxy.engine.prompts) == 2


async def test_state_that_is_not_kept_is_refused_by_name() -> None:
    async with thinking() as proxy:
        proxy.open()
        async with client(proxy) as api:
            with pytest.raises(openai.BadRequestError) as previous:
                await api.responses.create(**ASK, previous_response_id="resp_1")
            assert previous.value.param == "previous_response_id"
            with pytest.raises(openai.BadRequestError, match="set store to false"):
                await api.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_1"}])


async def test_a_stream_that_breaks_is_told_and_can_be_asked_again() -> None:
    async with thinking(lambda _: "hello there") as proxy:
        session = proxy.open()
        proxy.engine.held, proxy.engine.broken = 4, EngineUnavailable("died")
        proxy.engine.go.set()
        async with client(proxy) as api:
            said: list[Any] = []

            async def listen() -> None:
                async for event in await api.responses.create(**ASK, stream=True):
                    said.append(event)

            with pytest.raises(openai.APIConnectionError):
                await listen()
            assert said[-1].type == "response.failed"
            assert said[-1].response.error.code == "server_error"
            async with api.responses.stream(**ASK) as stream:
                assert (await stream.get_final_response()).output_text == "hello there"
        assert session.turns == 1


async def test_pings_keep_a_silent_stream_alive() -> None:
    async with thinking(lambda _: thought("hm") + "hello", Limits(ping_s=0.05)) as proxy:
        proxy.open()
        proxy.engine.held = 3
        raw = await proxy.raw("responses", {**ASK, "stream": True})
        assert (await raw.head())[0] == 200
        text = b""
        while text.count(b"event: response.in_progress\n") < 3:
            text += await raw.chunk() or b""
        proxy.engine.go.set()
        rest, ended = await raw.events()
        await raw.close()
        assert ended
        read = events(text + rest.encode())
        assert [event["sequence_number"] for event in read] == list(range(len(read)))
        assert read[-1]["type"] == "response.completed"
