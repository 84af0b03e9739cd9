"""Routed experts as engines send them, to rows of the narrowest type that holds them.

vLLM sends base64 of a `.npy` file, uint8, uint16 or int32; SGLang base64 of raw int32 without a header. Pure, and made
for a worker thread: base64 is decoded in slices, as one call over tens of megabytes would hold up the event loop for as
long as it lasts.
"""

from __future__ import annotations

import binascii
import io
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pipeline.engines.progress import BadAnswer, Rows

_SLICE = 1 << 20
"""Characters of base64 in one call: about a millisecond. A multiple of four."""
_HEADER = 1 << 12
"""Bytes that the head of a .npy file fits into."""


def from_npy(text: bytes | memoryview) -> Rows:
    """Rows [rows, layers, k] of vLLM's answer. Raises BadAnswer."""
    raw = _decoded(text)
    head = io.BytesIO(raw[:_HEADER])
    try:
        version = np.lib.format.read_magic(head)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = read(head)
        if fortran or dtype.hasobject:
            raise ValueError(f"{dtype} in Fortran order: {fortran}")
        # Not read_array, which copies.
        array = np.frombuffer(raw, dtype, offset=head.tell()).reshape(shape)
    except (ValueError, EOFError) as error:
        raise BadAnswer(f"routed experts that are no .npy file: {error}") from error
    if array.ndim != 3:
        raise BadAnswer(f"routed experts of shape {array.shape}, not [rows, layers, k]")
    return narrowed(array)


def from_raw(text: bytes | memoryview, rows: int, k: int) -> Rows:
    """Rows [rows, layers, k] of SGLang's answer, which says neither. Raises BadAnswer when the bytes do not divide so."""
    raw = _decoded(text)
    if rows <= 0 or not raw or len(raw) % (4 * rows * k):
        raise BadAnswer(f"{len(raw)} bytes of routed experts, which are not {rows} rows of {k} int32 a layer")
    return narrowed(np.frombuffer(raw, "<i4").reshape(rows, -1, k))


def narrowed(array: npt.NDArray[Any]) -> Rows:
    """uint8 and uint16 as they are; wider integers as uint8 where all fit, else uint16. Raises BadAnswer beyond that."""
    if array.dtype == np.uint8 or array.dtype == np.uint16:
        return cast(Rows, array)
    if array.dtype.kind not in "iu":
        raise BadAnswer(f"routed experts of type {array.dtype}")
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    if low < 0 or high > 0xFFFF:
        raise BadAnswer(f"routed experts from {low} to {high}: ids are 0 to 65535")
    return array.astype(np.uint8) if high <= 0xFF else array.astype(np.uint16)


def _decoded(text: bytes | memoryview) -> bytearray:
    view = memoryview(text)
    out = bytearray()
    try:
        for start in range(0, len(view), _SLICE):
            out += binascii.a2b_base64(view[start : start + _SLICE], strict_mode=True)
    except binascii.Error as error:
        raise BadAnswer(f"routed experts that are not base64: {error}") from error
    return out
