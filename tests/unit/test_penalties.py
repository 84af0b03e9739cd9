"""What penalties do to advantages: MiMo's Eq. 5 by hand, and token by token against a plain loop."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.signal.hooks import chain, resolve
from pipeline.signal.penalties import (
    NO_FACTORS,
    Change,
    Counts,
    Factors,
    Part,
    SegmentPenalty,
    Weighing,
    batch_factors,
    changes,
    counts,
    factors_of,
    weighing,
)
from schemas.config import Penalty, Source
from schemas.facts import PenaltyFactors
from schemas.payload import ContextMeta, Flag, Span

MASK, SCALE, SET, SUBTRACT, MONITOR, WEIGH = (
    Penalty.model_validate({"rule": "repetition", "strategy": strategy, "value": value})
    for strategy, value in (
        ("mask", 0.0), ("scale", 0.5), ("set", -2.0), ("subtract", 3.0), ("monitor", 0.0), ("weigh", 0.0)
    )
)  # fmt: skip
MILD = Weighing(kappa=2.0, alpha_max=1e3, beta_min=0.0)


def context(tokens: int, loss: list[tuple[int, int]], flags: list[tuple[int, int, int]] = []) -> ContextMeta:  # noqa: B006  # only read
    return ContextMeta(
        offset=0,
        tokens=tokens,
        generated=tokens,
        loss_spans=tuple(Span(start=a, end=b) for a, b in loss),
        min_version=0,
        max_version=0,
        flags=tuple(Flag(start=a, end=b, rules=rules) for a, b, rules in flags),
    )


def source(*hooks: dict[str, object]) -> Source:
    return Source.model_validate(
        {"name": "math", "pool": "p", "groups": 1, "environment": {"kind": "arithmetic"}, "hooks": hooks}
    )


# Eq. 5 by hand. Positive: A = 2 with 3 flagged of 10 tokens, A = 1 with 0 of 5: H+ = 6, C+ = 14 + 5 = 19.
# Negative: A = -1 with 4 of 8, A = -0.5 with 0 of 8: H- = 4, C- = 4 + 4 = 8.
PARTS = ((2.0, 3, 7), (1.0, 0, 5), (-1.0, 4, 4), (-0.5, 0, 8), (0.0, 9, 9))


def factors(weighing: Weighing, parts: tuple[tuple[float, int, int], ...] = PARTS) -> PenaltyFactors:
    return batch_factors(Part(weighing, *part) for part in parts)


def test_eq_5_by_hand() -> None:
    found = factors(MILD)
    assert found.alpha == pytest.approx(1 + 6 / 19, abs=1e-12)
    assert found.beta == pytest.approx(1 - 1 * 4 / 8, abs=1e-12)
    assert factors(MILD.model_copy(update={"kappa": 1.5})).beta == pytest.approx(1 - 0.5 * 4 / 8, abs=1e-12)


def test_eq_5_is_clipped_and_a_sum_of_nothing_scales_nothing() -> None:
    found = factors(Weighing(kappa=2.0, alpha_max=1.25, beta_min=0.75))
    assert (found.alpha, found.beta) == (1.25, 0.75)
    # All tokens of all positive sequences are flagged, there is no negative one.
    assert factors(MILD, ((2.0, 3, 0),)) == PenaltyFactors(alpha=1.0, beta=1.0)
    assert factors(MILD, ((-2.0, 3, 0),)) == PenaltyFactors(alpha=1.0, beta=1.0)
    assert factors(MILD, ()) == PenaltyFactors(alpha=1.0, beta=1.0)


def test_of_sources_that_differ_each_has_its_kappa_and_the_tightest_limits_hold() -> None:
    strict = Weighing(kappa=3.0, alpha_max=1.1, beta_min=0.2)
    found = batch_factors([Part(MILD, 1.0, 5, 5), Part(MILD, -1.0, 1, 9), Part(strict, -1.0, 2, 8)])
    assert found.alpha == 1.1
    assert found.beta == pytest.approx(1 - (1 * 1 + 2 * 2) / 17, abs=1e-12)


@given(
    parts=st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 40), st.integers(1, 40)), max_size=12),
    kappa=st.floats(1.01, 3),
)
def test_where_nothing_is_clipped_the_masses_of_both_signs_are_conserved(
    parts: list[tuple[float, int, int]], kappa: float
) -> None:
    given_ = Weighing(kappa=kappa, alpha_max=1e3, beta_min=0.0)
    found = factors(given_, tuple(parts))
    if found.alpha == 1e3 or found.beta == 0:
        return
    for sign in (1, -1):
        before = math.fsum(a * (h + c) for a, h, c in parts if a * sign > 0)
        after = math.fsum(
            a * (h * factors_of(given_, a, found).flagged + c * factors_of(given_, a, found).others)
            for a, h, c in parts
            if a * sign > 0
        )
        assert after == pytest.approx(before, rel=1e-9, abs=1e-12)


def test_what_the_factors_of_a_batch_mean_for_a_sequence() -> None:
    batch = PenaltyFactors(alpha=1.5, beta=0.25)
    assert factors_of(MILD, 0.1, batch) == Factors(0.0, 1.5)
    assert factors_of(MILD, -0.1, batch) == Factors(2.0, 0.25)
    assert factors_of(MILD, 0.0, batch) == NO_FACTORS


def test_rules_compose_in_the_order_of_the_configuration_and_a_mask_wins() -> None:
    def one(*penalties: Penalty, factors: Factors = NO_FACTORS) -> Change:
        (found,) = changes(context(4, [(1, 3)], [(0, 4, 0xFFFF)]), penalties, factors)
        return found

    assert one(SCALE, SUBTRACT) == Change(1, 3, 0.5, -3.0, True, False)
    assert one(SUBTRACT, SCALE) == Change(1, 3, 0.5, -1.5, True, False)
    assert one(SCALE, SET, SUBTRACT) == Change(1, 3, 0.0, -5.0, True, False)
    assert one(SUBTRACT, SET) == Change(1, 3, 0.0, -2.0, True, False)
    assert not one(SET, MASK, SCALE).keep
    assert one(SUBTRACT, WEIGH, factors=Factors(2.0, 0.5)) == Change(1, 3, 2.0, -6.0, True, True)
    # Eq. 5 is one step, however many rules weigh.
    assert one(WEIGH, WEIGH, factors=Factors(2.0, 0.5)) == Change(1, 3, 2.0, 0.0, True, True)
    assert changes(context(4, [(1, 3)], [(0, 4, 1)]), [MONITOR]) == []


SPANS = st.lists(st.integers(0, 16), unique=True, max_size=10).map(
    lambda cuts: [(a, b) for a, b in zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False)]
)


@given(
    loss=SPANS,
    flagged=SPANS,
    rules=st.lists(st.integers(1, 31), min_size=8, max_size=8),
    penalties=st.lists(st.sampled_from([MASK, SCALE, SET, SUBTRACT, MONITOR, WEIGH]), max_size=5),
    advantage=st.sampled_from([1.5, -2.0, 0.0]),
    of=st.sampled_from([NO_FACTORS, Factors(0.0, 1.25), Factors(2.0, 0.75)]),
)
def test_every_token_has_what_a_plain_loop_over_the_rules_gives_it(
    loss: list[tuple[int, int]],
    flagged: list[tuple[int, int]],
    rules: list[int],
    penalties: list[Penalty],
    advantage: float,
    of: Factors,
) -> None:
    flags = [(a, b, bits) for (a, b), bits in zip(flagged, rules, strict=False)]
    meta = context(16, loss, flags)
    weighs = [i for i, penalty in enumerate(penalties) if penalty.strategy == "weigh"]
    others = of.others if weighs else 1.0
    expected: dict[int, float | None] = {}
    weighed = 0
    for token in (t for a, b in loss for t in range(a, b)):
        bits = sum(rules for a, b, rules in flags if a <= token < b)
        hit = any(bits >> i & 1 for i in weighs)
        value, keep = advantage, True
        for i, penalty in enumerate(penalties):
            if i in weighs[:1]:
                value *= of.flagged if hit else of.others
            if not bits >> i & 1:
                continue
            keep = keep and penalty.strategy != "mask"
            match penalty.strategy:
                case "scale":
                    value *= penalty.value
                case "set":
                    value = penalty.value
                case "subtract":
                    value -= penalty.value
                case _:
                    pass
        expected[token] = value if keep else None
        weighed += keep and hit
    found: dict[int, float | None] = {t: advantage * others for a, b in loss for t in range(a, b)}
    last = 0
    for change in changes(meta, penalties, of):
        assert last <= change.start < change.end
        last = change.end
        for token in range(change.start, change.end):
            assert token in found
            found[token] = change.multiply * advantage + change.add if change.keep else None
    assert found == pytest.approx(expected)
    surviving = sum(value is not None for value in expected.values())
    assert counts(meta, penalties) == Counts(surviving, weighed, surviving - weighed)


def test_the_hook_is_found_without_importing_any_other_and_changes_nothing_itself() -> None:
    weighs = {"kind": "segment_penalty", "options": {"kappa": 3.0}}
    assert weighing(source({"kind": "no.such.module:Hook"}, weighs)) == Weighing(kappa=3.0)
    assert weighing(source({"kind": "grpo"})) is None
    assert chain(source({"kind": "grpo"}, weighs)).pure
    for wrong in ({"kappa": 1.0}, {"alpha_max": 0.9}, {"beta_min": -0.1}, {"beta_min": 1.1}, {"gamma": 1}):
        with pytest.raises(ValidationError):
            resolve("segment_penalty", wrong)
    assert isinstance(resolve("segment_penalty"), SegmentPenalty)
