"""A request's body, bounded as it is sent and as it unpacks.

Promises: no more than the limit is held, whatever a small body claims to unpack to; `hold` is told of every byte before
it is kept, so that its caller can refuse; unpacking does not take the event loop's time.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from aiohttp import web
from aiohttp.web_exceptions import HTTPRequestEntityTooLarge

from pipeline.capture.http_errors import Refused

BODY_S = 300.0
"""Longest time that a client takes to send a body."""
MAX_CONTAINERS = 500_000
MAX_COMMAS = 2_000_000
"""Of one body, in its texts too. Parsing holds the interpreter, so that other tenants wait: 0.2 s for so many, 8 s for the
seven million empty lists that fit into 20 MiB. A million tokens of program text have a twentieth of it."""
_ZSTD_WINDOW_LOG = 25


async def read_body(request: web.Request, limit: int, hold: Callable[[int], None]) -> bytes:
    """The body, unpacked. Raises Refused (400, 408, 413, 415), and what `hold` raises."""
    if (request.content_length or 0) > limit:
        raise too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > limit:
                    raise too_large(limit)
                hold(len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_S:g} s: send it again", "timeout") from None
    except (web.RequestPayloadError, HTTPRequestEntityTooLarge) as error:
        raise Refused(400, f"the body broke off: {type(error).__name__}", "invalid_request") from None
    body = b"".join(chunks)
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding == "identity":
        return body
    unpacked = await asyncio.to_thread(unpack, body, coding, limit)
    hold(len(unpacked))
    return unpacked


def refuse_dense(body: bytes) -> None:
    """Raises Refused (413) for a body of more values than a dialogue has."""
    if len(body) <= MAX_CONTAINERS:
        return
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS or body.count(b",") > MAX_COMMAS:
        raise Refused(
            413,
            f"the body has over {MAX_CONTAINERS} lists and objects, or over {MAX_COMMAS} commas: send less",
            "request_too_large",
        )


def too_large(limit: int) -> Refused:
    return Refused(
        413, f"the body is over {limit} bytes: send less, images smaller among it", "request_too_large"
    )


def unpack(body: bytes, coding: str, limit: int) -> bytes:
    """The body of a content coding (gzip, deflate, zstd, br), of at most `limit` bytes. Raises Refused (400, 413, 415)."""
    if coding in ("gzip", "x-gzip", "deflate"):
        # 32 + 15: gzip and zlib are told apart by their heads.
        return _bounded(zlib.decompressobj(32 + 15), body, coding, limit, zlib.error)
    if coding == "zstd":
        zstd = _codec(coding, "compression.zstd", "backports.zstd")
        # A few bytes can ask for a window of gigabytes.
        decoder = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
        )
        return _bounded(decoder, body, coding, limit, zstd.ZstdError)
    if coding == "br":
        return _brotli(_codec(coding, "brotli"), body, limit)
    raise Refused(
        415, f"content coding {coding[:40]!r} is not known: send gzip, zstd, br or none", "unsupported_coding"
    )


def _bounded(decoder: Any, body: bytes, coding: str, limit: int, trouble: type[Exception]) -> bytes:
    """`decoder` is zlib's or zstd's: both take the most that they may give, and tell the end of their data."""
    try:
        unpacked: bytes = decoder.decompress(body, limit + 1)
    except trouble as error:
        raise _broken(coding, str(error)) from None
    if len(unpacked) > limit:
        raise too_large(limit)
    if not decoder.eof:
        raise _broken(coding, "it ends too early")
    if decoder.unused_data:
        raise _broken(coding, f"{len(decoder.unused_data)} bytes follow its end")
    return unpacked


def _brotli(brotli: Any, body: bytes, limit: int) -> bytes:
    decoder = brotli.Decompressor()
    try:
        unpacked: bytes = decoder.process(body, output_buffer_limit=limit + 1)
        # The limit is one of its buffers': it may stop early, with more to give.
        while len(unpacked) <= limit and not decoder.can_accept_more_data():
            unpacked += decoder.process(b"", output_buffer_limit=limit + 1 - len(unpacked))
    except brotli.error as error:
        raise _broken("br", str(error)) from None
    if len(unpacked) > limit:
        raise too_large(limit)
    if not decoder.is_finished():
        raise _broken("br", "it ends too early")
    return unpacked


def _codec(coding: str, *modules: str) -> Any:
    for module in modules:
        try:
            return import_module(module)
        except ImportError:
            continue
    raise Refused(
        415, f"content coding {coding!r} is not installed here: send gzip or none", "unsupported_coding"
    )


def _broken(coding: str, why: str) -> Refused:
    return Refused(400, f"the body is not {coding}: {why}", "invalid_request")
