"""Writing a run into one file (`pipeline.log.archive_format`).

Promises: memory is bounded by the largest object and a chunk of messages; a file appears under its name only when it is
complete and on the disk, and never replaces another.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from pipeline.checksum import crc32c
from pipeline.log.archive_format import (
    BLOCK,
    CHUNK_MESSAGES,
    CONFIG,
    MANIFEST,
    MESSAGES,
    OBJECTS,
    ArchiveError,
    Manifest,
    canonical,
    check_message,
    check_object_key,
    member_header,
    message_line,
)
from pipeline.log.fold import Found

_CHUNK_BYTES = 1 << 20


class ArchiveWriter:
    """Writes an export: every message in order, then every object in the order of the keys, then `close`.

    A context manager; what was not closed leaves no file. Raises FileExistsError when the file is there already, OSError
    when it cannot be written, ArchiveError on what does not belong into it.
    """

    def __init__(self, path: Path, manifest: Manifest, config: str) -> None:
        if path.exists():
            raise FileExistsError(f"{path} exists already")
        self._path = path
        self._draft = path.with_name(f".{path.name}.{os.getpid()}")
        self._file = self._draft.open("xb")
        self._manifest = manifest
        self._chunk: list[bytes] = []
        self._chunk_size = 0
        self._chunk_first = self._following = manifest.first
        self._objects = self._object_bytes = 0
        self._last_key = ""
        self._member(MANIFEST, manifest.model_dump_json().encode())
        self._member(CONFIG, config.encode())

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._draft.unlink(missing_ok=True)

    def message(self, found: Found) -> None:
        """The next message of the log."""
        if found.seq != self._following or found.seq > self._manifest.last:
            raise ArchiveError(
                f"message {found.seq} came where {self._following} was expected: the log lost messages while it was read; export again"
            )
        check_message(found, self._manifest.run)
        self._chunk.append(message_line(canonical(found, self._manifest.first)))
        self._following += 1
        self._chunk_size += len(self._chunk[-1])
        if len(self._chunk) == CHUNK_MESSAGES or self._chunk_size >= _CHUNK_BYTES:
            self._flush()

    def object(self, key: str, data: bytes) -> None:
        """The next object; its key comes after the one before."""
        self._flush()
        check_object_key(key, self._manifest.run, self._last_key)
        self._last_key = key
        self._objects += 1
        self._object_bytes += len(data)
        self._member(f"{OBJECTS}{key}", data)

    def close(self) -> None:
        """Ends the file and gives it its name. Raises ArchiveError unless it holds what its manifest says."""
        self._flush()
        m = self._manifest
        if (self._following - 1, self._objects, self._object_bytes) != (m.last, m.objects, m.object_bytes):
            raise ArchiveError(
                f"the export ends at message {self._following - 1} with {self._objects} objects, of {m.last} and {m.objects}"
            )
        self._file.write(bytes(2 * BLOCK))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        # Not `replace`: a file of that name that somebody made in the meantime stays.
        os.link(self._draft, self._path)

    def _flush(self) -> None:
        if self._chunk:
            self._member(f"{MESSAGES}{self._chunk_first:012d}.jsonl", b"".join(self._chunk))
            self._chunk, self._chunk_size, self._chunk_first = [], 0, self._following

    def _member(self, name: str, data: bytes) -> None:
        self._file.write(member_header(name, len(data), crc32c(data)))
        self._file.write(data)
        self._file.write(bytes(-len(data) % BLOCK))
