"""The context tree under random agents: never train a token that was not sampled, never twice, never lose one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.capture.dialogue import Dialogue, Key, Step, answer_key, answer_key_of, steps
from pipeline.capture.export import FLAG_LOSS, FLAG_SAMPLED, Export, export
from pipeline.capture.messages import Message, Tool, ToolCall
from pipeline.capture.rules import Kind
from pipeline.capture.tree import ContextTree, Match, SampledTurn
from pipeline.engines.base import Routing
from schemas.payload import COLUMNS, ROLES

FIRST_SAMPLED = 100_000
LEAD, TAIL = [1, 2], [3]


def rendered(step: Step) -> list[int]:
    """A rendering that tells turns apart to the letter, below FIRST_SAMPLED."""
    return [10 + ord(c) % 90_000 for c in repr(step.messages or step.prompt_key)]


class Call:
    """A model call in two halves, so that two can be under way at once."""

    def __init__(
        self, tree: ContextTree, dialogue: Dialogue, label: str | None = None, agent: str = ""
    ) -> None:
        self.tree = tree
        self.kind = Kind(agent, label)
        self.steps = steps(dialogue)
        self.match: Match = tree.match(self.steps)
        self.rendered = [rendered(step) for step in self.steps[self.match.steps :]]
        self.prompt: list[int] = tree.prompt(self.match, self.rendered, LEAD).tolist()

    def answer(
        self, ids: list[int], content: str, calls: tuple[ToolCall, ...] = (), version: int = 0, **given: Any
    ) -> Message:
        array = np.asarray(ids, np.int32)
        logprobs = -(array % 97).astype(np.float32)
        turn = SampledTurn(
            np.asarray(LEAD, np.int32),
            array,
            logprobs,
            np.full(len(ids), version, np.int32),
            np.asarray(TAIL, np.int32),
            **given,
        )
        self.tree.add(self.match, self.steps, self.rendered, turn, answer_key_of(content, calls), self.kind)
        return Message("assistant", content, calls)


def user(text: str) -> Message:
    return Message("user", text)


Sampled = tuple[list[int], list[int], int, Kind]
"""(prompt, ids, version, kind)"""


def check(found: Export, sampled: list[Sampled], exclude: tuple[str, ...] = ()) -> None:
    """The promises, of a session that sampled these turns."""
    tokens: Any = found.columns["tokens"]
    mask = found.columns["loss_mask"]
    logprobs, versions = found.columns["logprobs"], found.columns["policy_version"]
    assert {name: str(column.dtype) for name, column in found.columns.items()} == COLUMNS
    assert len({len(column) for name, column in found.columns.items() if name != "segments"}) == 1

    def label(kind: Kind) -> str | None:
        return kind.label or ("subagent" if kind.agent else None)

    kept = [turn for turn in sampled if label(turn[3]) not in exclude]
    trained = sorted(tokens[mask == 1].tolist())
    assert trained == sorted(token for _, ids, _, _ in kept for token in ids)
    left_out: Counter[str] = Counter()
    for _, ids, _, kind in sampled:
        if label(kind) in exclude:
            left_out[label(kind) or ""] += len(ids)
    assert found.excluded == left_out
    was_sampled = tokens >= FIRST_SAMPLED
    assert (logprobs == np.where(was_sampled, -(tokens % 97), 0)).all()
    assert not versions[~was_sampled].any()

    contexts = [tokens[c.offset : c.offset + c.tokens].tolist() for c in found.contexts]
    for prompt, ids, version, _ in kept:
        turn = prompt + ids
        assert any(context[: len(turn)] == turn for context in contexts)
        assert (versions[np.isin(tokens, ids)] == version).all()

    at = 0
    for context in found.contexts:
        assert context.offset == at
        at += context.tokens
        spans = np.zeros(context.tokens, np.uint8)
        for span in context.loss_spans:
            assert not spans[span.start : span.end].any()
            spans[span.start : span.end] = 1
        own = slice(context.offset, at)
        assert (spans == mask[own]).all()
        assert context.generated == mask[own].sum() > 0
        assert context.min_version == versions[own][mask[own] == 1].min()
        assert context.max_version == versions[own][mask[own] == 1].max()
        assert tokens[at - 1] >= FIRST_SAMPLED, "nothing follows the last sampled turn"
        assert context.label not in exclude
    assert at == len(tokens)
    labels = [context.label for context in found.contexts]
    assert labels.count("main") == any(kind == Kind() for *_, kind in sampled)
    assert "main" not in labels[1:]

    segments = found.columns["segments"]
    assert segments[:, 0].tolist() == [0, *segments[:-1, 1].tolist()] if len(segments) else at == 0
    for start, end, role, flags, number in segments.tolist():
        loss = bool(flags & FLAG_LOSS)
        assert loss == bool(mask[start]) == bool(mask[start:end].all()) == bool(mask[start:end].any())
        assert bool(flags & FLAG_SAMPLED) == bool(was_sampled[start])
        assert 0 <= role < len(ROLES)
        context = found.contexts[number]
        assert context.offset <= start < end <= context.offset + context.tokens


class RandomAgent:
    """Keeps several histories, rewrites and forks them, and knows by a plain dictionary what it should be prompted with."""

    def __init__(self) -> None:
        self.tree = ContextTree()
        self.histories: list[list[Message]] = [[user("start")]]
        self.known: dict[tuple[Key, ...], list[int]] = {}
        self.sampled: list[Sampled] = []
        self.next = FIRST_SAMPLED

    def expected(self, dialogue: Dialogue) -> tuple[list[int], tuple[Key, ...]]:
        prefix: tuple[Key, ...] = ()
        ids: list[int] = []
        for step in steps(dialogue):
            known = None if step.answer_key is None else self.known.get((*prefix, step.answer_key))
            prefix = (
                *prefix,
                step.prompt_key if known is None or step.answer_key is None else step.answer_key,
            )
            ids += rendered(step) if known is None else [*LEAD, *known, *TAIL]
        return ids + LEAD, prefix

    def begin(self, history: int, tools: bool, kind: Kind) -> tuple[Call, Dialogue]:
        offered = (Tool("t", "", {}),) if tools else ()
        dialogue = Dialogue(tuple(self.histories[history]), offered)
        call = Call(self.tree, dialogue, kind.label, kind.agent)
        assert call.prompt == self.expected(dialogue)[0]
        return call, dialogue

    def end(self, call: Call, dialogue: Dialogue, history: int, length: int, calls: int) -> None:
        ids = list(range(self.next, self.next + length))
        self.next += length
        version = len(self.sampled) // 3
        made = tuple(ToolCall(f"id{ids[0]}-{i}", "t", '{"a": 1}') for i in range(calls))
        _, prefix = self.expected(dialogue)
        message = call.answer(ids, f" answer {ids[0]}\n", made, version)
        self.known[(*prefix, answer_key_of(message.text, made))] = ids
        self.sampled.append((call.prompt, ids, version, call.kind))
        self.histories[history] = [*dialogue.messages, message, user(f"more {history}")]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["call", "twice", "fork", "rewrite", "trim", "rename", "restart", "system"]),
        st.integers(0, 7),
        st.integers(0, 7),
        st.integers(1, 4),
        st.booleans(),
        st.sampled_from(
            [
                Kind(),
                Kind(),
                Kind(),
                Kind("", "title"),
                Kind("", "compaction"),
                Kind("sub"),
                Kind("sub", "title"),
            ]
        ),
    ),
    max_size=24,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS, st.sampled_from([(), ("title",), ("title", "compaction"), ("subagent",)]))
def test_random_agents(
    actions: list[tuple[str, int, int, int, bool, Kind]], exclude: tuple[str, ...]
) -> None:
    agent = RandomAgent()
    for action, a, b, length, tools, kind in actions:
        i = a % len(agent.histories)
        history = agent.histories[i]
        k = b % len(history)
        message = history[k]
        if action == "call":
            call, dialogue = agent.begin(i, tools, kind)
            agent.end(call, dialogue, i, length, calls=length % 3 if tools else 0)
        elif action == "twice":
            j = b % len(agent.histories)
            first, second = agent.begin(i, tools, kind), agent.begin(j, tools, Kind())
            agent.end(*second, j, length, 0)
            agent.end(*first, i, length, 0)
        elif action == "fork":
            agent.histories.append([*history[: k + 1], user(f"branch {b}")])
        elif action == "rewrite":
            history[k] = Message(message.role, f"rewritten {b}", message.tool_calls if b % 2 else ())
        elif action == "trim":
            history[k] = Message(message.role, message.text.strip(), message.tool_calls)
        elif action == "rename":
            calls = tuple(ToolCall(call.id, "Renamed", '{"z":0}') for call in message.tool_calls)
            history[k] = Message(message.role, message.content, calls)
        elif action == "restart":
            agent.histories.append([user(f"start {b % 2}")])
        else:
            agent.histories.append([Message("system", f"system {b % 2}"), *history])
    check(export(agent.tree, exclude), agent.sampled, exclude)


def test_a_fork_shares_the_prefix_and_trains_it_once() -> None:
    tree = ContextTree()
    first = Call(tree, Dialogue((user("q"),))).answer([100_000, 100_001], "one")
    left = Call(tree, Dialogue((user("q"), first, user("left"))))
    right = Call(tree, Dialogue((user("q"), first, user("right"))))
    assert left.prompt[: left.prompt.index(100_001) + 1] == right.prompt[: right.prompt.index(100_001) + 1]
    left.answer([100_002], "l")
    right.answer([100_003], "r")
    found = export(tree)
    assert [(c.label, c.generated) for c in found.contexts] == [("main", 3), ("fork", 1)]
    first_prompt = Call(tree, Dialogue((user("q"),))).prompt
    turns = [(first_prompt, [100_000, 100_001]), (left.prompt, [100_002]), (right.prompt, [100_003])]
    check(found, [(prompt, ids, 0, Kind()) for prompt, ids in turns])


def test_an_auxiliary_call_is_its_own_context_and_not_main() -> None:
    tree = ContextTree()
    Call(tree, Dialogue((user("title of: q"),))).answer([100_009], "Title")
    message = Call(tree, Dialogue((Message("system", "agent"), user("q")))).answer([100_000], "a")
    Call(tree, Dialogue((Message("system", "agent"), user("q"), message, user("and?")))).answer(
        [100_001], "b"
    )
    assert [(c.label, c.generated) for c in export(tree).contexts] == [("main", 2), ("other", 1)]


def test_a_rewritten_answer_enters_without_loss() -> None:
    tree = ContextTree()
    Call(tree, Dialogue((user("q"),))).answer([100_000], "sampled")
    changed = Message("assistant", "what the agent made of it")
    call = Call(tree, Dialogue((user("q"), changed, user("go on"))))
    assert 100_000 not in call.prompt
    call.answer([100_001], "b")
    found = export(tree)
    assert sorted(found.columns["tokens"][found.columns["loss_mask"] == 1].tolist()) == [100_000, 100_001]
    assert len(found.contexts) == 2


def test_renamed_tools_and_reordered_arguments_match_by_call_id() -> None:
    tree = ContextTree()
    calls = (ToolCall("c1", "Task", '{"a": 1, "b": 2}'),)
    Call(tree, Dialogue((user("q"),))).answer([100_000, 100_001], "thinking", calls)
    back = Message("assistant", "", (ToolCall("c1", "Agent", '{"b":2,"a":1}'),))
    call = Call(tree, Dialogue((user("q"), back, Message("tool", "r", tool_call_id="c1"))))
    assert call.match.steps == 3
    assert [token for token in call.prompt if token >= FIRST_SAMPLED] == [100_000, 100_001]
    other = Message("assistant", "", (ToolCall("c2", "Task", '{"a": 1, "b": 2}'),))
    assert Call(tree, Dialogue((user("q"), other))).match.steps == 2


def test_of_two_turns_with_one_text_the_continued_one_is_matched() -> None:
    tree = ContextTree()
    one, two = Call(tree, Dialogue((user("q"),))), Call(tree, Dialogue((user("q"),)))
    one.answer([100_000], "same")
    two.answer([100_001], "same")
    history = (user("q"), Message("assistant", "same"), user("next"))
    first = Call(tree, Dialogue(history))
    assert 100_001 in first.prompt, "the newest, while nothing tells them apart"
    answer = first.answer([100_002], "c")
    again = Call(tree, Dialogue((*history, answer, user("more"))))
    assert [token for token in again.prompt if token >= FIRST_SAMPLED] == [100_001, 100_002]


def test_template_tokens_after_a_turn_have_no_loss_and_end_no_context() -> None:
    tree = ContextTree()
    message = Call(tree, Dialogue((user("q"),))).answer([100_000], "a")
    Call(tree, Dialogue((user("q"), message, user("r")))).answer([100_001], "b")
    columns = export(tree).columns
    tokens = columns["tokens"].tolist()
    assert tokens[tokens.index(100_000) + 1 : tokens.index(100_000) + 2] == TAIL
    assert columns["loss_mask"][tokens.index(100_000) + 1] == 0
    assert tokens[-1] == 100_001


def test_an_empty_session_exports_nothing() -> None:
    found = export(ContextTree())
    assert found.contexts == ()
    assert [len(column) for column in found.columns.values()] == [0] * 5
    assert found.columns["segments"].shape == (0, 5)


def test_a_compaction_is_a_context_of_its_own_and_what_follows_it_is_known() -> None:
    tree = ContextTree()
    first = Call(tree, Dialogue((user("q"),))).answer([100_000], "a")
    second = Call(tree, Dialogue((user("q"), first, user("r")))).answer([100_001], "b")
    history = (user("q"), first, user("r"), second)
    Call(tree, Dialogue((*history, user("sum up"))), "compaction").answer([100_002], "the sum")
    Call(tree, Dialogue((user("so far: the sum"),))).answer([100_003], "c")
    assert [(c.label, c.generated) for c in export(tree).contexts] == [
        ("main", 2),
        ("compacted", 1),
        ("compaction", 1),
    ]
    without = export(tree, ("compaction",))
    assert [(c.label, c.generated) for c in without.contexts] == [("main", 2), ("compacted", 1)]
    assert without.excluded == {"compaction": 1}


def test_subagents_are_left_out_where_the_configuration_says_so() -> None:
    tree = ContextTree()
    first = Call(tree, Dialogue((user("task"),)), "summary", "a1").answer([100_009], "done")
    Call(tree, Dialogue((user("task"), first, user("more"))), agent="a1").answer([100_008], "more")
    Call(tree, Dialogue((user("q"),))).answer([100_000], "a")
    found = export(tree, ("subagent",))
    assert [(c.label, c.generated) for c in found.contexts] == [("main", 1), ("summary", 1)]
    assert found.excluded == {"subagent": 1}


def test_a_subagent_that_shares_the_preamble_is_not_merged_into_main() -> None:
    tree = ContextTree()
    system = Message("system", "agent")
    Call(tree, Dialogue((system, user("task"))), agent="a1").answer([100_009], "done")
    message = Call(tree, Dialogue((system, user("q")))).answer([100_000], "a")
    Call(tree, Dialogue((system, user("q"), message, user("r")))).answer([100_001], "b")
    assert [(c.label, c.generated) for c in export(tree).contexts] == [("main", 2), ("subagent", 1)]


def test_an_agent_that_goes_on_after_an_excluded_turn_keeps_its_tokens_as_prompt() -> None:
    tree = ContextTree()
    first = Call(tree, Dialogue((user("q"),)), "summary").answer([100_000], "a")
    Call(tree, Dialogue((user("q"), first, user("r")))).answer([100_001], "b")
    (context,) = export(tree, ("summary",)).contexts
    assert (context.label, context.generated) == ("main", 1)
    columns = export(tree, ("summary",)).columns
    assert 100_000 in columns["tokens"]
    assert columns["loss_mask"].sum() == 1


def routed(call: Call, ids: list[int], content: str, start: int) -> Message:
    """The turn with the engine's rows of routing from `start` on: token number t, as input, has row [[t % 251]]."""
    rows = np.arange(start, len(call.prompt) + len(ids) - 1) % 251
    found = Routing(start, rows.astype(np.uint8).reshape(-1, 1, 1))
    return call.answer(ids, content, routing=found, candidates=tuple((token, 7) for token in ids))


