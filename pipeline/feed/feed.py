"""The trainer's side: the micro-batches of a step, one after the other, from the rank's packer. Synchronous.

    feed = Feed(socket_path(config, rank))
    for micro_batch in feed.batch(step):
        ...                                 # micro_batch.arrays (numpy) or micro_batch.torch()

Promises:
- `batch` waits for a step that has not been yielded yet, without polling the packer;
- a packer that is killed and restarted is asked again for the same window: none is skipped, none comes twice;
- a window that was not asked for is never handed out;
- a micro-batch is acknowledged when the loop asks for the next one, or is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from pipeline.feed.memfd import SealedWindow
from pipeline.feed.wire import Protocol, Request, checked_path, frame, receive_answer

if TYPE_CHECKING:
    import torch

_TICK_S = 0.2
"""How often a waiting feed looks at its stop callback and its deadline."""
_AGAIN_S = 0.1


class FeedError(RuntimeError):
    """The packer refused the window; its reason is the message."""


class FeedTimeout(TimeoutError):
    """No window within the time that the caller gave."""


class FeedStopped(Exception):
    """The stop callback returned true: no error, but the caller's wish."""


class MicroBatch:
    """One packed micro-batch: `arrays` as `pipeline.batch.windows.pack` describes them, read-only and shared."""

    def __init__(self, step: int, index: int, count: int, window: SealedWindow) -> None:
        self.step = step
        self.index = index
        self.count = count
        self._window = window

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        return self._window.arrays

    @property
    def sequences(self) -> tuple[str, ...]:
        """The sequence of each context of the pack, in order; a sequence of several contexts is there several times."""
        return tuple(self._window.meta["sequences"])

    def torch(self) -> dict[str, torch.Tensor]:
        """The arrays as tensors, without a copy. Writing to one changes this process's pages only."""
        import torch

        return {
            name: torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]  # torch types it so
            for name, array in self._window.private().items()
        }

    def close(self) -> None:
        """Drops the arrays; tensors and views that are still held stay valid."""
        self._window.close()


class Feed:
    """A connection to one packer, made when it is needed and again when it breaks.

    `stop` is looked at while waiting; `timeout_s` bounds the wait for one micro-batch, None: for ever.
    """

    def __init__(
        self, path: Path | str, *, stop: Callable[[], bool] | None = None, timeout_s: float | None = None
    ) -> None:
        self._path = checked_path(Path(path))
        self._stop = stop
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None

    def batch(self, step: int) -> Generator[MicroBatch, None, None]:
        """The micro-batches of a step, in order. Raises FeedError, FeedTimeout, FeedStopped, BadWindow, Protocol."""
        index, last = 0, False
        while not last:
            micro_batch, last = self._ask(step, index)
            try:
                yield micro_batch
            finally:
                micro_batch.close()
                self._acknowledge(step, index)
            index += 1

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, step: int, index: int) -> tuple[MicroBatch, bool]:
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        what = f"step {step} micro-batch {index} from {self._path}"
        while True:
            self._check(deadline, what)
            try:
                sock = self._connected()
                sock.sendall(frame(Request(kind="ask", step=step, microbatch=index)))
                answer, fd = receive_answer(sock, partial(self._readable, sock, deadline, what))
            except (ConnectionError, FileNotFoundError):
                # The packer was killed, or is not up yet: its successor is asked for the same window.
                self.close()
                time.sleep(_AGAIN_S)
                continue
            except BaseException:
                self.close()
                raise
            if (answer.step, answer.microbatch) != (step, index):
                self.close()
                if fd is not None:
                    os.close(fd)
                raise Protocol(
                    f"{what}: the packer answered with step {answer.step} micro-batch {answer.microbatch}"
                )
            if fd is None:
                raise FeedError(f"{what}: {answer.error}")
            return MicroBatch(step, index, answer.microbatches, SealedWindow(fd)), answer.last

    def _acknowledge(self, step: int, index: int) -> None:
        if self._socket is not None:
            # A packer that is gone has nothing to free.
            with contextlib.suppress(ConnectionError):
                self._socket.sendall(frame(Request(kind="ack", step=step, microbatch=index)))

    def _connected(self) -> socket.socket:
        if self._socket is None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                made.connect(str(self._path))
            except BaseException:
                made.close()
                raise
            self._socket = made
        return self._socket

    def _readable(self, sock: socket.socket, deadline: float | None, what: str) -> None:
        # Not select(2), which fails on descriptors over 1,023.
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not poll.poll(_TICK_S * 1000):
            self._check(deadline, what)

    def _check(self, deadline: float | None, what: str) -> None:
        if self._stop is not None and self._stop():
            raise FeedStopped(f"stopped while waiting for {what}")
        if deadline is not None and time.monotonic() > deadline:
            raise FeedTimeout(
                f"no {what} within {self._timeout_s} s; is the packer up, and is the batch yielded?"
            )
