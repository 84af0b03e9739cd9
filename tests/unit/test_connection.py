"""What goes on the wire is, byte for byte, what nats-py itself would send."""

from __future__ import annotations

import asyncio
from types import MethodType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import Header

from pipeline.log.connection import _block, _Connection

NAMES = st.from_regex(r"[A-Za-z0-9-]{1,20}", fullmatch=True)
TEXT = st.text(st.characters(codec="utf-8"), max_size=30).map(str.strip)


def sent(client: Client, headers: dict[str, Any], body: bytes) -> bytes:
    """The command that a publish of these makes, without a server."""
    commands: list[bytes] = []

    async def keep(_: Client, command: bytes, priority: bool = False) -> None:
        commands.append(command)

    client._send_command = MethodType(keep, client)
    asyncio.run(client._send_publish("a.b", "reply", body, len(body), headers))
    return b"".join(commands)


@given(headers=st.dictionaries(NAMES, TEXT, min_size=1, max_size=14), body=st.binary(max_size=50))
@example({"a": "two\r\nlines: here", "b": "x"}, b"")
@example({"a": "\n"}, b"")
@example({Header.EXPECTED_STREAM: "T", "a": "b"}, b"")
@example({"a": "b\r"}, b"")
@example({"ce-id": "ä€𝄞"}, b"\r\n")
def test_headers_are_sent_as_nats_py_sends_them(headers: dict[str, str], body: bytes) -> None:
    assert sent(_Connection(), headers, body) == sent(Client(), headers, body)


@pytest.mark.parametrize("headers", [{"no space": "x"}, {"a:b": "x"}, {"": "x"}, {"a\r\nb": "x"}], ids=repr)
def test_a_name_that_is_none_is_nats_pys_to_refuse(headers: dict[str, str]) -> None:
    assert _block(headers) is None


def test_a_value_with_a_line_break_never_makes_a_header() -> None:
    wire = sent(_Connection(), {"a": "x\r\nNats-Rollup: all"}, b"")
    assert b"\r\nNats-Rollup" not in wire
    with pytest.raises(NatsError):
        sent(_Connection(), {"a\r\nNats-Rollup": "all"}, b"")
