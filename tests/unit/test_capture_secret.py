"""Session secrets: derived, compared whole, and never shown."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.capture.secret import (
    BadRunKey,
    is_session_secret,
    load_run_key,
    session_secret,
    session_url,
    without_secrets,
)

KEY = b"k" * 32


def test_the_secret_is_the_hmac_of_the_session_under_the_run_key() -> None:
    expected = hmac.new(KEY, b"s-1", hashlib.sha256).hexdigest()
    assert session_secret(KEY, "s-1") == expected
    assert session_url("http://h:1/", KEY, "s-1") == f"http://h:1/s/s-1/{expected}/v1"
    assert without_secrets(f"GET /s/s-1/{expected}/v1 failed", KEY, "s-1") == "GET /s/s-1/***/v1 failed"


@given(st.text(max_size=80))
def test_nothing_else_is_accepted(given_secret: str) -> None:
    assert is_session_secret(KEY, "s", given_secret) == (given_secret == session_secret(KEY, "s"))
    assert is_session_secret(KEY, "s", session_secret(KEY, "s"))
    assert not is_session_secret(b"x" * 32, "s", session_secret(KEY, "s"))


def test_run_keys_are_read_from_files_and_refused_by_name(tmp_path: Path) -> None:
    good, short = tmp_path / "good", tmp_path / "short"
    good.write_bytes(KEY + b"\n")
    short.write_bytes(b"hunter2")
    assert load_run_key(good) == KEY
    with pytest.raises(BadRunKey, match="7 bytes") as refused:
        load_run_key(short)
    assert "hunter2" not in str(refused.value)
    with pytest.raises(BadRunKey, match="cannot be read"):
        load_run_key(tmp_path / "none")
