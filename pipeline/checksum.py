"""CRC32C (Castagnoli), in hardware, without copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import google_crc32c
import numpy as np

# The extension has no types, and takes arrays but no memoryviews.
_extend = cast("Callable[[int, Any], int]", google_crc32c.extend)  # pyright: ignore[reportUnknownMemberType]  # as said


def crc32c(data: bytes | memoryview, before: int = 0) -> int:
    """Checksum of the bytes, which is contiguous, of itemsize 1, after those whose checksum is `before`."""
    return _extend(before, np.frombuffer(data, np.uint8)) if len(data) else before
