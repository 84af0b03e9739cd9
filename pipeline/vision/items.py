"""An image in numbers: the size that the policy's processor gives it, its patches, its tokens, what encoding it costs. Pure.

The size is by the rule of Qwen2-VL and its successors (`smart_resize` of their image processor in transformers): sides are
multiples of patch * merge, the area is within the limits, the ratio is kept as far as that allows.
"""

from __future__ import annotations

from math import ceil, floor, sqrt
from typing import NamedTuple

from schemas.payload import ContextMeta, ImageItem
from schemas.vision import Vision

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
"""Of images, as Pillow names them: what is taken in is what is decoded."""
MAX_RATIO = 200
"""Of the longer side to the shorter; the rule refuses more."""


class Size(NamedTuple):
    """Of an image: pixels."""

    height: int
    width: int


def resized(height: int, width: int, vision: Vision) -> Size:
    """The size, in pixels, in which the encoder sees an image of that size. Raises ValueError when one side is over MAX_RATIO
    times the other.

    Halves are rounded to even, as Python and so the rule's source does.
    """
    if min(height, width) < 1:
        raise ValueError(f"an image of {height} x {width} pixels: neither side may be below 1")
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(
            f"an image of {height} x {width} pixels: one side is over {MAX_RATIO} times the other, which the policy's processor refuses"
        )
    side = vision.patch * vision.merge
    high, wide = round(height / side) * side, round(width / side) * side
    if high * wide > vision.max_pixels:
        scale = sqrt(height * width / vision.max_pixels)
        high = max(side, floor(height / scale / side) * side)
        wide = max(side, floor(width / scale / side) * side)
    elif high * wide < vision.min_pixels:
        scale = sqrt(vision.min_pixels / (height * width))
        high, wide = ceil(height * scale / side) * side, ceil(width * scale / side) * side
    return Size(high, wide)


def patches(height: int, width: int, vision: Vision) -> int:
    """Patches that the encoder sees of a still image of that size. Raises ValueError as `resized` does."""
    high, wide = resized(height, width, vision)
    return high * wide // vision.patch**2


def tokens(height: int, width: int, vision: Vision) -> int:
    """Rows of the encoder's output for a still image of that size, and so its tokens. Raises ValueError as `resized` does."""
    return patches(height, width, vision) // vision.merge**2


def cost(item: ImageItem, linear: float, quadratic: float) -> float:
    """Of encoding: the frames attend to themselves only, so the quadratic part is over each frame's patches."""
    return linear * item.patches + quadratic * item.patches**2 / item.frames


def shown(context: ContextMeta, skip: int = 0) -> tuple[ImageItem, ...]:
    """The images of which some token is left when the context's first `skip` tokens are left out, in order."""
    return tuple(image for image in context.images if image.end > skip)
