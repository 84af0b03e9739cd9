"""The contract: what is a name, a key, a fact, a context, a plan and a source, and that nothing else passes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from schemas.config import MAX_DECISIONS, Broker, Engine, RunConfig, Source
from schemas.config import Store as StoreConfig
from schemas.envelope import encode, new_event
from schemas.facts import (
    MAX_BODY,
    MAX_REWARD,
    Failure,
    RunStarted,
    SampleCompleted,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceVerified,
)
from schemas.keys import optimizer_key, payload_key, plan_key, weights_key
from schemas.names import (
    BadName,
    Name,
    Subject,
    attempt_id,
    checked_name,
    dead_letter_subject,
    sample_id,
    sample_index,
    sequence_id,
    stream_name,
    subject_filter,
)
from schemas.payload import ContextMeta, Key, PayloadHeader, Ref, Span
from schemas.plan import Plan, PlanRows, PlanSequence
from tests.unit.factories import config

NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True)
EXAMPLE = SampleCompleted(source="s", sample="s-000001", sequences=("s-000001-0",), rewards=(1.0,), failed=0)


HOSTILE = (
    "a.b",
    "*",
    ">",
    "a b",
    "a\n",
    "\na",
    "a\r\nb",
    "a/b",
    "..",
    "a\0",
    "é",
    "x" * 129,
    "a*",
    "$JS",
)


@pytest.mark.parametrize("bad", HOSTILE)
def test_a_hostile_id_never_becomes_a_subject_a_filter_or_a_key(bad: str) -> None:
    for make in (
        lambda: checked_name(bad, "x"),
        lambda: Subject("r", "sample", "completed", bad, "i"),
        lambda: Subject.parse(f"rl.r.sample.completed.s.{bad}"),
        lambda: stream_name(bad),
        lambda: dead_letter_subject(bad),
        lambda: sample_id(bad, 1),
        lambda: sequence_id(bad, 1),
        lambda: attempt_id(bad, 1),
        lambda: payload_key(bad, "s", "a"),
        lambda: payload_key("r", bad, "a"),
        lambda: payload_key("r", "s", bad),
        lambda: plan_key(bad, 1, 1),
        lambda: optimizer_key("r", 1, bad),
        lambda: weights_key("r", 1, bad),
    ):
        with pytest.raises(BadName):
            make()
    if bad != "*":
        with pytest.raises(BadName):
            subject_filter("r", "sample.completed", bad)
    with pytest.raises(ValidationError):
        TypeAdapter(Name).validate_python(bad)
    with pytest.raises(ValidationError):
        SampleRejected(source="s", sample=bad, reason="failed")


def test_an_empty_token_is_no_name() -> None:
    for make in (
        lambda: checked_name("", "x"),
        lambda: Subject("r", "a", "b", "", "i"),
        lambda: stream_name(""),
    ):
        with pytest.raises(BadName):
            make()


@given(st.text(max_size=30))
def test_the_model_and_the_check_agree_on_what_a_name_is(text: str) -> None:
    try:
        checked_name(text, "x")
    except BadName:
        with pytest.raises(ValidationError):
            TypeAdapter(Name).validate_python(text)
    else:
        assert TypeAdapter(Name).validate_python(text) == text


@given(run=NAMES, entity=NAMES, fact=NAMES, scope=NAMES, id_=NAMES)
def test_subject_text_and_parse_are_inverse(run: str, entity: str, fact: str, scope: str, id_: str) -> None:
    subject = Subject(run, entity, fact, scope, id_)
    assert Subject.parse(subject.text) == subject


@given(source=NAMES, index=st.integers(0, 10**12))
def test_sample_index_is_the_inverse_of_sample_id(source: str, index: int) -> None:
    assert sample_index(sample_id(source, index), source) == index


@pytest.mark.parametrize(
    "sample", ["s", "s-", "s-1", "t-000001", "s-00000x", "s-٠٠٠٠٠١", "s-0000001", "s-" + "9" * 5000]
)
def test_a_sample_of_another_form_has_no_index(sample: str) -> None:
    with pytest.raises(BadName, match="in six digits or more"):
        sample_index(sample, "s")


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "/etc/passwd",
        "a//b",
        "..",
        "../x",
        "a/../../x",
        "a/.",
        ".ssh/id",
        "a\\b",
        "a\n",
        "a b",
        "x" * 513,
    ],
)
def test_a_reference_leads_nowhere_but_into_the_store(key: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Key).validate_python(key)
    with pytest.raises(ValidationError):
        Ref(key=key, bytes=1, crc32c=1)


def dispatch(**changes: object) -> SequenceDispatched:
    good = {
        "source": "s", "sample": "s-000001", "sequence": "s-000001-1", "member": 1, "group_size": 2, "pool": "p",
        "task_index": 1,
    }  # fmt: skip
    return SequenceDispatched.model_validate({**good, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"member": 2},
        {"member": 0},
        {"group_size": 1},
        {"sample": "s-x"},
        {"source": "t"},
        {"sequence": "s-000002-1"},
    ],
)
def test_a_dispatch_whose_ids_contradict_each_other_is_refused(changes: dict[str, object]) -> None:
    dispatch()
    with pytest.raises(ValidationError):
        dispatch(**changes)


def test_a_verdict_is_not_both_reward_and_failure() -> None:
    failure = Failure(kind="infra", reason="lost")
    rest = {"source": "s", "sample": "x", "sequence": "y", "attempt": 1, "host": "h"}
    with pytest.raises(ValidationError, match="not both"):
        SequenceVerified.model_validate({**rest, "reward": 0.0, "failure": failure})


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 2 * MAX_REWARD, -1e308, None, "much"])
def test_a_reward_that_no_mean_can_hold_is_refused(reward: object) -> None:
    with pytest.raises(ValidationError):
        SampleCompleted.model_validate({**EXAMPLE.model_dump(), "rewards": [reward]})
    with pytest.raises(ValidationError, match="0 rewards for 1 sequences"):
        SampleCompleted.model_validate({**EXAMPLE.model_dump(), "rewards": []})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss_spans": [(6, 4)]}, "loss span"),
        ({"loss_spans": [(4, 4)]}, "loss span"),
        ({"loss_spans": [(4, 11)]}, "loss span"),
        ({"loss_spans": [(2, 5), (4, 6)]}, "loss span"),
        ({"loss_spans": [(5, 6), (2, 3)]}, "loss span"),
        ({"generated": 1}, "2 tokens carry loss, but only 1 were generated"),
        ({"min_version": 3}, "min_version 3 is above max_version 1"),
    ],
)
def test_a_context_that_contradicts_itself_is_refused(changes: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {
        "offset": 0, "tokens": 10, "generated": 2, "loss_spans": [(2, 3), (3, 4)], "min_version": 1, "max_version": 1,
    }  # fmt: skip

    def made(given: dict[str, Any]) -> ContextMeta:
        spans = [{"start": a, "end": b} for a, b in given["loss_spans"]]
        return ContextMeta.model_validate({**given, "loss_spans": spans})

    assert made(good).loss_tokens() == 2
    with pytest.raises(ValidationError, match=said):
        made({**good, **changes})


def plan(**rows: tuple[float, ...]) -> Plan:
    """Two sequences of one context, one for each of two ranks, unless changed."""
    context = ContextMeta(
        offset=0, tokens=10, generated=4, loss_spans=(Span(start=6, end=10),), min_version=0, max_version=0
    )
    columns = {
        "sequence": (0, 1), "context": (0, 0), "dp": (0, 1), "microbatch": (0, 0), "advantage": (1.0, -1.0),
        "loss_weight": (0.125, 0.125), **rows,
    }  # fmt: skip
    return Plan(
        run="r",
        step=1,
        policy_version=0,
        dp=2,
        microbatches=1,
        token_budget=16,
        loss_tokens=8,
        sequences=tuple(
            PlanSequence(
                source="s",
                sample="s-000000",
                sequence=f"s-000000-{member}",
                payload=PayloadHeader(key="k", bytes=1, columns=()),
                contexts=(context,),
            )
            for member in range(2)
        ),
        rows=PlanRows.model_validate(columns),
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"dp": (0,)}, "unequal length"),
        ({"sequence": (0, 2)}, "row 1 is of sequence 2, there are 2"),
        ({"sequence": (0, -1)}, "row 1 is of sequence -1"),
        ({"context": (0, 1)}, "row 1 is of context 1"),
        ({"sequence": (0, 0)}, "planned twice"),
        ({"dp": (0, 2)}, "outside the batch"),
        ({"microbatch": (0, 1)}, "outside the batch"),
        ({"dp": (0, 0)}, "holds 20 tokens, budget 16"),
    ],
)
def test_a_plan_that_breaks_its_promises_is_refused(rows: dict[str, tuple[float, ...]], said: str) -> None:
    plan().check()
    with pytest.raises(ValueError, match=said):
        plan(**rows).check()


def source(**changes: object) -> dict[str, object]:
    return {
        "name": "math",
        "pool": "p",
        "groups": 2,
        "group_size": 2,
        "environment": {"kind": "a"},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"groups": 0}, "not both or neither"),
        ({"evaluate": 1}, "not both or neither"),
        ({"behaviour": {"temperature": 0.7}}, "sample training sources at 1.0"),
        ({"estimator": "rloo", "group_size": 1}, "rloo compares"),
        ({"group_size": 1}, "no group would ever be trained"),
        ({"accept": {"min": 0.5, "max": 0.5}}, "no group would ever be trained"),
        ({"accept": {"min": 0.6, "max": 0.9}}, "no group would ever be trained"),
        ({"name": "x" * 65}, "64 characters"),
        ({"group_size": 513}, "512"),
    ],
)
def test_a_source_that_could_never_work_is_refused(changes: dict[str, object], said: str) -> None:
    Source.model_validate(source())
    with pytest.raises(ValidationError, match=said):
        Source.model_validate(source(**changes))


def test_ids_and_bodies_of_the_largest_source_fit() -> None:
    largest = Source.model_validate(source(name="x" * 64, group_size=512))
    sample = sample_id(largest.name, 10**9)
    members = tuple(sequence_id(sample, member) for member in range(largest.group_size))
    attempt_id(members[-1], 1000)
    awkward = (-123456.78901234567,) * len(members)
    for fact in (
        SampleCompleted(source=largest.name, sample=sample, sequences=members, rewards=awkward, failed=0),
        SampleShaped(source=largest.name, sample=sample, estimator="grpo", advantages=awkward),
    ):
        assert len(encode(new_event(fact, "test"), "r").body) < MAX_BODY


def test_what_does_not_fit_into_run_started_is_refused_at_the_door() -> None:
    def whole(characters: int) -> RunConfig:
        sources = [{**source(name=f"s{i}"), "behaviour": {"system": "p" * characters}} for i in range(4)]
        return config(sources=sources)

    fits = whole(15_000)
    encode(new_event(RunStarted(run="r", config=fits.decisions()), "test"), "r")
    with pytest.raises(ValidationError, match=rf"limit {MAX_DECISIONS} .*; shorten system prompts"):
        whole(16_000)
    assert len(orjson.dumps(fits.decisions())) <= MAX_DECISIONS


@pytest.mark.parametrize(
    ("section", "field"), [(Broker, "url"), (Engine, "url"), (StoreConfig, "url"), (StoreConfig, "endpoint")]
)
def test_a_url_with_a_secret_is_refused_without_showing_it(section: type[Broker], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        section.model_validate({field: "nats://user:hunter2@host:4222"})
    (error,) = refused.value.errors()
    assert "may hold no credentials" in error["msg"]
    assert "hunter2" not in error["msg"]
