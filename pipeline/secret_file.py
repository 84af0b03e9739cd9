"""Secrets live in files that the configuration names; messages name the file, never its content."""

from __future__ import annotations

from pathlib import Path


class SecretUnreadable(ValueError):
    """A file that a secret should be in; the message names the configuration key, the file and the reason."""


def read_secret(path: str | Path, key: str) -> str:
    """The file's text without surrounding white space; `key` is the configuration key that names it.

    Raises SecretUnreadable, also for a file that holds nothing.
    """
    try:
        secret = Path(path).read_text().strip()
    except OSError as error:
        raise SecretUnreadable(f"{key} {str(path)!r} cannot be read ({error.strerror}); set {key}") from None
    if not secret:
        raise SecretUnreadable(f"{key} {str(path)!r} holds nothing; write the secret into it, or set {key}")
    return secret
