"""The trainer's side: the micro-batches of a step, one after the other, from the rank's packer. Synchronous.

    feed = open_feed(config, rank)              # or open_feed(directory of the sockets, rank, Sizes(dp, cp, tp, pp))
    for micro_batch in feed.batch(step):
        ...                                     # micro_batch.torch(), or micro_batch.arrays (numpy)

The rank's place in training is the trainer's checkpoint: one that has taken step k asks for step k + 1. A step that the log
does not have as trained is given again, from the same plan, however often it was given before.

A step may be planned anew while it is trained, without sequences whose objects are damaged. At the end of a step the ranks
agree on the largest `MicroBatch.revision` that any of them was given: unless all had that one for all of their micro-batches,
they drop the step's gradients and take it again, `feed.batch(step, revision)`. Micro-batches keep their number and sizes.

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
from pipeline.feed.wire import Protocol, Request, checked_path, frame, receive_answer, socket_in, socket_path
from schemas.config import RunConfig
from schemas.parallel import Sizes

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

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
    """What a rank has of one packed micro-batch: `arrays` as `pipeline.batch.windows` describes them, read-only and shared.
    `index` of `count` in the step; `revision`: of the step's plan."""

    def __init__(self, step: int, index: int, count: int, window: SealedWindow, revision: int = 0) -> None:
        self.step = step
        self.index = index
        self.count = count
        self.revision = revision
        self._window = window

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        return self._window.arrays

    @property
    def sequences(self) -> tuple[str, ...]:
        """The sequence of each context of the pack, in order; a sequence of several contexts is there several times."""
        return tuple(self.meta["sequences"])

    @property
    def meta(self) -> dict[str, Any]:
        """Of the window: run, step, microbatch, dp, cp, pp, tp, layout; cp_size and cp_rank, of this micro-batch, and its group;
        the revision that it was built with; sequences."""
        return self._window.meta

    def torch(self) -> dict[str, torch.Tensor]:
        """The arrays as tensors, without a copy. Writing to one changes this process's pages only."""
        import torch

        return {
            name: torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]  # torch types it so
            for name, array in self._window.private().items()
        }

    def redistribute(
        self, embeddings: torch.Tensor, group: ProcessGroup | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The encoder's output for the images of `images.pixels`, [rows, hidden], to the rows of this window: (rows [N, hidden],
        local rows that they are, [N]). A collective over the data- and context-parallel ranks; see `pipeline.feed.images`."""
        from pipeline.feed.images import redistribute

        return redistribute(embeddings, self.torch(), group)

    def close(self) -> None:
        """Drops the arrays; tensors and views that are still held stay valid."""
        self._window.close()


def open_feed(
    run: RunConfig | Path | str,
    rank: int,
    sizes: Sizes | None = None,
    *,
    stop: Callable[[], bool] | None = None,
    timeout_s: float | None = None,
) -> Feed:
    """The feed of a trainer's rank, numbered as Megatron does: tensor-parallel fastest, then context, data and pipeline.

    `run`: its configuration, or the directory of its packers' sockets, which needs `sizes`. `stop`, `timeout_s`: as of `Feed`.
    Raises ValueError on a rank that there is not, SocketPathTooLong.
    """
    if isinstance(run, RunConfig):
        path = socket_path(run, (sizes or run.batch.sizes).packer_of(rank))
    elif sizes is not None:
        path = socket_in(run, sizes.packer_of(rank))
    else:
        raise ValueError(f"sockets in {run}: give the sizes (dp, cp, tp, pp) of the trainer too")
    return Feed(path, stop=stop, timeout_s=timeout_s)


class Feed:
    """A connection to one packer, made when it is needed and again when it breaks.

    `stop` is looked at while waiting; `timeout_s` bounds the wait for one micro-batch, None: for ever.
    """

    def __init__(
        self, path: Path | str, *, stop: Callable[[], bool] | None = None, timeout_s: float | None = None
    ) -> None:
        self.path = checked_path(Path(path))
        self._stop = stop
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None

    def batch(self, step: int, revision: int = 0) -> Generator[MicroBatch, None, None]:
        """The micro-batches of a step, in order, each of at least that revision. Raises FeedError, FeedTimeout, FeedStopped,
        BadWindow, Protocol."""
        index, last = 0, False
        while not last:
            micro_batch, last = self._ask(step, index, revision)
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

    def _ask(self, step: int, index: int, revision: int) -> tuple[MicroBatch, bool]:
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        what = f"step {step} micro-batch {index} from {self.path}"
        while True:
            self._check(deadline, what)
            try:
                sock = self._connected()
                asking = Request(kind="ask", step=step, microbatch=index, revision=revision)
                sock.sendall(frame(asking))
                answer, fd = receive_answer(sock, partial(self._readable, sock, deadline, what))
            except (ConnectionError, FileNotFoundError):
                # The packer was killed, or is not up yet: its successor is asked for the same window.
                self.close()
                time.sleep(_AGAIN_S)
                continue
            except BaseException:
                self.close()
                raise
            told = (answer.step, answer.microbatch)
            if told != (step, index) or (fd is not None and answer.revision < revision):
                self.close()
                if fd is not None:
                    os.close(fd)
                raise Protocol(
                    f"{what}, revision {revision} or newer: the packer answered with step {answer.step} micro-batch "
                    f"{answer.microbatch}, revision {answer.revision}"
                )
            if fd is None:
                raise FeedError(f"{what}: {answer.error}")
            window = SealedWindow(fd)
            return MicroBatch(step, index, answer.microbatches, window, answer.revision), answer.last

    def _acknowledge(self, step: int, index: int) -> None:
        if self._socket is not None:
            # A packer that is gone has nothing to free.
            with contextlib.suppress(ConnectionError):
                self._socket.sendall(frame(Request(kind="ack", step=step, microbatch=index)))

    def _connected(self) -> socket.socket:
        if self._socket is None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                made.connect(str(self.path))
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
