"""A session's promises, against a scripted double of an engine."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import numpy as np
import pytest

from pipeline.capture.call import Answer
from pipeline.capture.dialogue import Dialogue, steps
from pipeline.capture.messages import Message, Tool, ToolCall
from pipeline.capture.session import ContextOverflow, Session, SessionClosed, TurnLimit
from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.capture.tree import ContextTree
from pipeline.engines.base import EngineUnavailable, Generation
from schemas.config import Behaviour
from tests.capture_parts import ScriptedEngine, byte_level_renderer, complete

TOOL = Tool("calculator", "Evaluates.", {"type": "object"})
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>'


def session(engine: ScriptedEngine, max_context: int = 1000, **behaviour: object) -> Session:
    return Session("s", Behaviour.model_validate(behaviour), max_context, engine.renderer, engine)


def asking(*contents: str, tools: tuple[Tool, ...] = ()) -> Dialogue:
    roles = ("user", "assistant")
    return Dialogue(tuple(Message(roles[i % 2], content) for i, content in enumerate(contents)), tools)  # pyright: ignore[reportArgumentType]


async def test_sampled_tokens_are_kept_and_only_the_new_suffix_is_added() -> None:
    engine = ScriptedEngine(lambda _: "an\u00e9swer ")
    tenant = session(engine)
    first = await complete(tenant, "1", asking("q"), None)
    assert first.content == "an\u00e9swer"
    await complete(tenant, "2", asking("q", "an\u00e9swer", "more"), None)
    before = engine.prompts[0] + list(engine.generations[0].token_ids)
    assert engine.prompts[1][: len(before)] == before
    text = engine.renderer.tokenizer.decode(engine.prompts[1], keep_special=True)
    assert text == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nan\u00e9swer <|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )
    export = tenant.export()
    assert len(export.contexts) == 1
    assert export.columns["tokens"].tolist() == engine.prompts[1] + list(engine.generations[1].token_ids)
    mask = export.columns["loss_mask"] == 1
    assert export.columns["logprobs"][mask].tolist() == [lp for g in engine.generations for lp in g.logprobs]


async def test_a_retry_gets_the_recorded_answer_also_while_the_first_is_under_way() -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine)
    engine.gate.clear()
    twice = [asyncio.create_task(complete(tenant, "same", asking("q"), None)) for _ in range(2)]
    await engine.wait_for_prompts(1)
    assert tenant.owed
    engine.gate.set()
    first, second = await asyncio.gather(*twice)
    assert first == second == await complete(tenant, "same", asking("q"), None)
    assert len(engine.prompts) == 1
    assert tenant.turns == 1
    assert len(tenant.export().contexts) == 1


async def test_different_requests_at_once_are_independent() -> None:
    engine = ScriptedEngine(lambda prompt: prompt.split("user\n")[1][0].upper())
    tenant = session(engine)
    engine.gate.clear()
    tasks = [asyncio.create_task(complete(tenant, q, asking(q), None)) for q in "ab"]
    await engine.wait_for_prompts(2)
    engine.gate.set()
    assert [answer.content for answer in await asyncio.gather(*tasks)] == ["A", "B"]
    export = tenant.export()
    assert [context.generated for context in export.contexts] == [2, 2]


async def test_a_client_that_goes_away_loses_nothing() -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine)
    engine.gate.clear()
    gone = asyncio.create_task(complete(tenant, "1", asking("q"), None))
    await engine.wait_for_prompts(1)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    engine.gate.set()
    assert (await complete(tenant, "1", asking("q"), None)).content == "a"
    assert len(engine.prompts) == 1


async def test_an_answer_that_its_client_did_not_wait_for_is_owed_until_it_asks_again() -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine)
    engine.gate.clear()
    gone = asyncio.create_task(complete(tenant, "1", asking("q"), None))
    await engine.wait_for_prompts(1)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    engine.gate.set()
    async with asyncio.timeout(10):
        while tenant.last is None:
            await asyncio.sleep(0.001)
    assert tenant.owed, "the turn is recorded, and the agent never saw it"
    await complete(tenant, "1", asking("q"), None)
    assert not tenant.owed


async def test_history_that_differs_in_a_letter_only_is_trained_after_the_letters_it_was_sampled_from() -> (
    None
):
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine)

    def foreign(arguments: str) -> Dialogue:
        call = ToolCall("call_of_another", "f", arguments)
        return Dialogue(
            (Message("user", "q"), Message("assistant", "", (call,)), Message("tool", "2", (), call.id))
        )

    engine.gate.clear()
    both = [
        asyncio.create_task(complete(tenant, arguments, foreign(arguments), None))
        for arguments in ('{"a": 1, "b": 2}', '{"b":2,"a":1}')
    ]
    await engine.wait_for_prompts(2)
    engine.gate.set()
    await asyncio.gather(*both)
    export = tenant.export()
    tokens = export.columns["tokens"].tolist()
    contexts = [tokens[c.offset : c.offset + c.tokens] for c in export.contexts]
    for prompt, generation in zip(engine.prompts, engine.generations, strict=True):
        assert prompt + list(generation.token_ids) in contexts


async def test_whatever_an_agent_sends_is_not_tokenized_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine, max_context=1_000_000)
    encode = PolicyTokenizer.encode
    threads: set[int] = set()

    def recorded(self: PolicyTokenizer, text: str) -> list[int]:
        if len(text) > 1000:
            threads.add(threading.get_ident())
        return encode(self, text)

    monkeypatch.setattr(PolicyTokenizer, "encode", recorded)
    long = "x" * 20_000
    call = ToolCall("c", "f", f'{{"a": "{long}"}}')
    tool = Tool("f", "", {"description": long})
    for i, dialogue in enumerate(
        (
            asking(long),
            asking("q", tools=(tool,)),
            Dialogue((Message("user", "q"), Message("assistant", "", (call,)))),
        )
    ):
        await complete(tenant, str(i), dialogue, None)
    assert threads
    assert threading.get_ident() not in threads


async def test_a_long_history_is_not_walked_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine, max_context=1_000_000, max_turns=10)
    threads: dict[str, int] = {}

    def recorded(name: str, function: Any) -> Any:
        def call(*given: Any) -> Any:
            threads[name] = threading.get_ident()
            return function(*given)

        return call

    monkeypatch.setattr("pipeline.capture.session.steps", recorded("steps", steps))
    monkeypatch.setattr(ContextTree, "prompt", recorded("prompt", ContextTree.prompt))
    many = tuple(Message("user", "q") for _ in range(400))
    await complete(tenant, "1", Dialogue(many), None)
    assert threads["steps"] != threading.get_ident()
    await complete(tenant, "2", asking("x" * 200_000), None)
    await complete(tenant, "3", asking("x" * 200_000, "a", "y"), None)
    assert threads["prompt"] != threading.get_ident()


async def test_trouble_is_not_recorded_and_costs_no_turn() -> None:
    replies: list[str | Exception] = [EngineUnavailable("down"), "a"]
    engine = ScriptedEngine(lambda _: replies.pop(0))
    tenant = session(engine, max_turns=1)
    with pytest.raises(EngineUnavailable):
        await complete(tenant, "1", asking("q"), None)
    assert tenant.turns == 0
    assert tenant.owed
    assert (await complete(tenant, "1", asking("q"), None)).content == "a"
    assert not tenant.owed
    assert tenant.refused == ""
    with pytest.raises(TurnLimit, match="limit is 1"):
        await complete(tenant, "2", asking("q", "a", "r"), None)
    assert tenant.turns == 1
    assert tenant.refused == "max_turns", "by which a program's end gets its name"


async def test_requests_at_once_cannot_pass_the_turn_limit_together() -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine, max_turns=2)
    results = await asyncio.gather(
        *(complete(tenant, q, asking(q), None) for q in "abcd"), return_exceptions=True
    )
    assert sum(isinstance(result, Answer) for result in results) == 2
    assert sum(isinstance(result, TurnLimit) for result in results) == 2


async def test_the_context_bounds_what_is_sampled_and_overflow_is_told() -> None:
    engine = ScriptedEngine(lambda _: "abcdefghij")
    fixed = len(byte_level_renderer().render(Message("user", "q"))) + len(
        byte_level_renderer().generation_prompt()
    )
    tenant = session(engine, max_context=fixed + 3)
    answer = await complete(tenant, "1", asking("q"), None)
    assert (answer.length, answer.completion_tokens, engine.params[0].max_tokens) == (True, 3, 3)
    assert tenant.refused == ""
    with pytest.raises(ContextOverflow, match=str(fixed + 3)):
        await complete(tenant, "2", asking("q", answer.content, "r"), None)
    assert tenant.turns == 1
    assert tenant.refused == "context_length_exceeded"


async def test_the_behaviour_sets_the_sampling_and_the_agent_may_only_ask_for_less() -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine, temperature=0.7, top_p=0.9, max_tokens=20)
    await complete(tenant, "1", asking("q"), 5)
    await complete(tenant, "2", asking("r"), 500)
    assert [params.max_tokens for params in engine.params] == [5, 20]
    assert {(params.temperature, params.top_p) for params in engine.params} == {(0.7, 0.9)}


async def test_a_turn_cut_at_its_length_is_closed_without_loss() -> None:
    engine = ScriptedEngine(lambda _: "abcdef")
    tenant = session(engine, max_tokens=3)
    answer = await complete(tenant, "1", asking("q"), None)
    assert (answer.content, answer.length) == ("abc", True)
    await complete(tenant, "2", asking("q", "abc", "r"), None)
    export = tenant.export()
    tokens, mask = export.columns["tokens"], export.columns["loss_mask"]
    end = int(engine.renderer.stop_token_ids[0])
    assert mask.sum() == 6
    assert not mask[tokens == end].any(), "the template ended these turns, not the policy"


async def test_tool_calls_are_named_parsed_and_matched_when_the_agent_renames_them() -> None:
    replies = [CALL, "2"]
    engine = ScriptedEngine(lambda _: replies.pop(0))
    tenant = session(engine)
    asked = asking("q", tools=(TOOL,))
    answer = await complete(tenant, "1", asked, None)
    (call,) = answer.tool_calls
    assert (call.name, call.arguments) == ("calculator", '{"expression": "1 + 1"}')
    assert call.id.startswith("call_")
    renamed = type(call)(call.id, "Calc", '{"expression":"1+1"}')
    history = (
        *asked.messages,
        Message("assistant", "", (renamed,)),
        Message("tool", "2", tool_call_id=call.id),
    )
    await complete(tenant, "2", Dialogue(history, (TOOL,)), None)
    assert len(tenant.export().contexts) == 1
    assert "Calc" not in engine.renderer.tokenizer.decode(engine.prompts[1], keep_special=True)


async def test_malformed_calls_are_text_and_counted() -> None:
    engine = ScriptedEngine(lambda _: "<tool_call>{broken</tool_call>")
    tenant = session(engine)
    answer = await complete(tenant, "1", asking("q"), None)
    assert (answer.tool_calls, answer.malformed, answer.content) == ((), 1, "{broken")
    assert tenant.last is not None
    assert tenant.last.malformed == 1


async def test_an_answer_that_cannot_be_trained_is_the_engines_trouble() -> None:
    class Bad(ScriptedEngine):
        async def generate(self, token_ids, params, request_id, session_id, **_) -> Generation:
            return Generation((5, 6), (math.nan, -1.0), (0, 0), "stop")

    tenant = session(Bad(lambda _: ""))
    with pytest.raises(EngineUnavailable, match="cannot be trained"):
        await complete(tenant, "1", asking("q"), None)
    assert tenant.export().contexts == ()


async def test_closing_ends_what_is_under_way_and_keeps_what_was_recorded() -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine)
    await complete(tenant, "1", asking("q"), None)
    engine.gate.clear()
    late = asyncio.create_task(complete(tenant, "2", asking("r"), None))
    await engine.wait_for_prompts(2)
    await tenant.close()
    with pytest.raises(SessionClosed):
        await late
    with pytest.raises(SessionClosed):
        await complete(tenant, "3", asking("s"), None)
    assert tenant.turns == 1
    assert len(tenant.export().contexts) == 1


async def test_versions_are_per_token_and_long_text_is_tokenized_all_the_same() -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine, max_context=200_000)
    await complete(tenant, "1", asking("x" * 40_000), None)
    engine.version_number = 7
    await complete(tenant, "2", asking("x" * 40_000, "a", "y"), None)
    (context,) = tenant.export().contexts
    assert (context.min_version, context.max_version) == (0, 7)
    versions = tenant.export().columns["policy_version"]
    mask = tenant.export().columns["loss_mask"] == 1
    assert versions[mask].tolist() == [0, 0, 7, 7]
    assert versions.dtype == np.int32
