"""From flags and penalties to the arrays of a rank: what the configuration says of a token is what it is trained with."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batch.windows import plan_window
from pipeline.signal.penalties import Factors, changes
from schemas.payload import ContextMeta, Flag
from schemas.signal import Penalty
from tests.window_parts import Change, context, key_of, packed, plan_of, sequence, sidecar_of

PENALTIES = st.lists(
    st.builds(
        Penalty,
        rule=st.just("garbled"),
        strategy=st.sampled_from(["monitor", "mask", "scale", "set", "subtract", "weigh"]),
        value=st.sampled_from([-2.0, 0.0, 0.5, 3.0]),
    ),
    min_size=1,
    max_size=4,
).map(tuple)


def flagged(plain: ContextMeta, rules: list[int]) -> ContextMeta:
    """The context with the bitset of each of its tokens, 0 for none; the flags of neighbours are one."""
    flags: list[Flag] = []
    for t, bits in enumerate(rules):
        if bits and flags and (flags[-1].end, flags[-1].rules) == (t, bits):
            flags[-1] = Flag(start=flags[-1].start, end=t + 1, rules=bits)
        elif bits:
            flags.append(Flag(start=t, end=t + 1, rules=bits))
    return plain.model_copy(update={"flags": tuple(flags)})


def by_the_token(
    advantage: float, bits: int, penalties: tuple[Penalty, ...], factors: Factors
) -> float | None:
    """The advantage of a loss token, rule by rule; None where it is not trained."""
    weighs = [i for i, penalty in enumerate(penalties) if penalty.strategy == "weigh"]
    masked = False
    for i, penalty in enumerate(penalties):
        if weighs[:1] == [i]:
            advantage *= factors.flagged if any(bits >> w & 1 for w in weighs) else factors.others
        if bits >> i & 1:
            masked |= penalty.strategy == "mask"
            if penalty.strategy == "scale":
                advantage *= penalty.value
            elif penalty.strategy == "set":
                advantage = penalty.value
            elif penalty.strategy == "subtract":
                advantage -= penalty.value
    return None if masked else advantage


@given(data=st.data(), penalties=PENALTIES, by_token=st.booleans())
def test_a_token_is_trained_with_what_the_penalties_make_of_it(
    data: st.DataObject, penalties: tuple[Penalty, ...], by_token: bool
) -> None:
    weighed = any(penalty.strategy == "weigh" for penalty in penalties)
    factors = Factors(0.0, 1.5) if weighed else Factors(1.0, 1.0)
    mask = [0, *data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))]
    # A few bitsets only, so that they last for several tokens.
    bits = st.sampled_from(
        [0, 0, 1, (1 << len(penalties)) - 1, data.draw(st.integers(0, (1 << len(penalties)) - 1))]
    )
    rules = data.draw(st.lists(bits, min_size=len(mask), max_size=len(mask)))
    whole = flagged(context(0, mask), rules)
    given = np.array([1.0 + t if by_token else 2.0 for t in range(len(mask))], np.float32)

    found: list[Change] = [
        (0, c.start, c.end, c.multiply, c.add, c.keep) for c in changes(whole, penalties, factors)
    ]
    plan = plan_of([sequence("s-0", [whole], by_token)], [(0, 0, 0, 0, 2.0, 1.0)], found, (factors.others,))
    columns = {
        "tokens": np.arange(len(mask), dtype=np.int32),
        "loss_mask": np.array(mask, np.uint8),
        "logprobs": np.zeros(len(mask), np.float32),
        "policy_version": np.zeros(len(mask), np.int32),
    }
    sidecar = {"advantages": given[np.array(mask, np.bool_)]}
    got = packed(plan_window(plan, 0, 0), {key_of("s-0"): columns, sidecar_of("s-0"): sidecar})

    expected = [
        by_the_token(float(given[t]), rules[t], penalties, factors) if mask[t] else None
        for t in range(len(mask))
    ]
    assert got["loss_mask"].tolist() == [float(a is not None) for a in expected[1:]] + [0]
    np.testing.assert_allclose(got["advantages"], [*(a or 0 for a in expected[1:]), 0], rtol=1e-6)
    assert (got["loss_weights"] > 0).tolist() == (got["loss_mask"] > 0).tolist()
