"""Images in numbers: their size in the encoder, who encodes them, and whose rows its output becomes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.vision.encoder_plan import encoder_plan, lower_bound
from pipeline.vision.items import cost, patches, resized, tokens
from pipeline.vision.owners import CHANNELS, IMAGE_ARRAYS, WindowImages, showing, window_images
from schemas.parallel import LayoutName
from schemas.payload import ContextMeta, ImageItem, PayloadHeader, Span
from schemas.plan import Plan, PlanImages, PlanRows, PlanSequence
from schemas.vision import Vision
from tests.vision_parts import a_plan, an_image, code, dense

QWEN2 = Vision()
QWEN3 = Vision(patch=16, min_pixels=65_536, max_pixels=16_777_216)


# Worked by hand from the rule: sides in multiples of 28 (32), the area within the limits, halves to even.
@pytest.mark.parametrize(
    ("height", "width", "vision", "size", "rows"),
    [
        (28, 56, QWEN2, (56, 84), 6),
        (224, 224, QWEN2, (224, 224), 64),
        (480, 640, QWEN2, (476, 644), 391),
        (1080, 1920, QWEN2, (728, 1316), 1222),
        (1000, 10, QWEN2, (560, 28), 20),  # a side that rounds to 0: the area is below the limit
        (42, 1000, QWEN2, (56, 1008), 72),
        (70, 1000, QWEN2, (56, 1008), 72),
        (98, 1000, QWEN2, (112, 1008), 144),
        (20_000, 100, QWEN2, (14_140, 56), 1010),
        (1, 1, QWEN2, (56, 56), 4),
        (768, 1024, QWEN3, (768, 1024), 768),
        (100, 100, QWEN3, (256, 256), 64),
    ],
)
def test_sizes(height: int, width: int, vision: Vision, size: tuple[int, int], rows: int) -> None:
    assert resized(height, width, vision) == size
    assert tokens(height, width, vision) == rows
    assert patches(height, width, vision) == rows * vision.merge**2


@pytest.mark.parametrize(("height", "width"), [(201, 1), (1, 20_001), (0, 5)])
def test_what_the_processor_refuses_is_refused(height: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"{height} x {width} pixels"):
        resized(height, width, QWEN2)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_sides_are_multiples_and_the_area_is_within_the_limits(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    high, wide = resized(height, width, QWEN2)
    assert high % 28 == wide % 28 == 0
    assert high * wide >= QWEN2.min_pixels
    # An extreme image has one side of 28 whatever the limit.
    assert high * wide <= QWEN2.max_pixels or min(high, wide) == 28


def best(weights: list[int], ranks: int) -> float:
    return min(
        max(sum(w for w, r in zip(weights, where, strict=True) if r == rank) for rank in range(ranks))
        for where in itertools.product(range(ranks), repeat=len(weights))
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 3))
def test_the_encoder_plan_is_near_the_best(sizes: list[int], ranks: int) -> None:
    round_ = [an_image(i, rows) for i, rows in enumerate(sizes)]
    found = encoder_plan([round_], ranks, 1.0, 0.0)
    assert found is not None
    weights = [4 * rows for rows in sizes]
    loads = [0.0] * ranks
    for digest, encoder in zip(found.digest, found.encoder, strict=True):
        loads[encoder] += weights[int(digest, 16)]
    optimum = best(weights, ranks)
    assert lower_bound(weights, ranks) <= optimum <= max(loads) <= (4 / 3 - 1 / (3 * ranks)) * optimum + 1e-9


def test_the_lower_bound() -> None:
    assert lower_bound([], 4) == 0
    assert lower_bound([9, 1, 1], 2) == 9
    assert lower_bound([5, 5, 5, 5], 3) == 10 > 20 / 3
    assert lower_bound([5, 5, 5, 1], 3) == 6
    assert lower_bound([4, 4, 4, 4], 2) == 8


def test_duplicates_are_encoded_once_and_order_does_not_matter() -> None:
    rng = random.Random(3)
    rounds = [[an_image(rng.randrange(9), start=5 * i) for i in range(20)] for _ in range(4)]
    found = encoder_plan(rounds, 3, 1.0, 0.001)
    assert found is not None
    for number, round_ in enumerate(rounds):
        mine = [d for m, d in zip(found.microbatch, found.digest, strict=True) if m == number]
        assert sorted(mine) == sorted({image.digest for image in round_})
    assert encoder_plan([rng.sample(r, len(r)) for r in rounds], 3, 1.0, 0.001) == found
    assert list(found.microbatch) == sorted(found.microbatch)
    assert encoder_plan([[], []], 3, 1.0, 0.001) is None


def test_lonely_images_are_spread_over_the_rounds() -> None:
    found = encoder_plan([[an_image(i)] for i in range(8)], 4, 1.0, 0.0)
    assert found is not None
    assert Counter(found.encoder) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_frames_attend_to_themselves_only() -> None:
    assert cost(an_image(0, 16, frames=4), 1, 0.5) == 64 + 0.5 * 4 * 16**2
    assert cost(an_image(0, 16), 1, 0.5) == 64 + 0.5 * 64**2


def test_one_image_of_two_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="two sizes in micro-batch 1"):
        encoder_plan([[an_image(1)], [an_image(1), an_image(1, rows=5)]], 2, 1.0, 0.0)


def embeddings(window: WindowImages) -> np.ndarray:
    return np.asarray(
        [code(each.item.digest, row) for each in window.encode for row in range(each.rows)], np.int64
    )


@settings(deadline=None, max_examples=120)
@given(st.integers(0, 2**32), st.sampled_from(get_args(LayoutName)))
def test_every_placeholder_is_filled_once_with_its_own_row(seed: int, layout: LayoutName) -> None:
    rng = random.Random(seed)
    plan = a_plan(rng, layout)
    ranks = [(dp, cp) for dp in range(plan.dp) for cp in range(plan.cp)]
    for microbatch in range(plan.microbatches):
        # Ranks may have been built with different revisions.
        without = [frozenset(rng.sample(["q0", "q1", "q2"], rng.randrange(3))) for _ in ranks]
        windows = [
            window_images(plan, dp, microbatch, cp, out) for (dp, cp), out in zip(ranks, without, strict=True)
        ]
        if any(window is None for window in windows):
            assert not any(windows)
            for dp, cp in ranks:
                assert not dense(plan, dp, microbatch, cp, frozenset()).any()
            continue
        found = [(window, window.arrays()) for window in windows if window is not None]
        sent = []
        for window, arrays in found:
            assert {name: arrays[name].shape for name in arrays} | {
                "images.pixels": (window.pixel_bytes,)
            } == window.shapes()
            assert window.shapes().keys() == IMAGE_ARRAYS.keys()
            ends = np.cumsum(arrays["images.send_counts"])[:-1]
            sent.append(np.split(embeddings(window)[arrays["images.send"]], ends))
        for o, (_, arrays) in enumerate(found):
            assert arrays["images.receive_counts"].tolist() == [len(parts[o]) for parts in sent]
            received = np.concatenate([parts[o] for parts in sent])
            assert len(np.unique(received)) == len(received), "a row comes once"
            expected = dense(plan, ranks[o][0], microbatch, ranks[o][1], without[o])
            filled = np.zeros_like(expected)
            assert (np.diff(arrays["images.local"]) > 0).all(), "no row is filled twice"
            filled[arrays["images.local"]] = received[arrays["images.take"]]
            np.testing.assert_array_equal(filled, expected)
        every = [each.item.digest for window, _ in found for each in window.encode]
        assert len(set(every)) == len(every), "an image is encoded once in a round"


def a_small_plan(contexts: dict[str, tuple[ImageItem, ...]], tokens: int = 12) -> Plan:
    """A pack of one context a sequence, all in one window of dp 1, cp 2."""
    made = {
        name: ContextMeta(
            offset=0, tokens=tokens, generated=1, loss_spans=(Span(start=11, end=12),), min_version=0, max_version=0, images=images,
        )
        for name, images in contexts.items()
    }  # fmt: skip
    header = PayloadHeader(key="runs/r/payloads/s/p.safetensors", bytes=0, columns=())
    count = len(made)
    none = (0,) * count
    return Plan(
        run="r", step=1, policy_version=0, dp=1, cp=2, layout="megatron", microbatches=1, token_budget=10**6, loss_tokens=0,
        sequences=tuple(
            PlanSequence(source="s", sample="m", sequence=name, payload=header, contexts=(context,))
            for name, context in made.items()
        ),
        rows=PlanRows(
            sequence=tuple(range(count)), context=none, dp=none, microbatch=none, advantage=(0.0,) * count,
            loss_weight=(0.0,) * count,
        ),
        images=encoder_plan([[image for images in contexts.values() for image in images]], 2, 1.0, 0.0),
    )  # fmt: skip


def test_an_image_straddles_ranks_and_its_rows_go_once_to_each() -> None:
    # 12 rows by zigzag over 2 ranks: rank 0 has [0, 3) and [9, 12), rank 1 [3, 9). Both contexts show the image at 1..5.
    plan = a_small_plan({"a": (an_image(1, 4, 1),), "b": (an_image(1, 4, 1),)})
    zero, one = (window_images(plan, 0, 0, cp) for cp in (0, 1))
    assert zero is not None
    assert one is not None
    assert zero.arrays()["images.send"].tolist() == [0, 1, 2, 3]
    assert zero.arrays()["images.send_counts"].tolist() == [2, 2]
    assert zero.arrays()["images.local"].tolist() == [1, 2, 7, 8]
    assert zero.arrays()["images.take"].tolist() == [0, 1, 0, 1]
    assert one.arrays()["images.receive_counts"].tolist() == [2, 0]
    assert one.arrays()["images.local"].tolist() == [0, 1, 6, 7]
    assert one.encode == ()
    assert [(each.first, each.end, each.dst) for each in one.pieces] == [(2, 4, 0), (2, 4, 6)]


def test_an_image_that_only_left_out_rows_show_is_not_fetched_and_keeps_its_place() -> None:
    plan = a_small_plan({"a": (an_image(1, 4, 1, side=3),), "b": (an_image(2, 3, 1, side=2),)})
    whole, left = (window_images(plan, 0, 0, 0, out) for out in ((), ("a",)))
    assert whole is not None
    assert left is not None
    assert [each.blank for each in whole.encode] == [False]
    assert [(each.item.digest, each.blank, each.shape) for each in left.encode] == [
        (f"{1:064x}", True, (3, 4, CHANNELS))
    ]
    assert left.shapes()["images.pixels"] == (36,)
    np.testing.assert_array_equal(left.arrays()["images.send"], whole.arrays()["images.send"])
    np.testing.assert_array_equal(
        left.arrays()["images.receive_counts"], whole.arrays()["images.receive_counts"]
    )
    assert left.arrays()["images.local"].tolist() == [7, 8]


def test_who_shows_an_image() -> None:
    plan = a_small_plan({"a": (an_image(1),), "b": (an_image(2),), "c": (an_image(1), an_image(2, start=5))})
    one, two = f"{1:064x}", f"{2:064x}"
    assert showing(plan) == {one: (0, 2), two: (1, 2)}
    # What is cut off, or is no row at all, shows nothing.
    cut = plan.rows.model_copy(update={"skip": (3, 4, 4)})
    assert showing(plan.model_copy(update={"rows": cut})) == {one: (0,), two: (2,)}


@pytest.mark.parametrize(
    ("digests", "message"),
    [
        ([], "00000001 of micro-batch 0 is shown, and nobody encodes it"),
        ([1, 7], "7 of micro-batch 0 is encoded, and no"),
    ],
)
def test_a_plan_that_does_not_say_who_encodes_is_refused(digests: list[int], message: str) -> None:
    plan = a_small_plan({"a": (an_image(1),)})
    names = tuple(f"{digest:064x}" for digest in digests)
    images = PlanImages(microbatch=(0,) * len(names), digest=names, encoder=(0,) * len(names))
    with pytest.raises(ValueError, match=message):
        window_images(plan.model_copy(update={"images": images}), 0, 0)
