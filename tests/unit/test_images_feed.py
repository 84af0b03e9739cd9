"""Images on the trainer's side: pixels into the window, and the encoder's output over ranks."""

from __future__ import annotations

import hashlib
import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image as Picture

from pipeline.feed.pixels import decode, fetch_pixels
from pipeline.store import ObjectDamaged, ObjectMissing, ObjectStore
from pipeline.vision.owners import Encode
from schemas.keys import image_key
from schemas.payload import ImageItem


def test_gradients_over_four_ranks_are_those_of_one_computation() -> None:
    """float64, to 1e-12: see `tests.image_ranks`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.image_ranks"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]


def bytes_of(picture: Picture.Image, kind: str = "PNG", **how: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **how)  # pyright: ignore[reportArgumentType]
    return file.getvalue()


def item_of(data: bytes, height: int, width: int) -> ImageItem:
    digest = hashlib.sha256(data).hexdigest()
    return ImageItem(digest=digest, bytes=len(data), height=height, width=width, patches=4, start=0, end=1)


def noise(height: int, width: int, channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def decoded(data: bytes, height: int, width: int) -> np.ndarray:
    out = np.full((height, width, 3), 9, np.uint8)
    decode("k", data, item_of(data, height, width), out)
    return out


def test_pixels_are_rgb_on_white() -> None:
    values = noise(5, 7, 3)
    np.testing.assert_array_equal(decoded(bytes_of(Picture.fromarray(values)), 5, 7), values)
    grey = noise(5, 7, 1)
    found = decoded(bytes_of(Picture.fromarray(grey[:, :, 0])), 5, 7)
    np.testing.assert_array_equal(found, np.repeat(grey, 3, axis=2))
    seen = noise(5, 7, 4)
    seen[..., 3] = np.where(seen[..., 3] > 127, 255, 0)
    expected = np.where(seen[..., 3:] == 255, seen[..., :3], 255)
    np.testing.assert_array_equal(decoded(bytes_of(Picture.fromarray(seen)), 5, 7), expected)


def test_the_first_picture_of_an_animation_is_shown() -> None:
    first, second = (Picture.new("RGB", (6, 4), color) for color in ("red", "blue"))
    data = bytes_of(first, "GIF", save_all=True, append_images=[second])
    np.testing.assert_array_equal(decoded(data, 4, 6), np.broadcast_to(np.asarray([255, 0, 0]), (4, 6, 3)))


async def test_images_come_to_their_places_and_blank_ones_are_not_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ObjectStore.in_memory()
    images: list[Encode] = []
    expected: list[np.ndarray] = []
    for i, (height, width) in enumerate([(3, 5), (1, 1), (40, 30), (2, 9), (8, 8)]):
        values = noise(height, width, 3, i)
        data = bytes_of(Picture.fromarray(values))
        item, start = item_of(data, height, width), images[-1].end if images else 0
        blank = i == 3
        if not blank:
            await store.create(image_key("r", item.digest), data)
        images.append(Encode(item, start, start + values.size, blank))
        expected.append(np.zeros_like(values) if blank else values)
    out = np.zeros(images[-1].end, np.uint8)
    for each in images:
        if not each.blank:
            await fetch_pixels(store, "r", each.item, out[each.start : each.end].reshape(each.shape))
    np.testing.assert_array_equal(out, np.concatenate([each.ravel() for each in expected]))
    with pytest.raises(ObjectMissing) as missing:
        await fetch_pixels(store, "r", images[3].item, np.zeros(images[3].shape, np.uint8))
    assert missing.value.key == image_key("r", images[3].item.digest)


async def test_no_more_of_an_object_is_fetched_than_its_item_says() -> None:
    store = ObjectStore.in_memory()
    values = noise(4, 6, 3)
    data = bytes_of(Picture.fromarray(values))
    item = item_of(data, 4, 6)
    await store.create(image_key("r", item.digest), data + bytes(1 << 20))
    scope = store.scope()
    with pytest.raises(ObjectDamaged, match=f"expected {len(data)}"):
        await fetch_pixels(scope, "r", item, np.zeros(values.shape, np.uint8))
    assert scope.counters.bytes_read <= len(data)


def test_whatever_the_decoder_makes_of_hostile_bytes_the_image_is_damaged() -> None:
    """Its header is good, so that agents may show it; what comes after the pixels is not, and Pillow raises IndexError."""
    data = bytes_of(Picture.new("RGB", (6, 4)))
    chunk = b"iCCP" + b"abc\0"
    hostile = data[:-12] + struct.pack(">I", 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[-12:]
    with Picture.open(io.BytesIO(hostile)) as picture:
        assert picture.size == (6, 4)
    with pytest.raises(ObjectDamaged, match="cannot be decoded"):
        decode("k", hostile, item_of(hostile, 4, 6), np.zeros((4, 6, 3), np.uint8))


@pytest.mark.parametrize("what", ["altered", "truncated", "another size", "no image", "a bomb"])
def test_what_is_not_the_image_is_damaged(what: str) -> None:
    data = bytes_of(Picture.fromarray(noise(16, 16, 3)))
    item = item_of(data, 16, 16)
    given = data
    if what == "altered":
        given, told = data[:60] + bytes([data[60] ^ 1]) + data[61:], "its SHA-256 is"
    elif what == "truncated":
        given, told = data[:-30], "cannot be decoded"
        item = item_of(given, 16, 16)
    elif what == "no image":
        given, told = b"BM" + bytes(100), "cannot be decoded"
        item = item_of(given, 16, 16)
    elif what == "another size":
        item, told = item_of(data, 16, 17), "it is 16 x 16 pixels, its item says 16 x 17"
    else:
        # 264 MB of pixels in a few kilobytes, behind an item that says 16 x 16.
        given, told = (
            bytes_of(Picture.new("1", (8_000, 11_000))),
            "11000 x 8000 pixels, its item says 16 x 16",
        )
        item = item_of(given, 16, 16)
    with pytest.raises(ObjectDamaged, match=f"object k is damaged: .*{told}"):
        decode("k", given, item, np.zeros((item.height, item.width, 3), np.uint8))
