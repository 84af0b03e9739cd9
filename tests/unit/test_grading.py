"""A grader's answer: read strictly, about this group or not at all, and never the reason that a fact is no fact."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.signal.grading import (
    ANSWER_SCHEMA,
    LAG,
    MAX_ANSWER,
    MAX_REASON,
    Answer,
    Graded,
    Unusable,
    Verdict,
    cut,
    graded,
    graded_fact,
    kept_fact,
    line,
    open_still,
    parse,
    understood,
)
from schemas.envelope import encode, new_event
from schemas.facts import SampleCompleted, SampleGraded
from schemas.payload import Ref

A, B, C = "s-000001-0", "s-000001-1", "s-000001-3"
GROUP = SampleCompleted(
    source="s", sample="s-000001", sequences=(A, B, C), rewards=(1.0, 0.5, -2.0), failed=1
)


def verdict(sequence: str, **changed: Any) -> dict[str, Any]:
    return {"sequence": sequence, "quality": 1.0, "hack": False, "reason": "", **changed}


def answer(*verdicts: dict[str, Any]) -> str:
    return json.dumps({"sequences": verdicts})


WHOLE = (
    verdict(C, quality=0.25),
    verdict(A, hack=True, reason="it edits the tests"),
    verdict(B, quality=0.5),
)


def test_an_answer_in_any_order_is_put_in_the_groups_and_a_hack_has_reward_0() -> None:
    found = graded(GROUP, parse(answer(*WHOLE)))
    assert found.rewards == (0.0, 0.5, -2.0)
    assert found.quality == (1.0, 0.5, 0.25)
    assert found.hacks == (True, False, False)
    ref = Ref(key="k", bytes=1, crc32c=1)
    fact = graded_fact("m.n:f", GROUP, found, 1, report=ref, attempts=2, seconds=3.5, cost=0.25)
    assert (fact.rewards, fact.quality, fact.hacks) == (found.rewards, found.quality, found.hacks)
    assert (fact.grader, fact.fallback, fact.id()) == ("m-n-f", None, "s-000001-r1")
    assert (fact.report, fact.attempts, fact.seconds, fact.cost) == (ref, 2, 3.5, 0.25)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is no answer: Invalid JSON"),
        ("```json\n" + answer(*WHOLE) + "\n```", "Invalid JSON"),
        (answer(*WHOLE) + " and so on", "Invalid JSON"),
        ("[]", "it is no answer"),
        ("{}", "sequences: Field required"),
        ('{"sequences": [{}]}', "sequences.0.sequence: Field required"),
        (answer({**verdict(A), "score": 1}), "sequences.0.score: Extra inputs are not permitted"),
        (answer(verdict(A, quality=0)), "sequences.0.quality: Input should be greater than 0"),
        (answer(verdict(A, quality=1.01)), "less than or equal to 1"),
        (answer(verdict(A, quality=True)), "sequences.0.quality: Input should be a valid number"),
        (answer(verdict(A, quality="0.5")), "sequences.0.quality"),
        (answer(verdict(A, quality=math.nan)), "sequences.0.quality"),
        (answer(verdict(A, hack="no")), "sequences.0.hack: Input should be a valid boolean"),
        (answer(verdict(A, hack=1)), "sequences.0.hack"),
        (answer(verdict(A, reason=None)), "sequences.0.reason"),
        (answer(verdict(A, reason="x" * (MAX_REASON + 1))), "sequences.0.reason"),
        (answer(verdict(A, reason="half \ud800")), "Invalid JSON"),
        (answer(verdict("x" * 300)), "sequences.0.sequence"),
        (answer(*[verdict("x", quality=5)] * 9), "; and 6 more"),
        (" " * (MAX_ANSWER + 1), f"longer than {MAX_ANSWER} bytes"),
        (answer(*WHOLE[:2]), f"does not judge '{B}', one of 1 sequences"),
        (answer(*WHOLE, verdict("s-000001-2")), "judges 's-000001-2', which is no sequence of the group"),
        (answer(*WHOLE, verdict(A)), f"judges sequence '{A}' 2 times"),
        (answer(), f"does not judge '{A}', one of 3 sequences"),
    ],
)
def test_anything_else_is_unusable_and_says_why_in_a_line(text: str, said: str) -> None:
    with pytest.raises(Unusable) as raised:
        graded(GROUP, parse(text))
    assert said in str(raised.value)
    assert len(str(raised.value)) <= 500
    assert str(raised.value).isprintable()


def test_the_schema_that_judges_are_given_is_that_of_the_answer() -> None:
    items = ANSWER_SCHEMA["properties"]["sequences"]["items"]
    assert [*ANSWER_SCHEMA["properties"]] == ANSWER_SCHEMA["required"] == [*Answer.model_fields]
    assert [*items["properties"]] == items["required"] == [*Verdict.model_fields]
    types = {"string": str, "number": float, "boolean": bool}
    assert {n: types[p["type"]] for n, p in items["properties"].items()} == {
        name: field.annotation for name, field in Verdict.model_fields.items()
    }
    jsonschema.Draft202012Validator.check_schema(ANSWER_SCHEMA)
    jsonschema.validate(json.loads(answer(*WHOLE)), ANSWER_SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(answer({**verdict(A), "score": 1})), ANSWER_SCHEMA)


@st.composite
def groups(draw: st.DrawFn) -> tuple[SampleCompleted, list[dict[str, Any]]]:
    n = draw(st.integers(0, 8))
    rewards = tuple(draw(st.floats(-10, 10)) for _ in range(n))
    ids = tuple(f"s-000001-{i}" for i in range(n))
    verdicts = [
        verdict(
            each,
            quality=draw(st.floats(0, 1, exclude_min=True)),
            hack=draw(st.booleans()),
            reason=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
        )
        for each in ids
    ]
    completed = SampleCompleted(source="s", sample="s-000001", sequences=ids, rewards=rewards, failed=0)
    return completed, draw(st.permutations(verdicts))


@given(groups())
def test_a_whole_answer_grades_every_member_by_its_own_verdict(given_: tuple[SampleCompleted, Any]) -> None:
    completed, verdicts = given_
    found = graded(completed, parse(answer(*verdicts)))
    by = {v["sequence"]: v for v in verdicts}
    for i, sequence in enumerate(completed.sequences):
        assert found.quality[i] == by[sequence]["quality"]
        assert found.hacks[i] is by[sequence]["hack"]
        assert found.rewards[i] == (0.0 if found.hacks[i] else completed.rewards[i])
    assert understood(completed, orjson.loads(answer(*verdicts))) == found
    encode(new_event(graded_fact("rubric", completed, found), "grader"), "r")


@given(groups(), st.data())
def test_an_answer_on_another_group_is_unusable(
    given_: tuple[SampleCompleted, Any], data: st.DataObject
) -> None:
    completed, verdicts = given_
    changed = list(verdicts)
    if changed and data.draw(st.booleans()):
        changed.pop(data.draw(st.integers(0, len(changed) - 1)))
    else:
        extra = data.draw(st.sampled_from([*completed.sequences, "s-000002-0", "", "../x"]))
        changed.insert(data.draw(st.integers(0, len(changed))), verdict(extra))
    with pytest.raises(Unusable):
        graded(completed, parse(answer(*changed)))


def test_rewards_alone_are_an_answer_of_python_graders() -> None:
    assert understood(GROUP, [0, 0.5, 1]) == Graded((0.0, 0.5, 1.0))
    assert understood(GROUP, Answer.model_validate_json(answer(*WHOLE))).hacks == (True, False, False)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.0], "gave 1 rewards for 3 sequences"),
        ([1.0, 2.0, 3.0, 4.0], "gave more than 3 rewards for 3 sequences"),
        ([1.0, math.nan, 0.0], "not finite numbers of at most"),
        ([math.inf, 0.0, 0.0], "not finite numbers of at most"),
        ([1e300, 0.0, 0.0], "not finite numbers of at most"),
        (None, "TypeError"),
        ("123", "TypeError"),
        (["good", "bad", "x"], "ValueError"),
        ({"sequences": [verdict(A)]}, f"does not judge '{B}'"),
        ({"sequences": [verdict(A, reason="half \ud800"), *WHOLE[::2]]}, "sequences.0.reason"),
        ({"a": 1}, "sequences: Field required"),
    ],
)
def test_what_a_python_grader_returns_is_read_as_strictly(value: object, said: str) -> None:
    with pytest.raises(Unusable) as raised:
        understood(GROUP, value)
    assert said in str(raised.value)


@given(st.text(st.characters(), max_size=3000), st.text(st.characters(), max_size=300))
def test_any_reason_and_any_name_become_a_fact(reason: str, name: str) -> None:
    fact = kept_fact(name or "x", GROUP, reason)
    assert fact.rewards == GROUP.rewards
    assert fact.fallback
    assert fact.fallback.isprintable()
    assert len(fact.fallback) <= 500
    encode(new_event(fact, "grader"), "r")


def test_a_group_is_open_while_it_went_on_without_an_answer() -> None:
    assert open_still(kept_fact("x", GROUP, LAG))
    assert not open_still(kept_fact("x", GROUP, "3 tries failed", attempts=3))
    assert not open_still(SampleGraded(source="s", sample="s-1", grader="none", rewards=()))


@given(
    st.lists(st.tuples(st.sampled_from(["user", "tool"]), st.text(max_size=30)), max_size=12),
    st.integers(0, 200),
)
def test_a_long_transcript_keeps_its_beginning_and_its_end(turns: list[tuple[str, str]], most: int) -> None:
    whole = "".join(text for _, text in turns)
    shown = cut(turns, most)
    if len(whole) <= most:
        assert shown == turns
        return
    [at] = [i for i, (role, _) in enumerate(shown) if role == "omitted"]
    head, tail = ("".join(text for _, text in part) for part in (shown[:at], shown[at + 1 :]))
    assert len(head) + len(tail) == most
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert shown[at][1] == f"[{len(whole) - most} characters of {len(whole)} are left out here]"
    assert {role for role, _ in shown} <= {"user", "tool", "omitted"}


def test_a_line_is_printable_and_short() -> None:
    assert line("a\x1b[31m\n b\t\u202e c" * 200, 20).isprintable()
    assert line("") == "no reason"
