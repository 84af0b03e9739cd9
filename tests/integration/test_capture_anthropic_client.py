"""The Messages dialect over real sockets: the official `anthropic` client, its warnings as errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

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

ASK: dict[str, Any] = {"model": "m", "max_tokens": 400, "messages": [{"role": "user", "content": "q"}]}
BASH: Any = {"name": "bash", "description": "runs", "input_schema": {"type": "object"}}
PICTURE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with warnings_are_errors():
        yield


def client(proxy: Proxy, retries: int = 0, session: str = "s1") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=proxy.bare_url(session), api_key="x", max_retries=retries)


async def test_whole_and_streamed_are_the_same_turn() -> None:
    async with thinking(lambda _: thought("hm") + "hello there") as proxy:
        session = proxy.open()
        async with client(proxy) as api:
            async with api.messages.stream(**ASK) as stream:
                texts = [text async for text in stream.text_stream]
                streamed = await stream.get_final_message()
            whole = await api.messages.create(**ASK)
            beta = await api.beta.messages.create(**ASK, betas=["context-management-2025-06-27"])
            counted = await api.messages.count_tokens(model="m", messages=ASK["messages"])
            assert [model.id async for model in api.models.list()] == ["policy"]
        assert "".join(texts) == "hello there"
        assert len(texts) > 1
        assert Message.model_validate(streamed.to_dict()).model_dump() == whole.model_dump()
        assert beta.content[1].type == "text"
        assert [block.type for block in whole.content] == ["thinking", "text"]
        assert whole.stop_reason == "end_turn"
        assert counted.input_tokens == whole.usage.input_tokens == len(proxy.engine.prompts[0])
        assert whole.usage.output_tokens_details is not None
        assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens
        assert whole.usage.output_tokens == len(proxy.engine.generations[0].token_ids)
        assert len(proxy.engine.prompts) == 1
        assert_captured_once(session, proxy)


def scripted(prompt: str) -> str:
    if "third" in prompt:
        return "all done"
    if "first" in prompt:
        return thought("again") + "one more" + called("bash", '{"cmd": "two"}')
    return thought("two at once") + called("bash", '{"cmd": "a", "n": 1.0}') + called("edit", "{}")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("rewriting", [False, True])
async def test_a_tool_loop_with_thinking_is_one_context(streaming: bool, rewriting: bool) -> None:
    """Rewriting: cache markers come and go, text becomes blocks, thinking is dropped, the first text is not."""
    async with thinking(scripted) as proxy, client(proxy) as api:
        session = proxy.open()
        history: list[Any] = [{"role": "user", "content": "q"}]
        results: list[list[Any]] = [
            [
                {"content": "first"},
                {"content": [{"type": "text", "text": "no"}, PICTURE], "is_error": True},
            ],
            [{"content": "third"}],
        ]
        while True:
            asked: dict[str, Any] = {
                "model": "m",
                "max_tokens": 400,
                "tools": [BASH, {**BASH, "name": "edit"}],
                "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
                "messages": history,
            }
            if rewriting and len(history) > 1:
                asked["system"] = "Be brief."
                asked["tools"] = [{**tool, "cache_control": {"type": "ephemeral"}} for tool in asked["tools"]]
                history[0] = {"role": "user", "content": [{"type": "text", "text": "q"}]}
            if streaming:
                async with api.messages.stream(**asked) as stream:
                    made: Any = await stream.get_final_message()
            else:
                made = await api.messages.create(**asked)
            content = [block.to_dict() for block in made.content]
            if rewriting:
                content = [block for block in content if block["type"] != "thinking"]
            history.append({"role": "assistant", "content": content})
            uses = [block for block in made.content if block.type == "tool_use"]
            if not uses:
                break
            assert made.stop_reason == "tool_use"
            said = results.pop(0)
            history.append(
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": use.id, **result}
                        for use, result in zip(uses, said, strict=True)
                    ],
                }
            )
        assert [block["type"] for block in history[1]["content"]][-2:] == ["tool_use", "tool_use"]
        assert history[1]["content"][-2]["input"] == {"cmd": "a", "n": 1.0}
        assert made.content[0].text == "all done"
        assert len(proxy.engine.generations) == 3
        assert_captured_once(session, proxy)
        assert_append_only(proxy)
        assert len(proxy.engine.images[-1]) == 1


async def test_a_tool_that_is_loaded_in_mid_dialogue_rewrites_nothing() -> None:
    late: Any = {**BASH, "name": "fetch", "defer_loading": True}
    script = {1: called("bash", "{}"), 2: called("fetch", "{}"), 3: "done"}
    async with thinking(lambda p: script[p.count("<|im_start|>assistant")]) as proxy, client(proxy) as api:
        session = proxy.open()
        history: list[Any] = [{"role": "user", "content": "q"}]
        results: list[Any] = [[{"type": "tool_reference", "tool_name": "fetch"}], "fetched"]
        while True:
            made = await api.messages.create(model="m", max_tokens=99, tools=[BASH, late], messages=history)
            history.append({"role": "assistant", "content": [block.to_dict() for block in made.content]})
            if made.stop_reason != "tool_use":
                break
            (use,) = (block for block in made.content if block.type == "tool_use")
            result = {"type": "tool_result", "tool_use_id": use.id, "content": results.pop(0)}
            history.append({"role": "user", "content": [result]})
        decode = proxy.engine.renderer.tokenizer.decode
        assert '"name":"fetch"' not in decode(proxy.engine.prompts[0], keep_special=True)
        assert (
            decode(proxy.engine.prompts[1], keep_special=True).count('{"name":"fetch","description":"runs"')
            == 1
        )
        assert_captured_once(session, proxy)
        assert_append_only(proxy)


async def test_stop_sequence_length_and_choice() -> None:
    async with thinking(
        lambda p: ' {"cmd": 1}}\n</tool_call>' if p.endswith('"arguments":') else "one END two"
    ) as proxy:
        proxy.open()
        async with client(proxy) as api:
            stopped = await api.messages.create(**ASK, stop_sequences=["END"])
            cut = await api.messages.create(**{**ASK, "max_tokens": 2})
            forced = await api.messages.create(
                **ASK,
                tools=[BASH],
                tool_choice={"type": "tool", "name": "bash", "disable_parallel_tool_use": True},
            )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert [block.to_dict()["text"] for block in stopped.content] == ["one"]
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    assert [(block.type, block.to_dict()["input"]) for block in forced.content] == [("tool_use", {"cmd": 1})]
    assert forced.stop_reason == "tool_use"


async def test_overflow_is_final_and_overload_is_not() -> None:
    replies: list[str | Exception] = [EngineUnavailable("away"), "hello"]
    async with thinking(lambda _: replies.pop(0), max_context=60) as proxy:
        proxy.open()
        async with client(proxy, retries=5) as api:
            with pytest.raises(
                anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 60 maximum"
            ) as over:
                await api.messages.create(
                    model="m", max_tokens=4, messages=[{"role": "user", "content": "x" * 100}]
                )
            assert over.value.type == "invalid_request_error"
            assert len(proxy.engine.prompts) == 0
            # The client's own retry finds the engine again.
            assert (await api.messages.create(**ASK)).content[0].to_dict()["text"] == "hello"
            assert len(proxy.engine.prompts) == 2


async def test_errors_have_the_clients_types() -> None:
    async with thinking(lambda _: EngineUnavailable("away")) as proxy:
        session = proxy.open()
        async with client(proxy) as api:
            with pytest.raises(anthropic.InternalServerError) as away:
                await api.messages.create(**ASK)
            assert (away.value.status_code, away.value.type) == (529, "overloaded_error")
            with pytest.raises(
                anthropic.BadRequestError, match=r"messages\.1: the last message is the assistant's"
            ):
                await api.messages.create(
                    **{**ASK, "messages": [*ASK["messages"], {"role": "assistant", "content": "The"}]}
                )
            with pytest.raises(anthropic.BadRequestError, match="nothing is fetched"):
                await api.messages.create(
                    model="m",
                    max_tokens=5,
                    messages=[
                        {
                            "role": "user",
                            "content": [
                                {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
                            ],
                        }
                    ],
                )
            await proxy.capture.close(session)
            with pytest.raises(anthropic.APIStatusError) as over:
                await api.messages.create(**ASK)
            assert over.value.status_code == 410
        async with client(proxy, session="other") as api:
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await api.messages.create(**ASK)
            assert unknown.value.type == "not_found_error"


async def test_a_stream_that_breaks_is_an_error_that_is_tried_again() -> None:
    async with thinking(lambda _: "hello there") as proxy:
        session = proxy.open()
        proxy.engine.held, proxy.engine.broken = 4, EngineUnavailable("died")
        proxy.engine.go.set()
        async with client(proxy) as api:
            async with api.messages.stream(**ASK) as stream:
                with pytest.raises(anthropic.APIStatusError) as broken:
                    await stream.get_final_message()
            assert broken.value.body == {
                "type": "error",
                "error": {
                    "type": "overloaded_error",
                    "message": "service unavailable, overloaded: try again",
                },
                "request_id": None,
            }
            async with api.messages.stream(**ASK) as stream:
                assert (await stream.get_final_message()).content[0].to_dict()["text"] == "hello there"
        assert session.turns == 1


async def test_pings_keep_a_silent_stream_alive() -> None:
    async with thinking(lambda _: thought("hm") + "hello", Limits(ping_s=0.05)) as proxy:
        proxy.open()
        proxy.engine.held = 3
        raw = await proxy.raw("messages", {**ASK, "stream": True})
        assert (await raw.head())[0] == 200
        text = b""
        while text.count(b"event: ping\n") < 2:
            text += await raw.chunk() or b""
        proxy.engine.go.set()
        rest, ended = await raw.events()
        await raw.close()
        assert ended
        kinds = [event["type"] for event in events(text + rest.encode())]
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        proxy.engine.held = None
        async with client(proxy) as api, api.messages.stream(**ASK) as stream:
            assert (await stream.get_final_message()).content[-1].to_dict()["text"] == "hello"
