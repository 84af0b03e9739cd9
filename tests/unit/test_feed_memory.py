"""What is said of a window's size before there is one, against the windows that there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batch.layouts import pack_bounds
from pipeline.batch.windows import PACKED
from pipeline.feed.memory import largest_rows, largest_window, token_bytes, too_small
from schemas.config import Batch, Packer
from schemas.parallel import LayoutName


def test_a_token_takes_what_its_stage_has() -> None:
    whole = sum(np.dtype(dtype).itemsize for dtype in PACKED.values())
    assert [token_bytes(pp, 1) for pp in range(1)] == [whole]
    # Tokens and position ids; position ids; position ids and what belongs to the loss.
    assert [token_bytes(pp, 3) for pp in range(3)] == [16, 8, whole - 8]


@settings(max_examples=60)
@given(
    st.sampled_from(["contiguous", "megatron", "verl", "slime", "ulysses", "zigzag_pack", "slime_allgather"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(64, 2000),
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
)
def test_no_pack_within_the_budget_is_larger(
    layout: LayoutName, cp: int, tp: int, budget: int, lengths: list[int]
) -> None:
    batch = Batch(layout=layout, cp=cp, tp=tp, token_budget=budget)
    packed: list[int] = []
    for length in lengths:
        bounds = pack_bounds(layout, [*packed, length], cp, tp)
        # The budget counts the padding of sequences, not the tail that makes the pack even.
        if sum(bounds.padded[: len(packed) + 1]) <= budget:
            packed.append(length)
    assert pack_bounds(layout, packed, cp, tp).total // cp <= largest_rows(batch)


def test_memory_that_is_too_small_is_told_with_the_number_that_is_enough() -> None:
    batch = Batch(dp=1, cp=2, tp=2, pp=2, layout="megatron", token_budget=100_003)
    needed = largest_window(batch, range(2))
    assert needed == 100_000 // 2 * 36
    assert too_small(batch, Packer(memory_bytes=needed)) is None
    said = too_small(batch, Packer(memory_bytes=needed - 1))
    assert said is not None
    assert f"raise it to at least {needed}" in said
    # The first stage has less.
    assert too_small(batch, Packer.model_construct(memory_bytes=needed - 1), pp=0) is None


@pytest.mark.parametrize(("share", "sequences", "allowed"), [(0.1, 6, 1), (0.1, 45, 4), (0.0, 45, 0), (1.0, 3, 3)])  # fmt: skip
def test_a_batch_may_lose_its_share_and_one_at_least(share: float, sequences: int, allowed: int) -> None:
    from services.packer.steps import Revision, Step, too_many

    step = Step.__new__(Step)
    step.sequences, step.found = sequences, {f"s{i}": f"damage {i}" for i in range(allowed)}
    packer = Packer(quarantine=share)
    assert too_many(packer, 7, step, Revision(1, frozenset(step.found))) is None
    # One more, of which another packer has told.
    said = too_many(packer, 7, step, Revision(2, frozenset({"other"})))
    assert said is not None
    assert f"step 7 has lost {allowed + 1} of its {sequences} sequences" in said
    assert f"allows {allowed}:" in said
    assert said.endswith(f"the last: damage {allowed - 1}" if allowed else "start the packer again")
