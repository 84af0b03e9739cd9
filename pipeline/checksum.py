"""CRC32C (Castagnoli), in hardware, without copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import google_crc32c
import numpy as np

# The extension has no types, and takes arrays but no memoryviews.
_value = cast("Callable[[Any], int]", google_crc32c.value)  # pyright: ignore[reportUnknownMemberType]  # as said


def crc32c(data: bytes | memoryview) -> int:
    """Checksum of the bytes; `data` is contiguous, of itemsize 1."""
    return _value(np.frombuffer(data, np.uint8)) if len(data) else 0
