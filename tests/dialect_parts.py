"""Parts for tests of dialects: random dialogues and answers, random ways to write a request, and events read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from hypothesis import strategies as st

from pipeline.capture.call import Answer, Finish, Piece, Reply, Text, Thought
from pipeline.capture.messages import ToolCall

REPLY = Reply("s1", 1_700_000_000, b"k" * 32)
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
words = texts.filter(bool)
names = st.sampled_from(["bash", "edit", "mcp__x__y", "ünïcode"])
arguments = st.dictionaries(
    texts,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)


@st.composite
def answers(draw: st.DrawFn, *, in_order: bool = True) -> tuple[Answer, list[Piece]]:
    """An answer and the pieces that it came in; `in_order`: no text after the first call."""
    thoughts = draw(st.lists(texts, max_size=4))
    calls = [
        ToolCall(f"call_{i:024x}", draw(names), json.dumps(draw(arguments), ensure_ascii=draw(st.booleans())))
        for i in range(draw(st.integers(0, 3)))
    ]
    shown: list[Piece] = [Text(text) for text in draw(st.lists(texts, max_size=4))]
    said: list[Piece] = [*shown, *calls]
    if not in_order:
        for i, call in enumerate(calls):
            said.remove(call)
            said.insert(draw(st.integers(i, len(said))), call)
        order = [piece for piece in said if isinstance(piece, ToolCall)]
        calls = order
    finish: Finish = draw(
        st.sampled_from(["tool_calls", "length"] if calls else ["stop", "length", "stop_sequence"])
    )
    prompt, cached = draw(st.integers(1, 1000)), draw(st.integers(0, 500))
    answer = Answer(
        number=draw(st.integers(0, 9)),
        content="".join(piece.text for piece in said if isinstance(piece, Text)),
        tool_calls=tuple(calls),
        finish=finish,
        malformed=0,
        prompt_tokens=prompt + cached,
        completion_tokens=draw(st.integers(1, 1000)),
        reasoning="".join(thoughts),
        stop_sequence="END" if finish == "stop_sequence" else None,
        cached_tokens=cached,
        reasoning_tokens=len(thoughts),
    )
    return answer, [*map(Thought, thoughts), *said]


@dataclass(frozen=True)
class User:
    """A user's message: results of calls (id, text, error), then text; no text is None."""

    text: str | None
    results: tuple[tuple[str, str, bool], ...] = ()


@dataclass(frozen=True)
class Assistant:
    text: str
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    reasoning: str = ""


@st.composite
def scripts(draw: st.DrawFn) -> list[User | Assistant]:
    """A legal dialogue: calls are followed by their results, the user has the last word."""
    turns: list[User | Assistant] = [User(draw(words))]
    for n in range(draw(st.integers(0, 4))):
        calls = tuple((f"call_{n}_{i}", draw(names), draw(arguments)) for i in range(draw(st.integers(0, 2))))
        turns.append(Assistant(draw(texts if calls else words), calls, draw(texts)))
        results = tuple((name, draw(texts), draw(st.booleans())) for name, _, _ in calls)
        turns.append(User(draw(st.none() | words) if results else draw(words), results))
    return turns


def shuffled(value: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """The JSON value with the keys of its objects in another order."""
    if isinstance(value, list):
        return [shuffled(item, draw) for item in value]
    if isinstance(value, dict):
        keys = draw(st.permutations(list(value)))
        return {key: shuffled(value[key], draw) for key in keys}
    return value


def damaged(value: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """The JSON value with something else somewhere inside, a member left out, or one doubled."""
    children = (
        list(value.items() if isinstance(value, dict) else enumerate(value))
        if value and isinstance(value, dict | list)
        else []
    )
    if not children or draw(st.integers(0, 5)) == 0:
        return draw(
            st.sampled_from(
                [
                    None,
                    True,
                    -1,
                    2.5,
                    "",
                    "x",
                    "\x00",
                    [],
                    {},
                    [[]],
                    [{}],
                    [None],
                    {"type": "text"},
                    "y" * 300,
                ]
            )
        )
    key, child = draw(st.sampled_from(children))
    copy = dict(value) if isinstance(value, dict) else list(value)
    if draw(st.integers(0, 5)) == 0:
        del copy[key]
    else:
        copy[key] = damaged(child, draw)
    return copy


def cut(text: str, draw: Callable[[st.SearchStrategy[Any]], Any]) -> list[str]:
    """The text in one or more pieces."""
    at = sorted(draw(st.lists(st.integers(0, len(text)), max_size=2)))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


def body(given: dict[str, Any]) -> bytes:
    return json.dumps(given).encode()


def sent(response: dict[str, Any]) -> dict[str, Any]:
    """A response as its client reads it."""
    return json.loads(orjson.dumps(response))


def events(stream: bytes) -> list[dict[str, Any]]:
    """Events of a stream; each is named like its data's type."""
    found: list[dict[str, Any]] = []
    assert stream.endswith(b"\n\n")
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        read = json.loads(data.removeprefix("data: "))
        assert name == f"event: {read['type']}"
        found.append(read)
    return found
