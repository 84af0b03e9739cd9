"""Rules in a session: which turns they flag, what becomes of the flags in payload and journal, and how they end a rollout."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.capture.dialogue import Dialogue, answer_key_of, steps
from pipeline.capture.export import FLAG_LOSS, RULE_BITS, Export, export
from pipeline.capture.journal import HostJournal
from pipeline.capture.messages import Message, Tool
from pipeline.capture.records import decode, encode_flags
from pipeline.capture.recovery import Recovery
from pipeline.capture.rules import Auxiliary, Rules
from pipeline.capture.secret import session_url
from pipeline.capture.server import Capture
from pipeline.capture.session import Session, TurnLimit
from pipeline.capture.tree import ContextTree, SampledTurn
from pipeline.harnesses.base import Trial
from pipeline.harnesses.environments.calculator import Calculator
from pipeline.harnesses.tool import ToolHarness
from pipeline.signal.rules import Results, Turn, judge_of
from schemas.config import Behaviour
from schemas.payload import Flag
from schemas.signal import Penalty
from tests.capture_parts import Script, ScriptedEngine, complete, served

HERE = "tests.unit.test_capture_judging"
KEY = b"k" * 32
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>'
TOOL = Tool("calculator", "Evaluates.", {"type": "object"})
SEEN: list[Turn | Results] = []
THREADS: set[int] = set()


class Says:
    """Flags a turn in which a word is; it keeps what it saw, and raises at the word `bug`."""

    judges = "turn"

    def __init__(self, options: dict[str, Any]) -> None:
        self.word = options["word"]

    def __call__(self, seen: Turn) -> bool:
        SEEN.append(seen)
        THREADS.add(threading.get_ident())
        if "bug" in seen.text:
            raise ValueError("no such turn")
        return self.word in seen.text


class Hears:
    """Flags a turn that a word follows."""

    judges = "results"

    def __init__(self, options: dict[str, Any]) -> None:
        self.word = options["word"]

    def __call__(self, seen: Results) -> bool:
        SEEN.append(seen)
        return any(self.word in text for text in seen.texts)


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()
    THREADS.clear()


def says(word: str, **given: Any) -> Penalty:
    return Penalty(rule=f"{HERE}:Says", options={"word": word}, **given)


def hears(word: str, **given: Any) -> Penalty:
    return Penalty(rule=f"{HERE}:Hears", options={"word": word}, **given)


def session(
    script: Script,
    *penalties: Penalty,
    journal: HostJournal | None = None,
    rules: Rules | None = None,
    **given: Any,
) -> Session:
    engine = ScriptedEngine(script)
    behaviour = Behaviour.model_validate({"max_tokens": 4096, "max_turns": 20, **given})
    return Session(
        "s1", behaviour, 50_000, engine.renderer, engine, b"", rules or Rules(), None, journal, judge_of(penalties)
    )  # fmt: skip


def user(*texts: str) -> Dialogue:
    """A dialogue: what the user said and what was answered, in turn."""
    roles = ("user", "assistant")
    return Dialogue(tuple(Message(roles[i % 2], text) for i, text in enumerate(texts)))  # pyright: ignore[reportArgumentType]


def rules_of(found: Export) -> list[list[tuple[str, int]]]:
    """Of each context, its own turns as text with the bits of their segments; the metadata must say the same."""
    renderer = ScriptedEngine(str).renderer
    told: list[list[tuple[str, int]]] = [[] for _ in found.contexts]
    tokens: Any = found.columns["tokens"]
    spans: list[dict[int, int]] = [{} for _ in found.contexts]
    for start, end, _, flags, number in found.columns["segments"].tolist():
        bits = flags >> RULE_BITS
        assert not bits or flags & FLAG_LOSS, "only what the context trains is flagged"
        if flags & FLAG_LOSS:
            told[number].append(
                (renderer.tokenizer.decode(tokens[start:end].tolist(), keep_special=False), bits)
            )
        offset = found.contexts[number].offset
        spans[number] |= {row - offset: bits for row in range(start, end) if bits}
    for context, rows in zip(found.contexts, spans, strict=True):
        said = {row: flag.rules for flag in context.flags for row in range(flag.start, flag.end)}
        assert said == rows
    return told


def echo(prompt: str) -> str:
    """Answers with what the user said last, in upper case."""
    return prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0].upper()


async def test_each_turn_is_judged_and_its_rows_say_by_which_rules() -> None:
    tenant = session(echo, says("A"), hears("y"), says("AB"))
    for dialogue in (user("ab"), user("ab", "AB", "y"), user("ab", "AB", "y", "Y", "a")):
        await complete(tenant, repr(dialogue), dialogue)
    found = tenant.export()
    assert rules_of(found) == [[("AB", 0b111), ("Y", 0), ("A", 0b001)]]
    (context,) = found.contexts
    assert [flag.rules for flag in context.flags] == [0b111, 0b001]
    assert [(f.start, f.end) for f in context.flags] == [
        (span.start, span.end) for span in context.loss_spans[::2]
    ]
    assert [seen.texts for seen in SEEN if isinstance(seen, Results)] == [("y",), ("a",)]


async def test_a_session_without_rules_says_nothing_of_them() -> None:
    tenant = session(echo)
    await complete(tenant, "1", user("a"))
    (context,) = tenant.export().contexts
    assert "flags" not in context.model_dump()
    assert rules_of(tenant.export()) == [[("A", 0)]]


async def test_what_a_rule_sees_is_the_turn_as_it_was_sampled_and_shown() -> None:
    tenant = session(lambda _: f"text {CALL}<tool_call>{{broken</tool_call>", says("x"))
    await complete(tenant, "1", Dialogue((Message("user", "q"),), (TOOL,)))
    (seen,) = SEEN
    assert isinstance(seen, Turn)
    assert [(call.name, call.arguments) for call in seen.calls] == [("calculator", '{"expression": "1 + 1"}')]
    assert (seen.malformed, seen.offered, seen.finish) == (1, frozenset({"calculator"}), "tool_calls")
    export_ = tenant.export()
    assert seen.tokens.tolist() == export_.columns["tokens"][export_.columns["loss_mask"] == 1].tolist()


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("segment", [[("BAD", 1), ("C", 0)], [("D", 0)], [("E", 0)]]),
        ("context", [[("BAD", 1), ("C", 1)], [("D", 1)], [("E", 0)]]),
        ("sequence", [[("BAD", 1), ("C", 1)], [("D", 1)], [("E", 1)]]),
    ],
)
async def test_a_penalty_flags_the_turn_or_its_context_or_the_whole_sequence(
    scope: Any, expected: list[list[tuple[str, int]]]
) -> None:
    """The second context goes on from the flagged turn, which the first trains."""
    tenant = session(echo, says("BAD", scope=scope))
    for dialogue in (user("bad"), user("bad", "BAD", "c"), user("bad", "BAD", "d"), user("e")):
        await complete(tenant, repr(dialogue), dialogue)
    assert rules_of(tenant.export()) == expected


def test_flagged_turns_that_touch_are_one_span_where_the_same_rules_flag_them() -> None:
    """With a template that puts nothing between turns, and an agent that asks to go on."""
    tree, empty = ContextTree(), np.empty(0, np.int32)
    messages = [Message("user", "q")]
    for number, bits in enumerate((1, 1, 0, 2, 3, 3)):
        asked = steps(Dialogue(tuple(messages)))
        match = tree.match(asked)
        ids = np.arange(2, dtype=np.int32)
        turn = SampledTurn(empty, ids, np.zeros(2, np.float32), ids * 0, empty)
        text = f"turn {number}"
        node = tree.add(match, asked, [[7]] * (len(asked) - match.steps), turn, answer_key_of(text, ()))
        tree.flag(node.number, bits)
        messages.append(Message("assistant", text))
    (context,) = export(tree).contexts
    assert [(flag.start, flag.end, flag.rules) for flag in context.flags] == [
        (2, 6, 1), (8, 10, 2), (10, 14, 3),
    ]  # fmt: skip


async def test_what_is_left_out_of_training_is_not_judged_and_flags_nothing() -> None:
    titles = Rules(agent_header="x-agent", auxiliary=(Auxiliary("title", first="title"),))
    tenant = session(echo, says("BAD", scope="sequence", stop=True), hears("z", stop=True), rules=titles)
    await complete(tenant, "1", user("bad title"))
    await complete(tenant, "2", user("bad title", "BAD TITLE", "z"))
    await complete(tenant, "3", user("good"))
    assert rules_of(tenant.export()) == [[("GOOD", 0)]]
    assert tenant.stopped == ""


async def test_results_are_those_of_the_last_sampled_turn_up_to_a_turn_that_is_not_ours() -> None:
    tenant = session(lambda prompt: CALL if prompt.count("assistant") == 1 else "end", hears("err"))
    first = await complete(tenant, "1", Dialogue((Message("user", "err"),), (TOOL,)))
    assert SEEN == [], "nothing was sampled before it"
    asked = (
        Message("user", "err"),
        Message("assistant", first.content, first.tool_calls),
        Message("tool", "one", tool_call_id=first.tool_calls[0].id),
        Message("tool", "two", tool_call_id="call_b"),
        Message("user", "three"),
    )
    foreign = (Message("assistant", "not ours"), Message("user", "err"))
    await complete(tenant, "2", Dialogue((*asked, *foreign), (TOOL,)))
    assert [Results(("one", "two", "three"))] == SEEN
    await complete(tenant, "3", Dialogue((*asked, *foreign), (TOOL,)), seed=2)
    assert len(SEEN) == 1, "they are known"
    await complete(tenant, "4", Dialogue((*asked[:-1], Message("user", "err 4")), (TOOL,)))
    assert SEEN[1:] == [Results(("one", "two", "err 4"))]
    assert [bits for context in rules_of(tenant.export()) for _, bits in context] == [1, 0, 0, 0]


@pytest.mark.parametrize(("texts", "loop"), [(("q", 10), False), (("q", 2000), True)])
async def test_a_long_turn_and_a_rule_of_ones_own_are_judged_on_a_thread(
    texts: tuple[str, int], loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "".join(chr(97 + i % 26 + i % 7 % 3) for i in range(texts[1]))
    tenant = session(lambda _: words, says("never"))
    await complete(tenant, "1", user("q"))
    assert threading.get_ident() not in THREADS
    asked: list[Any] = []
    to_thread = asyncio.to_thread

    async def counted(function: Any, *given: Any) -> Any:
        asked.append(function)
        return await to_thread(function, *given)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    shipped = session(lambda _: words, Penalty(rule="repetition"), Penalty(rule="garbled"))
    await complete(shipped, "1", user("q"))
    assert any(getattr(each, "__name__", "") == "flags" for each in asked) == loop


async def test_once_a_rule_has_ended_a_rollout_its_turn_is_answered_and_no_other_is_sampled() -> None:
    tenant = session(echo, says("HALT"), says("STOP", stop=True))
    await complete(tenant, "1", user("halt"))
    assert tenant.stopped == ""
    assert (await complete(tenant, "2", user("stop"))).content == "STOP"
    assert tenant.stopped == f"{HERE}:Says"
    with pytest.raises(TurnLimit, match="has ended this rollout") as refused:
        await complete(tenant, "3", user("more"))
    assert refused.value.code == tenant.refused == "early_stop"
    assert (await complete(tenant, "2", user("stop"))).content == "STOP", "its client may have missed it"
    assert tenant.turns == 2
    assert not tenant.owed
    assert rules_of(tenant.export()) == [[("HALT", 1)], [("STOP", 2)]]


async def test_a_request_that_waits_for_its_tokens_is_not_sampled_once_a_rule_has_ended_the_rollout() -> None:
    tenant = session(echo, says("STOP", stop=True), max_tokens=64, max_session_tokens=64)
    first, second = await asyncio.gather(
        complete(tenant, "1", user("stop")), complete(tenant, "2", user("more")), return_exceptions=True
    )
    assert not isinstance(first, BaseException)
    assert isinstance(second, TurnLimit)
    assert (second.code, tenant.turns) == ("early_stop", 1)


async def test_what_follows_a_turn_ends_the_rollout_before_the_next_is_sampled() -> None:
    tenant = session(echo, hears("disk", stop=True))
    await complete(tenant, "1", user("a"))
    with pytest.raises(TurnLimit) as refused:
        await complete(tenant, "2", user("a", "A", "disk full"))
    assert refused.value.code == "early_stop"
    assert tenant.turns == 1
    assert rules_of(tenant.export()) == [[("A", 1)]]


async def test_a_rule_that_fails_ends_the_session_and_says_why(tmp_path: Path) -> None:
    journal = HostJournal(tmp_path, "h1")
    tenant = session(lambda prompt: "bug" if "two" in prompt else "A", says("A"), journal=journal)
    await complete(tenant, "1", user("a"))
    await complete(tenant, "2", user("a", "A", "two"))
    assert "ValueError: no such turn" in tenant.broken
    with pytest.raises(TurnLimit) as refused:
        await complete(tenant, "3", user("c"))
    assert refused.value.code == "rule_failed"
    os.close(journal._lock)
    assert Recovery(tmp_path).session("h1", "s1") is None, "nobody knows its flags"


@given(st.integers(1, 2**31), st.integers(1, 2**16 - 1))
def test_a_record_of_flags_alone_is_decoded_as_it_was_encoded(number: int, flags: int) -> None:
    (found,) = decode(encode_flags("s", number, flags))
    assert (found.session, found.nodes, found.flagged, found.flags) == ("s", (), number, flags)
    assert not found.main


async def test_a_killed_hosts_journal_gives_the_same_flags(tmp_path: Path) -> None:
    penalties = (says("A"), hears("y", scope="context"), says("END", stop=True))
    journal = HostJournal(tmp_path, "h1")
    tenant = session(echo, *penalties, journal=journal)
    for dialogue in (user("ab"), user("ab", "AB", "y"), user("c"), user("ab", "AB", "y", "Y", "end")):
        await complete(tenant, repr(dialogue), dialogue)
    os.close(journal._lock)
    found = Recovery(tmp_path).session("h1", "s1")
    assert found is not None
    assert (found.turns, found.whole, found.finish) == (4, True, "stop")
    rules = judge_of(penalties)
    before, after = tenant.export(), export(found.tree, (), rules)
    assert after.contexts == before.contexts
    assert rules_of(after) == rules_of(before) == [[("AB", 3), ("Y", 2), ("END", 6)], [("C", 0)]]
    assert any(flags & rules.stops for flags in found.tree.flags.values())


async def test_what_follows_the_last_turn_is_in_the_journal_before_its_request_is_refused(
    tmp_path: Path,
) -> None:
    journal = HostJournal(tmp_path, "h1")
    tenant = session(echo, hears("disk", stop=True), journal=journal)
    await complete(tenant, "1", user("a"))
    with pytest.raises(TurnLimit):
        await complete(tenant, "2", user("a", "A", "disk full"))
    os.close(journal._lock)
    found = Recovery(tmp_path).session("h1", "s1")
    assert found is not None
    assert (found.turns, found.tree.flags) == (1, {3: 1})


def penalised(*penalties: Penalty) -> tuple[Capture, ScriptedEngine, Session]:
    engine = ScriptedEngine(lambda _: CALL)
    capture = Capture(KEY, engine.renderer, engine, 20_000)
    behaviour = Behaviour(max_turns=6, max_tokens=200)
    return capture, engine, capture.open("s1", behaviour, judge=judge_of(penalties))


@pytest.mark.parametrize(
    ("penalties", "turns"),
    [
        ([Penalty(rule="unknown_tool", stop=True)], 6),
        ([Penalty(rule="repetition", stop=True, options={"n": 1, "times": 2, "tokens": 2})], 1),
        ([hears("2", stop=True)], 1),
    ],
    ids=["never", "by a turn", "by its results"],
)
async def test_the_built_in_agent_ends_when_a_rule_has_ended_its_rollout(
    penalties: Sequence[Penalty], turns: int
) -> None:
    capture, engine, tenant = penalised(*penalties)
    if penalties[0].rule == "repetition":
        engine.script = lambda _: f"aa {CALL}"
    environment = Calculator(0, {})
    async with served(capture) as base_url:
        url = session_url(base_url, KEY, "s1")
        trial = Trial(url, tenant.behaviour, environment, environment.task(0), 20.0)
        verdict = await ToolHarness().run(trial)
    assert verdict.termination == ("max_turns" if turns == 6 else "early_stop")
    assert len(engine.prompts) == tenant.turns == turns
    assert bool(tenant.stopped) == (turns == 1)
    (context,) = tenant.export().contexts
    (span, *_) = context.loss_spans
    assert context.flags == (() if turns == 6 else (Flag(start=span.start, end=span.end, rules=1),))


async def test_a_client_of_any_protocol_is_refused_for_good() -> None:
    capture, _, _ = penalised(Penalty(rule="unknown_tool", stop=True))
    async with served(capture) as base_url:
        client = openai.AsyncOpenAI(
            base_url=session_url(base_url, KEY, "s1"), api_key="x", max_retries=2, timeout=20
        )
        async with client:
            first = await client.responses.create(model="m", input="q")
            assert [item.type for item in first.output][-1] == "function_call"
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "r"}])
    assert refused.value.code == "early_stop"
