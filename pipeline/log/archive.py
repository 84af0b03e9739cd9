"""Reading a run from one file (`pipeline.log.archive_format`). The file may come from anybody.

Promises:
- nothing of a member is given before all of the member is verified; a file that was cut, altered, or made by hand with
  other kinds of members, names, sizes, subjects or headers raises `ArchiveError`, which names the place;
- memory is bounded by the largest object and a chunk of messages, whatever sizes the file claims.
"""

from __future__ import annotations

import base64
import itertools
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

import orjson
from pydantic import ValidationError

from pipeline.checksum import crc32c
from pipeline.log.archive_format import (
    BLOCK,
    CHUNK_MESSAGES,
    CONFIG,
    CRC,
    MANIFEST,
    MESSAGES,
    MOST,
    OBJECTS,
    ArchiveError,
    Manifest,
    Member,
    canonical,
    check_message,
    check_object_key,
    member_header,
    message_line,
)
from pipeline.log.fold import Found

_MAX_PAX = 4096
_CHUNK_NAME = re.compile(r"messages/([0-9]{12,18})\.jsonl")
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.DIRTYPE: "a directory",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
}


class Archive:
    """An export, opened for reading. A context manager. Raises ArchiveError, OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("rb")
        try:
            self.bytes = os.fstat(self._file.fileno()).st_size
            """Size of the file."""
            head = self._member(0, MANIFEST)
            try:
                self.manifest = Manifest.model_validate_json(self.read(head))
            except ValidationError as error:
                detail = error.errors()[0]
                where = ".".join(map(str, detail["loc"])) or "it"
                raise self._error(f"{MANIFEST}: {where}: {detail['msg']}") from error
            if self.manifest.last - self.manifest.first + 1 != self.manifest.messages:
                raise self._error(f"{MANIFEST}: messages is not last - first + 1")
            config = self._member(_end(head), CONFIG)
            try:
                self.config = self.read(config).decode()
            except UnicodeDecodeError as error:
                raise self._error(f"{CONFIG} is not UTF-8") from error
            self._chunks, self._objects_at = self._index(_end(config))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def check(self) -> Iterator[int]:
        """Reads and verifies all of it; gives, now and then, how many bytes of the file are done."""
        for found in self.messages():
            if found.seq % CHUNK_MESSAGES == 0:
                yield self._file.tell()
        objects = size = 0
        for _, member in self.objects():
            self.read(member)
            objects += 1
            size += member.bytes
            yield _end(member)
        m = self.manifest
        if (objects, size) != (m.objects, m.object_bytes) or (objects and not m.payloads):
            raise self._error(
                f"it holds {objects} objects of {size} bytes, its manifest says {m.objects} of {m.object_bytes}"
            )

    def messages(self, start: int = 1) -> Iterator[Found]:
        """The messages from stream sequence `start` on, in order, none missing; each chunk is verified first."""
        for (first, chunk), (following, _) in itertools.pairwise(
            [*self._chunks, (self.manifest.last + 1, None)]
        ):
            if following > start and chunk is not None:
                for found in self._parsed(chunk, first, following):
                    if found.seq >= start:
                        yield found

    def objects(self) -> Iterator[tuple[str, Member]]:
        """(key, where it is) of every object, in the order of the keys; `read` gives the bytes."""
        offset, before = self._objects_at, ""
        while (member := self._next(offset)) is not None:
            key = member.name.removeprefix(OBJECTS)
            if not member.name.startswith(OBJECTS):
                raise self._error(f"member {member.name[:200]!r} has no place in it")
            try:
                check_object_key(key, self.manifest.run, before)
            except ArchiveError as error:
                raise self._error(str(error)) from error
            yield key, member
            before, offset = key, _end(member)

    def read(self, member: Member) -> bytes:
        """A member's bytes, verified."""
        self._file.seek(member.offset)
        data = self._file.read(member.bytes)
        padding = self._file.read(_end(member) - member.offset - member.bytes)
        if len(data) != member.bytes or any(padding):
            raise self._error(f"member {member.name} is cut off or goes on behind its end")
        if (found := crc32c(data)) != member.crc32c:
            raise self._error(
                f"member {member.name} is damaged: its CRC32C is {found:08x}, recorded is {member.crc32c:08x}"
            )
        return data

    def _error(self, what: str) -> ArchiveError:
        return ArchiveError(f"{self.path} is no whole export of a run: {what}")

    def _index(self, offset: int) -> tuple[list[tuple[int, Member]], int]:
        """(first sequence, chunk) of all messages, and where the objects begin."""
        chunks: list[tuple[int, Member]] = []
        while (member := self._next(offset)) is not None and member.name.startswith(MESSAGES):
            number = _CHUNK_NAME.fullmatch(member.name)
            first = int(number[1]) if number else 0
            if (
                first != self.manifest.first
                if not chunks
                else not chunks[-1][0] < first <= self.manifest.last
            ):
                raise self._error(f"member {member.name[:200]!r} stands where other messages are expected")
            chunks.append((first, member))
            offset = _end(member)
        if not chunks:
            raise self._error("it holds no messages")
        return chunks, offset

    def _parsed(self, chunk: Member, first: int, following: int) -> Iterator[Found]:
        """The messages `first` to `following` - 1, which are all of the chunk."""
        lines = self.read(chunk).split(b"\n")
        if lines.pop() or len(lines) != following - first:
            raise self._error(f"{chunk.name} holds {len(lines)} messages, expected {following - first}")
        for seq, line in enumerate(lines, first):
            found = _found(line)
            if found is None or found.seq != seq:
                raise self._error(f"{chunk.name}: line {seq - first + 1} is not message {seq}")
            try:
                check_message(found, self.manifest.run)
            except ArchiveError as error:
                raise self._error(str(error)) from error
            if canonical(found, self.manifest.first) != found:
                raise self._error(f"message {seq} has headers that may not be in it")
            yield found

    def _member(self, offset: int, name: str) -> Member:
        member = self._next(offset)
        if member is None or member.name != name:
            raise self._error(f"{name} is not where it should be")
        return member

    def _next(self, offset: int) -> Member | None:
        """The member whose header begins at `offset`; None at the end of the file, which must be one."""
        block = self._block(offset)
        if not any(block):
            if any(self._block(offset + BLOCK)) or self.bytes != offset + 2 * BLOCK:
                raise self._error("something follows its end")
            return None
        outer = self._info(block)
        if outer.type != tarfile.XHDTYPE or outer.size > _MAX_PAX:
            kind = _KINDS.get(outer.type, "without a checksum")
            raise self._error(f"member {outer.name[:200]!r} is {kind}")
        length = outer.size + -outer.size % BLOCK
        self._file.seek(offset + BLOCK)
        records = _pax_records(self._file.read(length)[: outer.size])
        start = offset + BLOCK + length
        info = self._info(self._block(start))
        name = records.get("path", info.name)
        if info.type != tarfile.REGTYPE:
            raise self._error(f"member {name[:200]!r} is {_KINDS.get(info.type, 'no regular file')}")
        most = next((size for kind, size in MOST.items() if name.startswith(kind)), 0)
        if not 0 <= info.size <= most:
            raise self._error(f"member {name[:200]!r} has {info.size} bytes, limit {most}")
        member = Member(name, info.size, _checksum(records.get(CRC, "")), start + BLOCK)
        if _end(member) + 2 * BLOCK > self.bytes:
            raise self._error(f"it is cut off in member {name[:200]!r}")
        # Whatever else a header can say (owners, modes, links, sizes twice), ours say one thing in one way.
        self._file.seek(offset)
        if self._file.read(member.offset - offset) != member_header(name, member.bytes, member.crc32c):
            raise self._error(f"the header of member {name[:200]!r} is not as an export writes it")
        return member

    def _block(self, offset: int) -> bytes:
        self._file.seek(offset)
        block = self._file.read(BLOCK)
        if len(block) < BLOCK:
            raise self._error(f"it is cut off at byte {offset + len(block)}")
        return block

    def _info(self, block: bytes) -> tarfile.TarInfo:
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise self._error(f"it is damaged, or no tar file ({error})") from error


