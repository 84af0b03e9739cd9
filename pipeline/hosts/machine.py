"""What a process that was given no number calls itself, and where others reach it: by the machine that it is on.

Promises:
- two live processes of one machine never have the same name, and a name is free again once its process is gone, however it
  ended: the kernel holds it. Machines must have different names, as containers and pods do;
- processes that share a machine's name share its network, as two containers in the host's network do: names are held there,
  not in a file system.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import socket
from itertools import count
from urllib.parse import urlsplit

from schemas.names import legal_name

ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104  # compared with, not listened on
_LONGEST = 120
"""Characters of a name before its number; `schemas.names` has 128 at most."""
_BROKER_PORT = 4222


class NoAddress(OSError):
    """This machine has no address of that family towards the broker."""


def claim_name(kind: str) -> tuple[str, socket.socket]:
    """`<kind>-<machine>`, or `<kind>-<machine>-2`, -3, ... where others of this machine are called so, and what holds it:
    it is another's to take once that is closed, or the process has ended."""
    base = legal_name(f"{kind}-{socket.gethostname()}")[:_LONGEST]
    for number in count(1):
        name = base if number == 1 else f"{base}-{number}"
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # In the abstract namespace, whose names have 107 bytes at most.
            held.bind(b"\0packtrain-" + hashlib.sha256(name.encode()).hexdigest().encode())
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return name, held
    raise AssertionError("there is always one more")


async def towards(broker: str, bind: str) -> str:
    """The address of this machine that its packets to the broker's url come from, of a family that a socket bound to `bind`,
    one of ANY_ADDRESS, takes. Nothing is sent. Raises NoAddress."""
    parts = urlsplit(broker)
    host, port = parts.hostname or "", parts.port or _BROKER_PORT
    family = socket.AF_INET if bind == ANY_ADDRESS[0] else socket.AF_UNSPEC
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, family=family, type=socket.SOCK_DGRAM
        )
        kind, _, _, _, there = found[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            return probe.getsockname()[0]
    except OSError as error:
        raise NoAddress(
            f"agent_loop.bind is {bind}, and this machine has no address of its family towards the broker {host}: "
            f"{error.strerror or error}; set agent_loop.advertise to the address that harness hosts reach it at"
        ) from error
