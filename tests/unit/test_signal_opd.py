"""On-policy distillation: token advantages by hand and against torch, the top-k bound, and sequences without a score."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.signal.hooks import BadHook, Member, Signal, chain
from pipeline.signal.opd import TAIL, Opd, OpdTopK, top_scores
from schemas.sources import Source

STUDENT = np.array([-1.0, -2.0, -0.5], np.float32)
TEACHER = np.array([-0.5, -4.0, -0.5], np.float32)


def _signal(*columns: dict[str, Any], advantages: list[float] | None = None, masked: bool = False) -> Signal:
    members = tuple(
        Member(f"s{i}", loss_tokens=len(each.get("logprobs", [])), masked=masked)
        for i, each in enumerate(columns)
    )
    made = None if advantages is None else np.array(advantages)
    return Signal(members, np.zeros(len(members)), advantages=made, columns=columns)


SCORED = {"logprobs": STUDENT, "teacher.t.logprobs": TEACHER}


def _tokens(signal: Signal) -> list[list[float] | None]:
    return [None if tokens is None else tokens.tolist() for tokens in signal.tokens]


def test_by_hand() -> None:
    found = Opd({"teacher": "t"})(_signal(SCORED))
    assert _tokens(found) == [[0.5, -2.0, 0.0]]
    assert found.tokens[0] is not None
    assert found.tokens[0].dtype == np.float32
    assert found.made().tolist() == [-0.5]
    # The bound is of the difference, before its weight.
    found = Opd({"teacher": "t", "clip": 1.0, "weight": 0.25})(_signal(SCORED))
    assert _tokens(found) == [[0.125, -0.25, 0.0]]


def test_names_and_stages() -> None:
    opd, added = Opd({"teacher": "big"}), OpdTopK({"teacher": "big", "add": True})
    assert (opd.stage, opd.columns) == ("advantages", ("logprobs", "teacher.big.logprobs"))
    assert added.stage == "after"
    assert added.columns == ("tokens", "logprobs", "teacher.big.top_ids", "teacher.big.top_logprobs")


def test_added_to_an_estimator() -> None:
    before = _signal(SCORED, advantages=[1.0])
    found = Opd({"teacher": "t", "add": True})(before)
    assert _tokens(found) == [[1.5, -1.0, 1.0]]
    assert (before.made().tolist(), found.made().tolist()) == ([1.0], [0.5])
    # A second teacher adds to what the first made.
    both = {**SCORED, "teacher.u.logprobs": TEACHER}
    first = Opd({"teacher": "t", "add": True})(_signal(both, advantages=[1.0]))
    assert _tokens(Opd({"teacher": "u", "add": True})(first)) == [[2.0, -3.0, 1.0]]


def test_sequences_that_the_teacher_has_not_scored() -> None:
    lacking, empty = {"logprobs": STUDENT}, {"logprobs": STUDENT[:0], "teacher.t.logprobs": TEACHER[:0]}
    found = Opd({"teacher": "t"})(_signal(lacking, SCORED, empty))
    assert _tokens(found) == [[0.0] * 3, [0.5, -2.0, 0.0], []]
    assert found.made().tolist() == [0.0, -0.5, 0.0]
    found = Opd({"teacher": "t", "add": True})(_signal(lacking, SCORED, empty, advantages=[0.3, 1.0, -1.3]))
    assert _tokens(found) == [None, [1.5, -1.0, 1.0], None]
    assert found.made().tolist() == [0.3, 0.5, -1.3]


def test_masked_sequences() -> None:
    found = Opd({"teacher": "t"})(_signal(SCORED, masked=True))
    assert (_tokens(found), found.made().tolist()) == ([[0.0] * 3], [0.0])
    found = Opd({"teacher": "t", "add": True})(_signal(SCORED, masked=True, advantages=[0.3]))
    assert (_tokens(found), found.made().tolist()) == ([None], [0.3])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    scores = TEACHER.copy()
    scores[1] = bad
    with pytest.raises(BadHook, match=r"sequence s0: 1 differences .* not finite"):
        Opd({"teacher": "t", "clip": 1.0})(_signal({**SCORED, "teacher.t.logprobs": scores}))


def test_columns_of_another_length_are_refused() -> None:
    with pytest.raises(BadHook, match="3 loss tokens"):
        Opd({"teacher": "t"})(_signal({**SCORED, "teacher.t.logprobs": TEACHER[:2]}))


def test_in_a_chain_with_an_estimator() -> None:
    source = Source.model_validate(
        {
            "name": "s", "pool": "p", "groups": 1, "group_size": 2, "environment": {"kind": "arithmetic"},
            "hooks": [{"kind": "dr_grpo"}, {"kind": "opd", "options": {"teacher": "t", "add": True}}],
        }
    )  # fmt: skip
    made = chain(source)
    assert (made.pure, made.columns, made.estimator) == (
        False,
        ("logprobs", "teacher.t.logprobs"),
        "dr_grpo",
    )
    members = (Member("a", loss_tokens=3), Member("b", loss_tokens=3))
    found = made.run(Signal(members, np.array([1.0, 0.0]), columns=(SCORED, {"logprobs": STUDENT})))
    assert _tokens(found) == [[1.0, -1.5, 0.5], None]
    assert found.made().tolist() == [0.0, -0.5]


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_against_torch(seed: int, length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, length, 12, generator=generator).mul(3).log_softmax(-1)
    sampled = torch.multinomial(student.exp(), 1, generator=generator)
    kl = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none")
    assert (kl.sum(-1) > -1e-4).all()
    expected = (teacher.gather(-1, sampled) - student.gather(-1, sampled)).squeeze(-1)
    top = teacher.topk(12)
    columns = {
        "tokens": sampled.squeeze(-1).int().numpy(),
        "logprobs": student.gather(-1, sampled).squeeze(-1).numpy(),
        "teacher.t.logprobs": teacher.gather(-1, sampled).squeeze(-1).numpy(),
        "teacher.t.top_ids": top.indices.int().numpy(),
        "teacher.t.top_logprobs": top.values.numpy(),
    }
    for hook in (Opd({"teacher": "t"}), OpdTopK({"teacher": "t"})):
        found = hook(_signal(columns))
        assert found.tokens[0] == pytest.approx(expected.numpy(), abs=1e-5)
        assert found.made()[0] == pytest.approx(expected.double().mean().item(), abs=1e-5)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_top_k_never_punishes_more(seed: int, k: int) -> None:
    """The whole distribution is known here: what the top k tell of a token is its own log-probability, or no less."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, rng.uniform(0.1, 5), (50, 30))
    whole = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    tokens = rng.integers(0, 30, 50).astype(np.int32)
    ids = np.argsort(-whole, axis=1)[:, :k].astype(np.int32)
    top = np.take_along_axis(whole, ids, axis=1)
    found, true = top_scores(tokens, ids, top), whole[np.arange(50), tokens]
    among = (ids == tokens[:, None]).any(axis=1)
    assert (found[among] == true[among]).all()
    # As probabilities: what rounding leaves of float32 is TAIL.
    assert (np.exp(found[~among]) >= np.exp(true[~among]) - TAIL).all()
    assert (found[~among] <= top[~among].min(axis=1)).all()


def test_top_k_by_hand() -> None:
    ids = np.array([[5, 7], [5, 7], [5, 7], [5, -1], [5, 7]], np.int32)
    tokens = np.array([7, 9, 9, 9, 9], np.int32)
    top = np.log(np.array([[0.6, 0.3], [0.6, 0.3], [0.5, 0.1], [0.7, 1.0], [0.5, 0.5]], np.float32))
    top[3, 1] = -9999.0
    # Among them; the tail; the tail would be more than the last of them; one place unfilled; no tail but rounding.
    expected = [math.log(0.3), math.log(0.1), math.log(0.1), math.log(0.3), math.log(TAIL)]
    assert top_scores(tokens, ids, top) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"teacher": ""}, {"teacher": "t", "weight": 0}, {"teacher": "t", "clip": -1}, {"teacher": "t", "k": 5}]
)  # fmt: skip
@pytest.mark.parametrize("hook", [Opd, OpdTopK])
def test_bad_options(hook: type[Opd], options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        hook(options)