def test_routing_and_candidates_come_at_their_rows_over_turns_and_forks() -> None:
    tree = ContextTree()
    call = Call(tree, Dialogue((user("q"),)))
    first = routed(call, [100_000, 100_001], "one", 0)
    for text, token in (("left", 100_002), ("right", 100_003)):
        call = Call(tree, Dialogue((user("q"), first, user(text))))
        known = call.match.node.routed
        assert known == len(Call(tree, Dialogue((user("q"),))).prompt) + 1, "the last token was no input yet"
        routed(call, [token], text, known)
    found = export(tree)
    routing = found.columns["routed_experts.L0-0"]
    assert (routing.dtype, routing.shape[1:]) == (np.dtype(np.uint8), (1, 1))
    for context in found.contexts:
        rows = routing[context.offset : context.offset + context.tokens, 0, 0]
        assert rows.tolist() == [*(np.arange(context.tokens - 1) % 251).tolist(), 0]
    trained = found.columns["tokens"][found.columns["loss_mask"] == 1]
    offsets, ids = found.columns["candidates.offsets"], found.columns["candidates.ids"]
    assert offsets.tolist() == [0, 2, 4, 6, 8]
    assert ids[::2].tolist() == trained.tolist()


def test_a_letter_that_differs_is_not_shared_by_requests_at_once() -> None:
    tree = ContextTree()

    def foreign(arguments: str) -> Dialogue:
        return Dialogue((user("q"), Message("assistant", "", (ToolCall("c", "f", arguments),)), user("r")))

    one, two = Call(tree, foreign('{"a": 1, "b": 2}')), Call(tree, foreign('{"b":2,"a":1}'))
    one.answer([100_000], "x")
    two.answer([100_001], "y")
    check(export(tree), [(one.prompt, [100_000], 0, Kind()), (two.prompt, [100_001], 0, Kind())])
    assert Call(tree, foreign('{"b":  2, "a": 1}')).match.steps == 4, "whichever it was, it is known"


