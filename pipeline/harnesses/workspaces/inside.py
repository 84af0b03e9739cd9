"""A listening socket of this process inside the network of a container of this machine.

A network namespace without a network can still be listened in: whoever connects there to 127.0.0.1 talks to this process,
and to nothing else.
"""

from __future__ import annotations

import ctypes
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.harnesses.workspaces.base import WorkspaceFailed

PORT = 28_080
"""Neither a port that tasks like nor one that the kernel gives to clients."""
_NEWNET = 0x40000000


def listen_inside(pid: int, container: str) -> socket.socket:
    """Listens on `PORT` of 127.0.0.1 in the network namespace of process `pid`, which is in that container.

    Blocks. Raises `WorkspaceFailed` where the engine is not of this machine, or this process may not enter.
    """
    # On a thread that ends with it: who entered another network is there for good.
    with ThreadPoolExecutor(1) as own:
        return own.submit(_listen, pid, container).result()


def _listen(pid: int, container: str) -> socket.socket:
    try:
        # The engine tells a pid of its own machine; here another process may have that number.
        there = container in Path(f"/proc/{pid}/cgroup").read_text()
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC) if there else -1
    except OSError:
        network = -1
    if network < 0:
        raise WorkspaceFailed(
            f"the processes of container {container[:12]} are not seen from here: the engine is on another machine, this "
            "process is in a container itself, or is not root's; start the pool's hosts where the engine is, or set the "
            "workspaces' option network to open"
        )
    try:
        if ctypes.CDLL(None, use_errno=True).setns(network, _NEWNET):
            error = os.strerror(ctypes.get_errno())
            raise WorkspaceFailed(
                f"the network of container {container[:12]} cannot be entered: {error}; run the pool's hosts as root, or set "
                "the workspaces' option network to open"
            )
    finally:
        os.close(network)
    return socket.create_server(("127.0.0.1", PORT), backlog=1024)
