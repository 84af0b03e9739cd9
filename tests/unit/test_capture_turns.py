"""A session's turns as they come: pieces, stop texts, forced and forbidden calls, budgets, kinds of requests, images."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.capture.call import Answer, BadRequest, Call, Piece, Text, ToolChoice
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.journal import HostJournal
from pipeline.capture.messages import Image, Message, Tool, ToolCall
from pipeline.capture.rules import Auxiliary, Rules, classify
from pipeline.capture.session import Session, SessionClosed, TurnLimit
from pipeline.engines.base import EngineUnavailable
from schemas.config import Behaviour
from tests.capture_parts import ScriptedEngine, complete

TOOL = Tool("calculator", "Evaluates.", {"type": "object"})
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>'
Q = Dialogue((Message("user", "q"),), (TOOL,))


def session(engine: ScriptedEngine, rules: Rules | None = None, **behaviour: object) -> Session:
    return Session(
        "s",
        Behaviour.model_validate({"max_tokens": 500, **behaviour}),
        1000,
        engine.renderer,
        engine,
        rules=rules or Rules(),
    )


def streaming(digest: str = "1", **given: object) -> Call:
    return Call(digest, Q, "policy", stream=True, **given)  # pyright: ignore[reportArgumentType]  # fields of Call


async def read(tenant: Session, call: Call) -> tuple[list[Piece], Answer]:
    turn = tenant.answer(call, {})
    pieces = [piece async for piece in turn.pieces()]
    return pieces, await turn.whole()


def shown(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


async def test_pieces_come_while_the_turn_is_sampled() -> None:
    class Stepped(ScriptedEngine):
        steps = asyncio.Semaphore(0)

        async def step(self) -> None:
            await self.steps.acquire()

    engine = Stepped(lambda _: "one two three")
    tenant = session(engine)
    turn = tenant.answer(streaming(), {})
    pieces = turn.pieces()
    engine.steps.release()
    assert isinstance(first := await anext(pieces), Text)
    assert tenant.last is None, "the turn is not whole yet"
    assert await turn.started() == len(engine.prompts[0])
    for _ in range(50):
        engine.steps.release()
    rest = [piece async for piece in pieces]
    assert len(rest) > 1
    assert shown([first, *rest]) == (await turn.whole()).content == "one two three"


@pytest.mark.parametrize("portion", [1, 3, 1000])
async def test_a_stream_says_what_the_whole_answer_says(portion: int) -> None:
    engine = ScriptedEngine(lambda _: f"so {CALL} and {CALL}")
    engine.portion = portion
    pieces, answer = await read(session(engine), streaming())
    assert shown(pieces) == answer.content
    assert [piece for piece in pieces if isinstance(piece, ToolCall)] == list(answer.tool_calls)
    assert len({call.id for call in answer.tool_calls}) == 2
    whole = await complete(session(ScriptedEngine(engine.script)), "1", Q)
    assert (whole.content, whole.finish, whole.completion_tokens) == (
        answer.content,
        "tool_calls",
        answer.completion_tokens,
    )


async def test_whoever_comes_late_gets_the_turn_from_its_first_piece_on() -> None:
    engine = ScriptedEngine(lambda _: "one two")
    tenant = session(engine)
    first, answer = await read(tenant, streaming())
    again, same = await read(tenant, streaming())
    assert shown(again) == shown(first)
    assert same is answer
    assert len(engine.prompts) == 1
    whole = tenant.answer(Call("1", Q, "policy"), {})
    assert await whole.whole() is answer, "the form in which it is sent makes no other request"


async def test_a_stream_that_its_client_leaves_is_sampled_to_its_end() -> None:
    engine = ScriptedEngine(lambda _: "one two three")
    tenant = session(engine)
    turn = tenant.answer(streaming(), {})
    pieces = turn.pieces()
    await anext(pieces)
    await pieces.aclose()  # pyright: ignore[reportAttributeAccessIssue]  # a generator
    assert tenant.owed
    assert (await turn.whole()).content == "one two three"
    assert tenant.owed, "its client has not come back"
    await read(tenant, streaming())
    assert not tenant.owed


async def test_a_stop_text_ends_the_turn_and_is_not_shown() -> None:
    engine = ScriptedEngine(lambda _: "one STOP two")
    tenant = session(engine)
    answer = await complete(tenant, "1", Q, stop=("STOP",))
    assert (answer.content, answer.finish, answer.stop_sequence) == ("one", "stop_sequence", "STOP")
    export = tenant.export()
    trained = export.columns["tokens"][export.columns["loss_mask"] == 1].tolist()
    assert engine.renderer.tokenizer.decode(trained, keep_special=True) == "one STOP"
    history = (*Q.messages, Message("assistant", "one"), Message("user", "r"))
    await complete(tenant, "2", Dialogue(history, Q.tools))
    assert engine.prompts[1][len(engine.prompts[0]) :][: len(trained)] == trained
    assert "STOP<|im_end|>" in engine.renderer.tokenizer.decode(engine.prompts[1], keep_special=True)


async def test_one_call_a_turn_when_the_agent_wants_no_more() -> None:
    engine = ScriptedEngine(lambda _: CALL + CALL)
    answer = await complete(session(engine), "1", Q, parallel=False)
    assert len(answer.tool_calls) == 1
    assert answer.finish == "tool_calls"


async def test_a_forced_call_is_opened_for_the_policy_and_not_trained() -> None:
    rest = '{"expression": "1"}}</tool_call>'
    engine = ScriptedEngine(lambda _: rest)
    tokenizer = engine.renderer.tokenizer
    close = tokenizer.special("</tool_call>")
    assert close is not None
    sampled = [*tokenizer.encode('{"expression": "1"}}'), close, engine.renderer.stop_token_ids[0]]
    engine.script = lambda _: sampled
    tenant = session(engine)
    answer = await complete(tenant, "1", Q, tool_choice=ToolChoice("required", "calculator"))
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("calculator", {"expression": "1"})
    assert tokenizer.decode(engine.prompts[0], keep_special=True).endswith(
        '<tool_call>{"name": "calculator", "arguments":'
    )
    columns = tenant.export().columns
    assert columns["tokens"][columns["loss_mask"] == 1].tolist() == sampled


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_the_agent_wants_none_of_is_shown_as_text(stream: bool) -> None:
    engine = ScriptedEngine(lambda _: f"so {CALL}")
    call = Call("1", Q, "policy", stream=stream, tool_choice=ToolChoice("none"))
    pieces, answer = await read(session(engine), call)
    assert answer.tool_calls == ()
    assert answer.finish == "stop"
    assert '"expression": "1 + 1"' in answer.content
    assert shown(pieces).strip() == answer.content


async def test_the_budgets_of_tokens_and_time() -> None:
    engine = ScriptedEngine(lambda _: "abcdef")
    tenant = session(engine, max_session_tokens=9)
    await complete(tenant, "1", Q)
    assert (await complete(tenant, "2", Dialogue((Message("user", "r"),)))).finish == "length"
    with pytest.raises(TurnLimit, match="9 tokens were sampled") as spent:
        await complete(tenant, "3", Dialogue((Message("user", "s"),)))
    assert spent.value.code == "max_sampled_tokens"
    now = asyncio.get_running_loop().time()
    late = Session("s", Behaviour(), 1000, engine.renderer, engine, deadline=now - 1)
    with pytest.raises(TurnLimit) as over:
        await complete(late, "1", Q)
    assert over.value.code == "max_wall_time"


async def test_calls_at_once_cannot_pass_the_budget_of_tokens_together() -> None:
    engine = ScriptedEngine(lambda _: "abcdef")
    tenant = session(engine, max_session_tokens=17, max_tokens=10)
    engine.gate.clear()
    calls = [
        asyncio.create_task(complete(tenant, q, Dialogue((Message("user", q),))))
        for q in ("a", "b", "c", "d")
    ]
    await engine.wait_for_prompts(1)
    engine.gate.set()
    async with asyncio.timeout(10):
        found = await asyncio.gather(*calls, return_exceptions=True)
    answers = [answer for answer in found if isinstance(answer, Answer)]
    # None is cut for what another might have sampled and did not.
    assert [(answer.completion_tokens, answer.finish) for answer in answers] == [
        (7, "stop"),
        (7, "stop"),
        (3, "length"),
    ]
    assert [type(error) for error in found if not isinstance(error, Answer)] == [TurnLimit]


async def test_a_call_that_waits_for_the_budget_goes_on_when_the_one_before_it_fails() -> None:
    replies: list[str | Exception] = [EngineUnavailable("down"), "abc"]
    engine = ScriptedEngine(lambda _: replies.pop(0))
    tenant = session(engine, max_session_tokens=9, max_tokens=9)
    engine.gate.clear()
    first, second = (
        asyncio.create_task(complete(tenant, q, Dialogue((Message("user", q),)))) for q in ("a", "b")
    )
    await engine.wait_for_prompts(1)
    engine.gate.set()
    async with asyncio.timeout(10):
        with pytest.raises(EngineUnavailable):
            await first
        assert (await second).content == "abc"


RULES = Rules(
    agent_header="x-agent",
    main_agent="root",
    auxiliary=(Auxiliary("title", last="^Title of"), Auxiliary("probe", max_tokens=1)),
)


async def test_kinds_of_requests_are_told_apart_by_declared_rules() -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine, RULES)

    async def ask(text: str, headers: dict[str, str], max_tokens: int | None = None) -> Answer:
        call = Call(text, Dialogue((Message("user", text),)), "policy", max_tokens=max_tokens)
        return await tenant.answer(call, headers).whole()

    await ask("Title of it", {})
    assert tenant.last is None, "an auxiliary turn is not the agent's last"
    await ask("quota", {}, 1)
    await ask("work", {"x-agent": "root"})
    await ask("part", {"x-agent": "helper-7"})
    found = tenant.export()
    assert [context.label for context in found.contexts] == ["main", "subagent"]
    assert found.excluded == {"title": 2, "probe": 1}
    kept = Session("s", Behaviour(exclude=()), 1000, engine.renderer, engine, rules=RULES)
    await kept.answer(Call("t", Dialogue((Message("user", "Title of it"),)), "policy"), {}).whole()
    assert [context.label for context in kept.export().contexts] == ["title"]


async def test_two_agents_that_ask_the_same_are_answered_each() -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine, RULES)
    turns = [tenant.answer(Call("1", Q, "policy"), {"x-agent": name}) for name in ("one", "two", "two")]
    await asyncio.gather(*(turn.whole() for turn in turns))
    assert len(engine.prompts) == 2


@pytest.mark.parametrize("name", ["one\udcff", "x" * 100_000, "a\nb"])
async def test_an_agents_name_may_be_anything(tmp_path: Path, name: str) -> None:
    engine = ScriptedEngine(lambda _: "a")
    journal = HostJournal(tmp_path, "h1")
    tenant = Session("s", Behaviour(), 1000, engine.renderer, engine, rules=RULES, journal=journal)
    assert (await tenant.answer(Call("1", Q, "policy"), {"x-agent": name}).whole()).content == "a"
    assert [context.label for context in tenant.export().contexts] == ["subagent"]
    assert tenant.turns == 1


@pytest.mark.parametrize(
    "given",
    [
        {"label": "my title!"},
        {"label": ""},
        {"label": "title", "last": "("},
        {"label": "title", "header": ("x-kind", "[")},
        {"label": "title", "header": ("X-Kind", "a")},
    ],
)
def test_rules_that_cannot_be_kept_are_refused_where_they_are_made(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"label|pattern|header"):
        Auxiliary(**given)
    with pytest.raises(ValueError, match="lower case"):
        Rules(agent_header="X-Agent")


def test_what_rules_look_for_takes_no_time_in_a_long_text() -> None:
    rules = Rules(auxiliary=(Auxiliary("title", last=r"begin .* end\Z"),))
    call = Call("1", Dialogue((Message("user", "begin " * 200_000),)), "policy")
    started = time.perf_counter()
    assert classify(rules, call, {}).label is None
    assert time.perf_counter() - started < 2
    call = Call("1", Dialogue((Message("user", "x" * 1_000_000 + "begin it, and go on"),)), "policy")
    assert classify(rules, call, {}).label is None
    call = Call("1", Dialogue((Message("user", "x" * 1_000_000 + "begin it, at the end"),)), "policy")
    assert classify(rules, call, {}).label == "title"


async def test_an_image_is_refused_where_the_policy_takes_none() -> None:
    engine = ScriptedEngine(lambda _: "a")
    picture = Message("user", ("look", Image("0" * 64, "image/png", b"x")))
    with pytest.raises(BadRequest, match="takes none") as refused:
        await complete(session(engine), "1", Dialogue((picture,)))
    assert refused.value.code == "unsupported_image"


async def test_text_that_has_no_tokens_is_refused() -> None:
    engine = ScriptedEngine(lambda _: "a")
    with pytest.raises(BadRequest, match="surrogate"):
        await complete(session(engine), "1", Dialogue((Message("user", "\ud800"),)))


async def test_the_count_is_that_of_the_prompt() -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine)
    await complete(tenant, "1", Q)
    longer = Dialogue((*Q.messages, Message("assistant", "a"), Message("user", "r" * 50)), Q.tools)
    counted = await tenant.count(longer)
    answer = await complete(tenant, "2", longer)
    assert counted == answer.prompt_tokens == len(engine.prompts[1])
    assert answer.cached_tokens == len(engine.prompts[0]) + 3, "with the sampled turn and its tail"


async def test_a_closed_session_ends_its_streams() -> None:
    engine = ScriptedEngine(lambda _: "a")
    engine.gate.clear()
    tenant = session(engine)
    turn = tenant.answer(streaming(), {})
    reading = asyncio.create_task(anext(turn.pieces()))  # pyright: ignore[reportArgumentType]  # a coroutine
    await engine.wait_for_prompts(1)
    await tenant.close()
    with pytest.raises(SessionClosed):
        await reading
    with pytest.raises(SessionClosed):
        tenant.answer(streaming("2"), {})


async def test_a_long_turn_is_parsed_off_the_loop_and_whole() -> None:
    engine = ScriptedEngine(lambda _: "word " * 700)
    tenant = Session("s", Behaviour(max_tokens=5000), 10_000, engine.renderer, engine)
    turn = tenant.answer(Call("1", Q, "policy"), {})
    pieces = [piece async for piece in turn.pieces()]
    assert shown(pieces) == (await turn.whole()).content == ("word " * 700).strip()


async def test_sampled_columns_are_narrow() -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine)
    await complete(tenant, "1", Q)
    assert tenant.export().columns["tokens"].dtype == np.int32


async def test_an_agent_that_asks_the_same_for_ever_has_an_end() -> None:
    engine = ScriptedEngine(lambda _: "a")
    tenant = session(engine, max_turns=1)
    for _ in range(120):
        await complete(tenant, "1", Q)
    with pytest.raises(TurnLimit, match="120 requests came, the limit with 1 turns is 120") as over:
        await complete(tenant, "1", Q)
    assert over.value.code == "max_requests"
    assert len(engine.prompts) == 1


async def test_a_recorded_answer_is_not_given_after_the_sessions_time() -> None:
    engine = ScriptedEngine(lambda _: "a")
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 0.5
    tenant = Session("s", Behaviour(), 1000, engine.renderer, engine, deadline=deadline)
    await complete(tenant, "1", Q)
    while loop.time() < deadline:
        await asyncio.sleep(0.01)
    with pytest.raises(TurnLimit) as over:
        await complete(tenant, "1", Q)
    assert over.value.code == "max_wall_time"


async def test_a_seed_that_an_agent_sends_is_the_sessions_own() -> None:
    engine = ScriptedEngine(lambda _: "a")
    for name, digest in (("s1", "1"), ("s1", "2"), ("s2", "1")):
        tenant = Session(name, Behaviour(), 1000, engine.renderer, engine)
        await complete(tenant, digest, Q, seed=7)
    first, same, sibling = (params.seed for params in engine.params)
    assert first == same != sibling
