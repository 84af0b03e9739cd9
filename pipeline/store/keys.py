"""Which keys may name an object. Promises: a checked key never leaves the store's prefix (no `..`, no absolute path, no
empty component). `schemas.keys` says where the objects of a run lie; its names stand here too."""

from __future__ import annotations

import re

from schemas.keys import payload_key, plan_key, weights_key

__all__ = ["MAX_KEY", "BadKey", "checked_key", "checked_prefix", "payload_key", "plan_key", "weights_key"]

MAX_KEY = 512
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


class BadKey(ValueError):
    """A key that may not name an object."""


def checked_key(key: str) -> str:
    """`key` itself; raises `BadKey` unless it is relative, of `[A-Za-z0-9_.-]` components, none of which starts with a dot."""
    if len(key) > MAX_KEY:
        raise BadKey(
            f"object key {key[:80]!r}... has {len(key)} characters, limit {MAX_KEY}; shorten its names"
        )
    if not _KEY.fullmatch(key):
        raise BadKey(
            f"object key {key!r} is not a relative path of A-Z a-z 0-9 _ - . components, none with a dot at its start; "
            "take the key from the event that names the object"
        )
    return key


def checked_prefix(prefix: str) -> str:
    """A listing prefix: a key, an optional trailing slash, or nothing. Raises `BadKey`."""
    return checked_key(prefix.removesuffix("/")) if prefix else ""
