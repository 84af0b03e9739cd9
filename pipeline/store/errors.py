"""What can go wrong with an object. Only `StoreUnavailable` is worth another try; the others are facts."""

from __future__ import annotations


class StoreError(Exception):
    """Base of the errors of this package."""


class BadStore(StoreError, ValueError):
    """A configuration that names no store; the message says which key, and what to set it to."""


class ObjectExists(StoreError):
    """The key is taken by other bytes; objects are written once."""

    def __init__(self, key: str, url: str) -> None:
        super().__init__(
            f"object {key} already exists in {url}, and objects are written once; write under a new key"
        )
        self.key = key


class ObjectMissing(StoreError):
    """No object has that key."""

    def __init__(self, key: str, url: str) -> None:
        super().__init__(
            f"no object {key} in {url}; its writer never finished, or it was collected after its step"
        )
        self.key = key


class ObjectDamaged(StoreError):
    """The bytes are not those that were written: truncated, grown or altered. Never used, never retried."""

    def __init__(self, key: str, what: str, column: str | None = None, block: int | None = None) -> None:
        super().__init__(
            f"object {key} is damaged: {what}; restore it, or restart the run before the step that uses it"
        )
        self.key = key
        self.column = column
        self.block = block


class StoreUnavailable(StoreError):
    """The store does not answer, refuses us, or cannot write. Names the store and the remedy."""

    def __init__(self, url: str, reason: str, remedy: str) -> None:
        super().__init__(f"object store {url}: {reason}; {remedy}")
        self.url = url
