"""One window in a sealed memfd: a JSON header and 64-byte aligned arrays that nobody can change any more.

Layout: magic, little-endian uint64 length of the header, header (JSON), padding, arrays; offsets count from the first
byte after that padding.

Promises:
- once made, the kernel refuses writes, growth, shrinking and writable shared maps, in every process;
- a reader trusts nothing: an unsealed or malformed file is refused before it is mapped, so no access can fault;
- arrays are views of the shared pages. The memory is freed when the last descriptor and the last map are gone,
  however their owners die.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Array = NDArray[Any]

ALIGN = 64
_MAGIC = b"PKTRAIN1"
_PREFIX = len(_MAGIC) + 8
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_DTYPES = frozenset({"uint8", "uint16", "int32", "int64", "float32"})


class BadWindow(ValueError):
    """A file descriptor that is no sealed window."""


class _ArrayHeader(BaseModel):
    model_config = ConfigDict(extra="forbid")
    dtype: str
    shape: tuple[int, ...]
    offset: int = Field(ge=0)


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid")
    meta: dict[str, Any]
    arrays: dict[str, _ArrayHeader]


class Place(NamedTuple):
    """Of an array: its first byte, from the start of the file, and its form."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Where everything of a window lies; known before a byte of it is fetched."""

    head: bytes
    places: dict[str, Place]
    size: int
    """Bytes of the whole file."""


def plan_layout(meta: Mapping[str, Any], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> Layout:
    """The layout of arrays of (dtype, shape), with `meta` (JSON values) in the header."""
    at = 0
    arrays: dict[str, dict[str, Any]] = {}
    for name, (dtype, shape) in shapes.items():
        arrays[name] = {"dtype": dtype, "shape": shape, "offset": at}
        at = _aligned(at + np.dtype(dtype).itemsize * prod(shape))
    header = orjson.dumps({"meta": meta, "arrays": arrays})
    base = _aligned(_PREFIX + len(header))
    head = (_MAGIC + len(header).to_bytes(8, "little") + header).ljust(base, b"\0")
    places = {name: Place(base + arrays[name]["offset"], *form) for name, form in shapes.items()}
    return Layout(head, places, base + at)


class Draft:
    """A window that is being written: rows of its arrays in any order, from any thread. What is not written is 0."""

    def __init__(self, layout: Layout) -> None:
        """Raises OSError out of descriptors."""
        self._places = layout.places
        self._fd: int | None = os.memfd_create("packtrain-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, layout.size)
            _write(self._fd, layout.head, 0)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, first: int, values: Array) -> None:
        """Writes `values` as rows [first, first + len(values)) of the array; a 0-dimensional one as itself, at 0.

        Raises ValueError on values of another dtype, another row, or outside the array, OSError out of memory.
        """
        place = self._places[name]
        end = first + (len(values) if values.ndim else 1)
        if (
            values.dtype != place.dtype
            or values.ndim != len(place.shape)
            or values.shape[1:] != place.shape[1:]
            or not 0 <= first <= end <= (place.shape[0] if place.shape else 1)
        ):
            raise ValueError(
                f"{values.dtype} {values.shape} are not rows [{first}, {end}) of array {name!r}, {place.dtype} {place.shape}"
            )
        if self._fd is None:
            raise ValueError("the window is sealed or dropped")
        # Written, not mapped: a writable map would have to be gone before the seal, and faulting pages in is slower.
        row = np.dtype(place.dtype).itemsize * prod(place.shape[1:])
        _write(
            self._fd, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, place.offset + first * row
        )

    def seal(self) -> int:
        """The descriptor, which is the caller's to close, of what nobody can change any more."""
        if self._fd is None:
            raise ValueError("the window is sealed or dropped")
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        fd, self._fd = self._fd, None
        return fd

    def close(self) -> None:
        """Drops what was not sealed."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def seal(layout: Layout, arrays: Mapping[str, Array]) -> int:
    """A window of whole arrays; the descriptor is the caller's to close. Raises KeyError without one of them, ValueError on
    one of another form, OSError out of memory."""
    draft = Draft(layout)
    try:
        for name in layout.places:
            draft.write(name, 0, arrays[name])
        return draft.seal()
    finally:
        draft.close()


class SealedWindow:
    """A mapped window. `arrays` are read-only views; `meta` is what the packer put into the header."""

    def __init__(self, fd: int) -> None:
        """Maps the window and closes the descriptor, whatever happens. Raises BadWindow."""
        try:
            header, self._base, self.bytes = _read_header(fd)
            self._header = header
            self._shared: mmap.mmap | None = mmap.mmap(fd, self.bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            # Costs nothing until somebody writes.
            self._private: mmap.mmap | None = mmap.mmap(
                fd, self.bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
        finally:
            os.close(fd)
        self.meta = header.meta
        self.arrays = self._views(self._shared)

    def private(self) -> dict[str, Array]:
        """Arrays over a copy-on-write map: zero-copy until written, and a write changes this process's pages only.

        For consumers that assume writable memory, as torch does: over the shared map a stray in-place operation would
        be a segmentation fault. Raises ValueError once closed.
        """
        if self._private is None:
            raise ValueError("the window is closed; use its arrays before asking for the next one")
        return self._views(self._private)

    def close(self) -> None:
        """Drops the maps and the arrays. A view that somebody still holds stays valid and keeps its map. Idempotent."""
        self.arrays: dict[str, Array] = {}
        self._shared = self._private = None

    def _views(self, buffer: mmap.mmap) -> dict[str, Array]:
        return {
            name: np.frombuffer(buffer, array.dtype, prod(array.shape), self._base + array.offset).reshape(
                array.shape
            )
            if prod(array.shape)
            else np.zeros(array.shape, array.dtype)
            for name, array in self._header.arrays.items()
        }


def _read_header(fd: int) -> tuple[_Header, int, int]:
    """(header, first byte of the arrays, size), all checked. Raises BadWindow."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise BadWindow("the descriptor is not sealed: it could change or shrink under its reader")
        size = os.fstat(fd).st_size
        head = os.pread(fd, _PREFIX, 0)
        length = int.from_bytes(head[len(_MAGIC) :], "little")
        if len(head) != _PREFIX or not head.startswith(_MAGIC) or length > size - _PREFIX:
            raise BadWindow(f"{size} bytes are no window")
        header = _Header.model_validate_json(os.pread(fd, length, _PREFIX))
    except (ValidationError, OSError) as error:
        raise BadWindow(f"the descriptor is no window ({error})") from error
    base = _aligned(_PREFIX + length)
    for name, array in header.arrays.items():
        _check(name, array, size - base)
    return header, base, size


def _aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN


def _write(fd: int, data: bytes | memoryview, at: int) -> None:
    left = memoryview(data)
    while left:
        done = os.pwrite(fd, left, at)
        left, at = left[done:], at + done


def _check(name: str, array: _ArrayHeader, room: int) -> None:
    if array.dtype not in _DTYPES or any(n < 0 for n in array.shape) or array.offset % ALIGN:
        raise BadWindow(f"array {name!r} is {array.dtype} {array.shape} at {array.offset}")
    if array.offset + np.dtype(array.dtype).itemsize * prod(array.shape) > room:
        raise BadWindow(f"array {name!r} ends after the window's {room} bytes")
