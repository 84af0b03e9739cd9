"""The context tree under random agents: never train a token that was not sampled, never twice, never lose one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.capture.dialogue import Dialogue, Key, Step, answer_key, answer_key_of, prompt_key, steps
from pipeline.capture.messages import Message, Tool, ToolCall
from pipeline.capture.tree import FLAG_LOSS, FLAG_SAMPLED, ContextTree, Export, Match, SampledTurn
from schemas.payload import COLUMNS, ROLES

FIRST_SAMPLED = 100_000
LEAD, TAIL = [1, 2], [3]


def rendered(step: Step) -> list[int]:
    """A rendering that tells turns apart: equal for equal prompt keys, below FIRST_SAMPLED."""
    return [10 + ord(c) % 90_000 for c in repr(step.prompt_key)]


class Call:
    """A model call in two halves, so that two can be under way at once."""

    def __init__(self, tree: ContextTree, dialogue: Dialogue) -> None:
        self.tree = tree
        self.steps = steps(dialogue)
        self.match: Match = tree.match(self.steps)
        self.rendered = [rendered(step) for step in self.steps[self.match.steps :]]
        self.prompt = tree.prompt(self.match, self.rendered, LEAD)

    def answer(
        self, ids: list[int], content: str, calls: tuple[ToolCall, ...] = (), version: int = 0
    ) -> Message:
        array = np.asarray(ids, np.int32)
        logprobs = -(array % 97).astype(np.float32)
        turn = SampledTurn(
            np.asarray(LEAD, np.int32),
            array,
            logprobs,
            np.full(len(ids), version, np.int32),
            np.asarray(TAIL, np.int32),
        )
        self.tree.add(self.match, self.steps, self.rendered, turn, answer_key_of(content, calls))
        return Message("assistant", content, calls)


def user(text: str) -> Message:
    return Message("user", text)


def check(export: Export, sampled: list[tuple[list[int], list[int], int]]) -> None:
    """`sampled`: the prompt, ids and version of every turn that was sampled."""
    tokens: Any = export.columns["tokens"]
    mask = export.columns["loss_mask"]
    logprobs, versions = export.columns["logprobs"], export.columns["policy_version"]
    assert {name: str(column.dtype) for name, column in export.columns.items()} == COLUMNS
    assert len({len(column) for name, column in export.columns.items() if name != "segments"}) == 1

    trained = sorted(tokens[mask == 1].tolist())
    assert trained == sorted(token for _, ids, _ in sampled for token in ids)
    was_sampled = tokens >= FIRST_SAMPLED
    assert (logprobs == np.where(was_sampled, -(tokens % 97), 0)).all()
    assert not versions[~was_sampled].any()

    contexts = [tokens[c.offset : c.offset + c.tokens].tolist() for c in export.contexts]
    for prompt, ids, version in sampled:
        whole = prompt + ids
        assert any(context[: len(whole)] == whole for context in contexts)
        assert (versions[np.isin(tokens, ids)] == version).all()

    at = 0
    for i, context in enumerate(export.contexts):
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
        assert mask[at - 1] == 1 or tokens[at - 1] >= FIRST_SAMPLED, "nothing follows the last sampled turn"
        assert context.label == ("main" if i == 0 else context.label)
    assert at == len(tokens)

    segments = export.columns["segments"]
    assert segments[:, 0].tolist() == [0, *segments[:-1, 1].tolist()] if len(segments) else at == 0
    for start, end, role, flags, number in segments.tolist():
        assert (
            bool(flags & FLAG_LOSS)
            == bool(mask[start])
            == bool(mask[start:end].all())
            == bool(mask[start:end].any())
        )
        assert bool(flags & FLAG_SAMPLED) == bool(was_sampled[start])
        assert 0 <= role < len(ROLES)
        assert (
            export.contexts[number].offset
            <= start
            < end
            <= export.contexts[number].offset + export.contexts[number].tokens
        )


class RandomAgent:
    """Keeps several histories, rewrites and forks them, and knows by a plain dictionary what it should be prompted with."""

    def __init__(self) -> None:
        self.tree = ContextTree()
        self.histories: list[list[Message]] = [[user("start")]]
        self.known: dict[tuple[Key, ...], list[int]] = {}
        self.sampled: list[tuple[list[int], list[int], int]] = []
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

    def begin(self, history: int, tools: bool) -> tuple[Call, Dialogue]:
        offered = (Tool("t", "", {}),) if tools else ()
        dialogue = Dialogue(tuple(self.histories[history]), offered)
        call = Call(self.tree, dialogue)
        assert call.prompt == self.expected(dialogue)[0]
        return call, dialogue

    def end(self, call: Call, dialogue: Dialogue, history: int, length: int, calls: int) -> None:
        ids = list(range(self.next, self.next + length))
        self.next += length
        version = len(self.sampled) // 3
        made = tuple(ToolCall(f"id{ids[0]}-{i}", "t", '{"a": 1}') for i in range(calls))
        _, prefix = self.expected(dialogue)
        message = call.answer(ids, f" answer {ids[0]}\n", made, version)
        self.known[(*prefix, answer_key_of(message.content, made))] = ids
        self.sampled.append((call.prompt, ids, version))
        self.histories[history] = [*dialogue.messages, message, user(f"more {history}")]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["call", "twice", "fork", "rewrite", "trim", "rename", "restart", "system"]),
        st.integers(0, 7),
        st.integers(0, 7),
        st.integers(1, 4),
        st.booleans(),
    ),
    max_size=24,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_random_agents(actions: list[tuple[str, int, int, int, bool]]) -> None:
    agent = RandomAgent()
    for action, a, b, length, tools in actions:
        i = a % len(agent.histories)
        history = agent.histories[i]
        k = b % len(history)
        message = history[k]
        if action == "call":
            call, dialogue = agent.begin(i, tools)
            agent.end(call, dialogue, i, length, calls=length % 3 if tools else 0)
        elif action == "twice":
            j = b % len(agent.histories)
            first, second = agent.begin(i, tools), agent.begin(j, tools)
            agent.end(*second, j, length, 0)
            agent.end(*first, i, length, 0)
        elif action == "fork":
            agent.histories.append([*history[: k + 1], user(f"branch {b}")])
        elif action == "rewrite":
            history[k] = Message(message.role, f"rewritten {b}", message.tool_calls if b % 2 else ())
        elif action == "trim":
            history[k] = Message(message.role, message.content.strip(), message.tool_calls)
        elif action == "rename":
            calls = tuple(ToolCall(call.id, "Renamed", '{"z":0}') for call in message.tool_calls)
            history[k] = Message(message.role, message.content, calls)
        elif action == "restart":
            agent.histories.append([user(f"start {b % 2}")])
        else:
            agent.histories.append([Message("system", f"system {b % 2}"), *history])
    check(agent.tree.export(), agent.sampled)


def test_a_fork_shares_the_prefix_and_trains_it_once() -> None:
    tree = ContextTree()
    first = Call(tree, Dialogue((user("q"),))).answer([100_000, 100_001], "one")
    left = Call(tree, Dialogue((user("q"), first, user("left"))))
    right = Call(tree, Dialogue((user("q"), first, user("right"))))
    assert left.prompt[: left.prompt.index(100_001) + 1] == right.prompt[: right.prompt.index(100_001) + 1]
    left.answer([100_002], "l")
    right.answer([100_003], "r")
    export = tree.export()
    assert [(c.label, c.generated) for c in export.contexts] == [("main", 3), ("fork", 1)]
    first_prompt = Call(tree, Dialogue((user("q"),))).prompt
    turns = [(first_prompt, [100_000, 100_001]), (left.prompt, [100_002]), (right.prompt, [100_003])]
    check(export, [(prompt, ids, 0) for prompt, ids in turns])


def test_an_auxiliary_call_is_its_own_context_and_not_main() -> None:
    tree = ContextTree()
    Call(tree, Dialogue((user("title of: q"),))).answer([100_009], "Title")
    message = Call(tree, Dialogue((Message("system", "agent"), user("q")))).answer([100_000], "a")
    Call(tree, Dialogue((Message("system", "agent"), user("q"), message, user("and?")))).answer(
        [100_001], "b"
    )
    assert [(c.label, c.generated) for c in tree.export().contexts] == [("main", 2), ("other", 1)]


def test_a_rewritten_answer_enters_without_loss() -> None:
    tree = ContextTree()
    Call(tree, Dialogue((user("q"),))).answer([100_000], "sampled")
    changed = Message("assistant", "what the agent made of it")
    call = Call(tree, Dialogue((user("q"), changed, user("go on"))))
    assert 100_000 not in call.prompt
    call.answer([100_001], "b")
    export = tree.export()
    assert sorted(export.columns["tokens"][export.columns["loss_mask"] == 1].tolist()) == [100_000, 100_001]
    assert len(export.contexts) == 2


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
    columns = tree.export().columns
    tokens = columns["tokens"].tolist()
    assert tokens[tokens.index(100_000) + 1 : tokens.index(100_000) + 2] == TAIL
    assert columns["loss_mask"][tokens.index(100_000) + 1] == 0
    assert tokens[-1] == 100_001


def test_an_empty_session_exports_nothing() -> None:
    export = ContextTree().export()
    assert export.contexts == ()
    assert [len(column) for column in export.columns.values()] == [0] * 5
    assert export.columns["segments"].shape == (0, 5)


def test_turns_of_unequal_columns_are_refused() -> None:
    empty = np.empty(0, np.int32)
    with pytest.raises(ValueError, match="2 ids, 1 logprobs"):
        SampledTurn(empty, np.zeros(2, np.int32), np.zeros(1, np.float32), np.zeros(2, np.int32), empty)
    with pytest.raises(ValueError, match="0 ids"):
        SampledTurn(empty, empty, np.empty(0, np.float32), empty, empty)


def test_keys() -> None:
    message = Message("assistant", " x\n", ())
    assert answer_key(message) == answer_key(Message("assistant", "x"))
    assert prompt_key(message) != prompt_key(Message("assistant", "x"))
    assert answer_key(user("x")) is None
    reordered = [
        Message("assistant", "", (ToolCall("i", "n", text),))
        for text in ('{"a":1,"b":2}', '{"b": 2, "a": 1}')
    ]
    assert prompt_key(reordered[0]) != prompt_key(reordered[1]), "they render to other tokens"
    assert answer_key(reordered[0]) == answer_key(reordered[1])
