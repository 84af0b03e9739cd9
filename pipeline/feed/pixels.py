"""An image from the store as pixels, for the window of the rank that encodes it.

Promises: what is decoded is what was seen: its SHA-256 is the item's digest and its sizes the item's, told by the store before a
byte is fetched and by the header before a pixel is unpacked, so no object becomes larger than it was planned to be; an object that
is not such an image is damaged, by its key.

Pixels are what vLLM's and transformers' processors make of an image before they resize it: RGB; where it is transparent, white
shows; of an animation the first picture; as it is stored, whatever its EXIF says of turning it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.store import ObjectDamaged, ObjectStore
from pipeline.vision.items import FORMATS
from schemas.keys import image_key
from schemas.payload import ImageItem


async def fetch_pixels(store: ObjectStore, run: str, item: ImageItem, out: NDArray[np.uint8]) -> None:
    """The image's pixels into `out`, uint8 [height, width, 3]. Raises ObjectMissing, ObjectDamaged, StoreUnavailable."""
    key = image_key(run, item.digest)
    (data,) = await store.get_ranges(key, [(0, item.bytes)], size=item.bytes)
    await asyncio.to_thread(decode, key, data, item, out)


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