def test_a_node_out_of_turn_is_refused() -> None:
    tree = ContextTree()
    node = tree.nodes[0]
    with pytest.raises(ValueError, match="node 0 comes where 1 is next"):
        tree.append(node)


def test_turns_of_unequal_columns_are_refused() -> None:
    empty = np.empty(0, np.int32)
    with pytest.raises(ValueError, match="2 ids, 1 logprobs"):
        SampledTurn(empty, np.zeros(2, np.int32), np.zeros(1, np.float32), np.zeros(2, np.int32), empty)
    with pytest.raises(ValueError, match="0 ids"):
        SampledTurn(empty, empty, np.empty(0, np.float32), empty, empty)


def keys(message: Message) -> tuple[Key, Key | None]:
    step = steps(Dialogue((message,)))[1]
    return step.prompt_key, step.answer_key


def test_keys() -> None:
    message = Message("assistant", " x\n", ())
    assert answer_key(message) == answer_key(Message("assistant", "x"))
    assert keys(message)[0] != keys(Message("assistant", "x"))[0]
    assert answer_key(user("x")) is None
    reordered = [
        Message("assistant", "", (ToolCall("i", "n", text),))
        for text in ('{"a":1,"b":2}', '{"b": 2, "a": 1}')
    ]
    assert keys(reordered[0]) == keys(reordered[1])
    renamed = Message("assistant", "", (ToolCall("i", "m", '{"a":1,"b":2}'),))
    assert keys(renamed)[0] != keys(reordered[0])[0]
    assert keys(renamed)[1] == keys(reordered[0])[1]
    assert keys(Message("tool", "x", (), "c"))[0] != keys(Message("tool", "x", (), "c", is_error=True))[0]
    tools = [Tool("t", "", {"a": 1, "b": 2}), Tool("t", "", {"b": 2, "a": 1})]
    assert len({steps(Dialogue((), (tool,)))[0].prompt_key for tool in tools}) == 1


@given(st.text(), st.text())
def test_whatever_a_message_holds_has_a_key(text: str, arguments: str) -> None:
    for message in (user(text), Message("assistant", text, (ToolCall("i", text, arguments),))):
        assert len(keys(message)[0]) == 16
    assert keys(user(text + "\ud800"))[0] != keys(user(text + "\ud801"))[0]
    large = Message("assistant", "", (ToolCall("i", "n", '{"a": 123456789012345678901234567890}'),))
    assert len(keys(large)[0]) == 16


def test_consecutive_tool_results_are_one_turn() -> None:
    results = [Message("tool", str(i), (), f"c{i}") for i in range(3)]
    asked = steps(Dialogue((user("q"), results[0], results[1], user("r"), results[2])))
    assert [len(step.messages) for step in asked] == [0, 1, 2, 1, 1]
