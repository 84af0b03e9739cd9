"""Images in requests, as bytes inside the body: base64 or a data: URL. Nothing is ever fetched.

Promises: an image is what its bytes say it is (magic number: PNG, JPEG, GIF, WebP), whatever type the request declares;
its digest is the SHA-256 of the bytes; anything else is a `BadRequest` that names the place, the value and the limit.
"""

from __future__ import annotations

import binascii
import hashlib
import re

from pipeline.capture.call import BadRequest
from pipeline.capture.messages import Image

MAX_IMAGES = 512
"""Most images of one request: an agent that takes screenshots sends all of its history's with every turn."""
MAX_IMAGE_BYTES = 16 << 20
"""Largest image, decoded. All of them together are bounded by the body's own limit."""

# The type that is declared may be anything: the bytes decide.
_DATA_URL = re.compile(r"data:[^,]{0,256}?;base64,", re.IGNORECASE)
_URL_SHOWN = 60


class ImageIntake:
    """Takes the images of one request, within the limits."""

    def __init__(self) -> None:
        self._taken = 0

    def url(self, url: str, where: str) -> Image:
        """The image of a data: URL; `where` names the field. Raises BadRequest, for every other URL too."""
        head = _DATA_URL.match(url)
        if head is not None:
            return self.base64(url[head.end() :], where)
        if url[:5].lower() == "data:":
            raise BadRequest(f"{where}: the data: URL is not base64: send data:image/png;base64,...", where)
        shown = url[:_URL_SHOWN] + ("..." if len(url) > _URL_SHOWN else "")
        raise BadRequest(
            f"{where}: {shown!r} is a remote image and nothing is fetched here: send its bytes as base64",
            where,
        )

    def base64(self, text: str, where: str) -> Image:
        """The image that is `text` in base64; `where` names the field. Raises BadRequest."""
        self._taken += 1
        if self._taken > MAX_IMAGES:
            raise BadRequest(f"{where}: more than {MAX_IMAGES} images in one request: send fewer", where)
        if len(text) // 4 * 3 > MAX_IMAGE_BYTES + 2:
            raise BadRequest(
                f"{where}: an image of {len(text) // 4 * 3} bytes is over the limit of {MAX_IMAGE_BYTES}:"
                " send it smaller",
                where,
            )
        try:
            data = binascii.a2b_base64(text, strict_mode=True)
        except (binascii.Error, ValueError) as error:
            raise BadRequest(f"{where}: the image is not base64: {error}", where) from None
        if len(data) > MAX_IMAGE_BYTES:
            raise BadRequest(
                f"{where}: an image of {len(data)} bytes is over the limit of {MAX_IMAGE_BYTES}:"
                " send it smaller",
                where,
            )
        media_type = media_type_of(data)
        if media_type is None:
            raise BadRequest(
                f"{where}: {len(data)} bytes that begin with {data[:8].hex() or 'nothing'} are no PNG, JPEG, GIF or WebP",
                where,
            )
        return Image(hashlib.sha256(data).hexdigest(), media_type, data)


def media_type_of(data: bytes) -> str | None:
    """The type that the bytes' magic number tells; None for none that is supported."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None
