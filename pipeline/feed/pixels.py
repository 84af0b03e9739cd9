"""Images from the store as pixels, straight into the window of the rank that encodes them.

Promises: what is decoded is what was seen: its SHA-256 is the item's digest and its sizes the item's, told by the store before a
byte is fetched and by the header before a pixel is unpacked, so no object becomes larger than it was planned to be; no more than
a few images are held at once beside the window; an object that is not such an image is damaged, by its key.

Pixels are what vLLM's and transformers' processors make of an image before they resize it: RGB; where it is transparent, white
shows; of an animation the first picture; as it is stored, whatever its EXIF says of turning it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.store import ObjectDamaged, ObjectStore
from pipeline.vision.owners import Encode
from schemas.keys import image_key
from schemas.payload import ImageItem

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
AT_ONCE = 4
"""Images that are fetched and decoded at the same time."""


async def fetch_pixels(
    store: ObjectStore, run: str, images: Sequence[Encode], out: NDArray[np.uint8], at_once: int = AT_ONCE
) -> None:
    """Fills `out`, the window's `images.pixels` (flat), of all images but the blank ones. Raises ObjectMissing, ObjectDamaged and
    StoreUnavailable, of the first in order that fails, once none is under way."""
    slots = asyncio.Semaphore(at_once)

    async def one(image: Encode) -> None:
        async with slots:
            key = image_key(run, image.item.digest)
            size = image.item.bytes
            (data,) = await store.get_ranges(key, [(0, size)], size=size)
            place = out[image.start : image.end].reshape(image.shape)
            await asyncio.to_thread(decode, key, data, image.item, place)

    found = await asyncio.gather(*(one(image) for image in images if not image.blank), return_exceptions=True)
    for error in found:
        if error is not None:
            raise error


def decode(key: str, data: bytes | memoryview, item: ImageItem, out: NDArray[np.uint8]) -> None:
    """The image's pixels into `out`, uint8 [height, width, 3]. Raises ObjectDamaged."""
    digest = hashlib.sha256(data).hexdigest()
    if digest != item.digest:
        raise ObjectDamaged(key, f"its SHA-256 is {digest}")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.size != (item.width, item.height):
                raise ObjectDamaged(
                    key,
                    f"it is {image.height} x {image.width} pixels, its item says {item.height} x {item.width}",
                )
            out[:] = np.asarray(_rgb(image))
    except (ObjectDamaged, MemoryError):
        raise
    # Agents show what they like, of which capture has read the header alone: Pillow's readers raise anything over the rest.
    except Exception as error:
        raise ObjectDamaged(key, f"it cannot be decoded: {error!r}") from error


def _rgb(image: Image.Image) -> Any:
    if image.mode == "RGBA":
        # As vLLM's `rgba_to_rgb`.
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")
