"""Session secrets: HMAC-SHA256(run key, session id). Both hosts derive them; no event, log line or command line has one."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from pipeline.secret_file import SecretUnreadable, read_secret

MIN_KEY_BYTES = 16


class BadRunKey(ValueError):
    """The run key file cannot be used. The message names the file, never its content."""


def load_run_key(path: str | Path) -> bytes:
    """The key in the file, without surrounding white space; raises `BadRunKey`."""
    try:
        key = read_secret(path, "agent_loop.run_key_file").encode()
    except SecretUnreadable as error:
        raise BadRunKey(f"{error}; agent-loop and harness hosts need the same file") from None
    if len(key) < MIN_KEY_BYTES:
        raise BadRunKey(
            f"agent_loop.run_key_file {str(path)!r} holds {len(key)} bytes, at least {MIN_KEY_BYTES} are needed; "
            "write one with `openssl rand -hex 32`"
        )
    return key


def session_secret(run_key: bytes, session: str) -> str:
    """64 hexadecimal characters."""
    return hmac.new(run_key, session.encode(), hashlib.sha256).hexdigest()


def is_session_secret(run_key: bytes, session: str, given: str) -> bool:
    """Whether `given` is the session's secret, in time that does not depend on where they differ."""
    return hmac.compare_digest(session_secret(run_key, session).encode(), given.encode(errors="replace"))


def session_url(base_url: str, run_key: bytes, session: str) -> str:
    """The base URL that an OpenAI client is given. Holds the secret: never log it."""
    return f"{base_url.rstrip('/')}/s/{session}/{session_secret(run_key, session)}/v1"


def without_secrets(text: str, run_key: bytes, session: str) -> str:
    """`text` with the session's secret taken out, for error details that quote a URL."""
    return text.replace(session_secret(run_key, session), "***")


def reasoning_key(run_key: bytes, session: str) -> bytes:
    """The key that signs what the session's policy thought; tells nothing of the session's secret."""
    return hmac.new(run_key, b"reasoning\0" + session.encode(), hashlib.sha256).digest()
