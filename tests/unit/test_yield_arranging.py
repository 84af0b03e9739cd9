"""Where contexts go: capacity, numbers, sizes and order, against brute force and the published bounds."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batch.arranging import Arrangement, arrange, budget_fault, capacity, fit, longest
from pipeline.batch.balance import cost
from pipeline.batch.layouts import LAYOUTS, pack_bounds, padded_length
from schemas.config import Batch

BATCHES = st.builds(
    Batch,
    dp=st.integers(1, 3),
    cp=st.sampled_from([1, 2, 3, 4, 6, 8]),
    tp=st.integers(1, 2),
    vpp=st.integers(1, 3),
    layout=st.sampled_from(sorted(LAYOUTS)),
    adaptive_cp=st.booleans(),
    token_budget=st.integers(4096, 6000),
    order=st.sampled_from(["small_ends", "descending"]),
)


def packs_of(found: Arrangement, batch: Batch) -> dict[tuple[int, int, int], list[int]]:
    packs: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i, place in enumerate(zip(found.dp, found.microbatch, found.group, strict=True)):
        packs[place].append(i)
    return packs


def costs_of(lengths: list[int], found: Arrangement, batch: Batch) -> np.ndarray[Any, Any]:
    """[micro-batch, dp]: what each takes, in 1 / cp of a context's cost."""
    out = np.zeros((len(found.sizes), batch.dp), np.int64)
    for (dp, number, _), pack in packs_of(found, batch).items():
        size = found.sizes[number]
        padded = [padded_length(batch.layout, lengths[i], size, batch.tp, batch.fp8) for i in pack]
        spent = sum(cost(n, size) for n in padded) * (batch.cp // size)
        out[number, dp] = max(out[number, dp], spent)
    return out


@given(batch=BATCHES, data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_context_has_one_place_in_which_it_fits(batch: Batch, data: st.DataObject) -> None:
    limit = longest(batch, batch.cp)
    few = st.integers(1, limit) | st.integers(1, min(limit, 300))
    lengths = data.draw(st.lists(few, max_size=40))
    found = arrange(lengths, batch)
    count = len(found.sizes)
    assert count
    assert count % batch.vpp == 0
    assert len(found.dp) == len(found.microbatch) == len(found.group) == len(lengths)
    assert all(batch.cp % size == 0 for size in found.sizes)
    assert batch.adaptive_cp or set(found.sizes) == {batch.cp}
    used = sorted(set(found.sizes))
    for (dp, number, group), pack in packs_of(found, batch).items():
        size = found.sizes[number]
        assert 0 <= dp < batch.dp
        assert 0 <= number < count
        assert 0 <= group < batch.cp // size
        whole = pack_bounds(batch.layout, [lengths[i] for i in pack], size, batch.tp, batch.fp8)
        assert whole.total <= batch.token_budget * size // batch.cp, "with the layout's own tail"
        for i in pack:
            # A context is in a larger size only where it fits none of the smaller ones that there are.
            assert not [s for s in used if s < size and lengths[i] <= longest(batch, s)]
    maxima = costs_of(lengths, found, batch).max(axis=1)
    rises = np.sign(np.diff(maxima[maxima > 0]))
    if batch.order == "descending":
        assert np.all(rises <= 0)
    else:
        falls = np.flatnonzero(rises < 0)
        assert not len(falls) or np.all(rises[falls[0] :] <= 0), "costs ascend and then descend"


@given(batch=BATCHES.filter(lambda b: b.adaptive_cp and b.cp > 1), data=st.data())
@settings(max_examples=60, deadline=None)
def test_smaller_sizes_are_used_only_where_they_make_the_step_shorter(
    batch: Batch, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, longest(batch, batch.cp)), min_size=1, max_size=30))
    plain = batch.model_copy(update={"adaptive_cp": False})
    took = costs_of(lengths, arrange(lengths, batch), batch).max(axis=1).sum()
    before = costs_of(lengths, arrange(lengths, plain), plain).max(axis=1).sum()
    assert took <= before
    if set(arrange(lengths, batch).sizes) != {batch.cp}:
        assert took < before


