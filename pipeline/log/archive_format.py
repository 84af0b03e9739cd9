"""A run in one file: its messages in stream order, its configuration, and if wanted its objects.

A tar file of members in a fixed order:
- `manifest.json`: which run, which stream sequences, how many messages and objects;
- `config.toml`: what the run was configured with, without what belongs to a machine;
- `messages/<first sequence>.jsonl`: a message a line, `{"seq", "subject", "headers": [[name, value], ...], "body": base64}`;
- `objects/<key>`: an object, as it is, in the order of the keys.

Promises:
- the same log, configuration and objects give the same bytes: there are no times, owners or names of machines;
- written and read member by member: memory is bounded by the largest object, messages by a chunk;
- every member carries the CRC32C of its bytes and of its name (a PAX record that tar programs take for an extended attribute), and nothing of a
  member is given to the reader before it is verified; a file that was cut, altered, or made by hand with other kinds
  of members, other names, sizes or subjects raises `ArchiveError`, which names the member or the message;
- a file appears under its name only when it is complete.

Canonical form. Headers whose name starts with `Nats-` are transport (which stream was expected, which atomic batch a
message came in) and are left out, but for the two that readers use: `Nats-Msg-Id` and `Nats-Expected-Last-Subject-Sequence`.
The latter is `0` where the message that it names is no longer in the log. A header whose name is no token of HTTP's, which
nats-py reads but refuses to send, is left out too.
"""

from __future__ import annotations

import base64
import re
import tarfile
from dataclasses import dataclass, replace
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from pipeline.checksum import crc32c
from pipeline.log.fold import Found
from pipeline.store.keys import MAX_KEY, BadKey, checked_key
from schemas.envelope import EXPECTED_LAST
from schemas.keys import run_prefix
from schemas.names import Name, dead_letter_subject

MANIFEST = "manifest.json"
CONFIG = "config.toml"
MESSAGES = "messages/"
OBJECTS = "objects/"
CRC = "SCHILY.xattr.user.packtrain.crc32c"
BLOCK = 512
CHUNK_MESSAGES = 1000
MOST = {MANIFEST: 64 << 10, CONFIG: 4 << 20, MESSAGES: 2 << 20, OBJECTS: 5 << 30}
"""Bytes of a member, at most, by its kind. A chunk of messages is cut at 1 MiB, and holds the message that reached it."""
_MAX_SUBJECT = 4000
_MSG_ID = "Nats-Msg-Id"
_KEPT = {_MSG_ID, EXPECTED_LAST}
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_PART = r"(?!(?:\*|>)(?:\.|\Z))[^\s.\x00-\x1f\x7f]+"
_SUBJECT = re.compile(rf"{_PART}(?:\.{_PART})*\Z")
_NEWLINES = str.maketrans({"\r": " ", "\n": " "})


class ArchiveError(ValueError):
    """A file that is no whole and unaltered export, or a message that cannot be in one; the message names the place."""


class Manifest(BaseModel):
    """What the file holds; its first member."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    run: Name
    first: int = Field(ge=1, description="stream sequence of the first message")
    last: int = Field(ge=1, description="stream sequence of the last message; there are no gaps")
    messages: int = Field(ge=1)
    payloads: bool = Field(description="whether the run's objects are in the file")
    objects: int = Field(ge=0)
    object_bytes: int = Field(ge=0)


@dataclass(frozen=True, slots=True)
class Member:
    """Where a member's bytes are in the file, and their checksum."""

    name: str
    bytes: int
    crc32c: int
    offset: int


def canonical(found: Found, first: int) -> Found:
    """The message as an archive holds it, in a log that begins at `first`; see the module. Idempotent."""
    headers: dict[str, str] = {}
    for name, raw in (found.headers or {}).items():
        value = raw.strip().translate(_NEWLINES)
        if not _HEADER_NAME.fullmatch(name) or (name.lower().startswith("nats-") and name not in _KEPT):
            continue
        if name == EXPECTED_LAST:
            if not (value.isascii() and value.isdecimal()):
                continue
            value = value if int(value[:20]) >= first else "0"
        headers[name] = value
    return replace(found, headers=headers or None)


def check_message(found: Found, run: str) -> None:
    """Refuses a message that is none of the run's log; raises ArchiveError."""
    subject = found.subject
    mine = subject.startswith((f"rl.{run}.", f"{dead_letter_subject(run)}."))
    if not mine or len(subject) > _MAX_SUBJECT or not _SUBJECT.match(subject):
        raise ArchiveError(f"message {found.seq} is on {subject[:200]!r}, which is no subject of run {run}")


def message_line(found: Found) -> bytes:
    return orjson.dumps(
        {
            "seq": found.seq,
            "subject": found.subject,
            "headers": [[name, value] for name, value in (found.headers or {}).items()],
            "body": base64.b64encode(found.body).decode(),
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )


def member_header(name: str, size: int, checksum: int) -> bytes:
    """The blocks before a member's bytes: a PAX header with the checksums of bytes and name, and the member's own."""
    info = tarfile.TarInfo(name)
    info.size = size
    # A long name stands in a PAX record, which tar itself does not protect.
    info.pax_headers = {CRC: f"{checksum:08x}-{crc32c(name.encode()):08x}"}
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def check_object_key(key: str, run: str, before: str) -> None:
    try:
        checked_key(key)
    except BadKey as error:
        raise ArchiveError(str(error)) from error
    if not key.startswith(f"{run_prefix(run)}/"):
        raise ArchiveError(f"object {key[:MAX_KEY]} is none of run {run}")
    if key <= before:
        raise ArchiveError(f"object {key} comes after {before}: objects stand in the order of their keys")
