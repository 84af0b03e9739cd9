"""What a rank and its packer say to each other over a Unix socket: length-prefixed JSON, answers with a descriptor.

A rank sends `Request`s: `ask` for a micro-batch, which is answered once it exists, and `ack` when it is done with one.
An `Answer` without `error` carries exactly one file descriptor.

A batch may be planned anew without some of its sequences. A rank says the least revision that it accepts, and is told the
newest one that the window is good for.

Promises: a message over `MAX_MESSAGE`, malformed, or with an unexpected descriptor ends the connection; received
descriptors are close-on-exec and never leak, whatever else the message was.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from schemas.config import RunConfig
from schemas.payload import Frozen

MAX_MESSAGE = 16 * 1024
MAX_PATH = 107
"""Bytes of a Unix socket's path: `sun_path` has 108 on Linux, one of them the terminating zero."""
PREFIX = struct.Struct(">I")


class Protocol(ValueError):
    """A message that is none."""


class SocketPathTooLong(ValueError):
    """A socket path that no kernel accepts."""


class Request(Frozen):
    kind: Literal["ask", "ack"]
    step: int = Field(ge=1)
    microbatch: int = Field(ge=0)
    revision: int = Field(default=0, ge=0)


class Answer(Frozen):
    """`microbatches` is the count of this step; `last` is true on the last one; `revision` is one of the step's, at least the
    one that was asked for. With `error`, there is no descriptor."""

    step: int = Field(ge=1)
    microbatch: int = Field(ge=0)
    microbatches: int = Field(default=0, ge=0)
    last: bool = False
    revision: int = Field(default=0, ge=0)
    error: str | None = Field(default=None, max_length=4000)


def socket_path(config: RunConfig, packer: int) -> Path:
    """The socket of the packer of that number. Raises SocketPathTooLong."""
    directory = config.packer.socket_dir or f"{config.directory}/runs/{config.run}"
    return socket_in(directory, packer)


def socket_in(directory: Path | str, packer: int) -> Path:
    """The same of a run whose sockets are in that directory."""
    return checked_path(Path(directory) / f"packer-{packer}.sock")


def checked_path(path: Path) -> Path:
    """`path` itself; raises SocketPathTooLong that names it and the remedy."""
    length = len(os.fsencode(path))
    if length > MAX_PATH:
        raise SocketPathTooLong(
            f"socket path {path} has {length} bytes, the kernel's limit is {MAX_PATH}; set packer.socket_dir to a shorter directory"
        )
    return path


def frame(message: Frozen) -> bytes:
    """The message with its length before it. Raises Protocol over `MAX_MESSAGE`."""
    body = message.model_dump_json().encode()
    return PREFIX.pack(checked_length(len(body))) + body


def checked_length(length: int) -> int:
    if not 0 < length <= MAX_MESSAGE:
        raise Protocol(f"a message of {length} bytes, limit {MAX_MESSAGE}")
    return length


def parse_request(body: bytes) -> Request:
    """Raises Protocol."""
    try:
        return Request.model_validate_json(body)
    except ValidationError as error:
        raise Protocol(f"no request: {body[:200]!r}") from error


def receive_answer(sock: socket.socket, wait: Callable[[], None]) -> tuple[Answer, int | None]:
    """One answer and its descriptor, which is the caller's; `wait` returns when the socket may be read, or raises.

    Raises Protocol, and ConnectionError when the packer is gone.
    """
    fds: list[int] = []
    try:
        length = checked_length(PREFIX.unpack(_exactly(sock, PREFIX.size, fds, wait))[0])
        try:
            answer = Answer.model_validate_json(_exactly(sock, length, fds, wait))
        except ValidationError as error:
            raise Protocol(f"no answer: {error}") from error
        if len(fds) != (answer.error is None):
            raise Protocol(f"an answer with {len(fds)} descriptors")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return answer, fds[0] if fds else None


def _exactly(sock: socket.socket, size: int, fds: list[int], wait: Callable[[], None]) -> bytes:
    data = b""
    while len(data) < size:
        wait()
        # Not socket.recv_fds: it drops its flags argument in Python 3.11, and with it close-on-exec.
        part, ancillary, flags, _ = sock.recvmsg(
            size - len(data),
            socket.CMSG_SPACE(fds_bytes := 4 * array.array("i").itemsize),
            socket.MSG_CMSG_CLOEXEC,
        )
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                got = array.array("i")
                got.frombytes(content[: len(content) - len(content) % got.itemsize])
                fds.extend(got)
        if flags & socket.MSG_CTRUNC:
            raise Protocol(f"more than {fds_bytes} bytes of descriptors")
        if not part:
            raise ConnectionError("the packer closed the connection")
        data += part
    return data