def test_short_contexts_share_a_micro_batch_and_a_long_one_has_all_ranks() -> None:
    batch = Batch(dp=1, cp=4, layout="megatron", adaptive_cp=True, token_budget=4096)
    found = arrange([4000, *[900] * 8], batch)
    assert sorted(found.sizes) == [1, 1, 4]
    assert found.sizes[found.microbatch[0]] == 4
    groups = {(n, g) for n, g in zip(found.microbatch[1:], found.group[1:], strict=True)}
    assert len(groups) == 8, "900 of 1024 tokens: one a pack, four packs a micro-batch"
    first = batch.model_copy(update={"order": "descending"})
    assert arrange([4000, *[900] * 8], first).sizes == [4, 1, 1], "over all sizes"
    # With long ones alone nothing is to be had.
    assert set(arrange([4000, 3000], batch).sizes) == {4}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_longest_context_is_the_longest_that_a_pack_of_its_own_holds(layout: Any) -> None:
    batch = Batch(cp=4, tp=2, layout=layout, token_budget=5000)
    for size in (1, 2, 4):
        limit = longest(batch, size)
        assert pack_bounds(layout, [limit], size, 2).total <= 5000 * size // 4
        assert pack_bounds(layout, [limit + 1], size, 2).total > 5000 * size // 4
    assert fit(batch) == (longest(batch, 4), "reject")


def test_fp8_pads_packs_further_and_is_inside_the_budget() -> None:
    batch = Batch(cp=2, tp=1, layout="megatron", fp8=True, token_budget=5000)
    assert capacity(batch, 2) == 4608, "a multiple of 128 times 2 cp"
    assert pack_bounds("megatron", [longest(batch, 2)], 2, 1, fp8=True).total <= 5000


def test_no_context_fits_a_budget_below_the_layouts_least_pack() -> None:
    batch = Batch(cp=4, tp=2, layout="slime", token_budget=1000)
    assert longest(batch, 4) == 0
    with pytest.raises(ValueError, match="item 0 has 8 tokens; a micro-batch holds 1 to 0"):
        arrange([1], batch)


def test_a_budget_that_padding_makes_too_small_is_named_with_what_is_needed() -> None:
    batch = Batch(cp=4, tp=2, layout="slime", token_budget=1500)
    said = budget_fault(batch, 1500)
    assert said is not None
    assert "holds a context of 1024 tokens at most" in said
    assert "raise it to 2048, or set batch.overlong" in said
    assert budget_fault(batch.model_copy(update={"token_budget": 2048}), 1500) is None
    drops = batch.model_copy(update={"overlong": "drop"})
    assert budget_fault(drops, 1500) is None
    assert "holds a context of 0 tokens" in (
        budget_fault(drops.model_copy(update={"token_budget": 1000}), 1500) or ""
    )
    assert budget_fault(Batch(), 4096) is None


def test_a_large_batch_over_context_parallel_ranks_is_near_its_bounds() -> None:
    """25,088 contexts, of 114 Ki tokens in the mean and 1 Mi at most, over 32 data-parallel ranks."""
    batch = Batch(dp=32, cp=16, layout="megatron", token_budget=1 << 20)
    drawn = np.random.default_rng(0).lognormal(11.2, 0.95, 25_088)
    lengths = [int(n) for n in np.clip(drawn, 64, longest(batch, 16))]
    found = arrange(lengths, batch)
    costs = costs_of(lengths, found, batch)
    assert len(found.sizes) * 32 < -(-sum(lengths) // (1 << 20)) + 32 + 8, (
        "no more than a multiple of dp asks for"
    )
    assert costs.sum(axis=0).max() * 32 / costs.sum() < 1.002
    assert costs.max(axis=1).sum() * 32 / costs.sum() < 1.0215