def read_archive(path: Path) -> Iterator[Found]:
    """The messages of an export, in stream order; `packtrain replay --file` folds them. Raises ArchiveError, OSError."""
    with Archive(path) as archive:
        yield from archive.messages()


def _end(member: Member) -> int:
    """Where the next header begins."""
    return member.offset + member.bytes + -member.bytes % BLOCK


def _checksum(text: str) -> int:
    """That of the bytes; the name's is checked with the rest of the header."""
    return int(text[:8], 16) if re.fullmatch("[0-9a-f]{8}-[0-9a-f]{8}", text) else 0


def _pax_records(data: bytes) -> dict[str, str]:
    """`<length> <key>=<value>\\n` ...; what is malformed ends it, and the comparison with our own header tells."""
    records: dict[str, str] = {}
    while match := re.match(rb"(\d{1,4}) ", data):
        record, data = data[: int(match[1])], data[int(match[1]) :]
        key, _, value = record[match.end() : -1].partition(b"=")
        if not record:
            break
        records[key.decode(errors="replace")] = value.decode(errors="replace")
    return records


def _found(line: bytes) -> Found | None:
    """The message of a line; None when it is none, or is not written in the one way that a line is."""
    try:
        value = cast("dict[str, Any]", orjson.loads(line))
        found = Found(
            subject=value["subject"],
            headers=dict(value["headers"]) or None,
            body=base64.b64decode(value["body"], validate=True),
            seq=value["seq"],
        )
        texts = [found.subject, *(found.headers or {}).keys(), *(found.headers or {}).values()]
        if type(found.seq) is int and all(type(text) is str for text in texts):
            return found if message_line(found) == line + b"\n" else None
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
