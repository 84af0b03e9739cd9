"""Ranks and packer over a real Unix socket: order, waiting, hanging up, coming back."""

from __future__ import annotations

import array
import asyncio
import gc
import os
import socket
import tempfile
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from pipeline.feed.ahead import WindowId
from pipeline.feed.feed import Feed, FeedError, FeedStopped, FeedTimeout, MicroBatch
from pipeline.feed.memfd import plan_layout, seal
from pipeline.feed.server import WindowRefused, listen, serve_windows
from pipeline.feed.wire import (
    MAX_MESSAGE,
    Answer,
    Protocol,
    Request,
    frame,
    receive_answer,
)

DEADLINE_S = 20
ROUTED = np.array([[1, 300], [65535, 0]], np.uint16)


class Shelf:
    """A double of the packer: two windows a step, each with its coordinates as its values, for the steps put on it."""

    def __init__(self) -> None:
        self.fds: dict[WindowId, int] = {}
        self.refused: dict[int, str] = {}
        self.released: list[WindowId] = []
        self.waiting = 0
        self.departed = 0
        self.changed = asyncio.Condition()

    async def put(self, step: int) -> None:
        async with self.changed:
            for microbatch in range(2):
                arrays = {
                    "tokens": np.array([step, microbatch, 7]),
                    "routed": ROUTED,
                    "narrow": ROUTED.astype(np.uint8),
                }
                layout = plan_layout(
                    {"sequences": [f"s-{step}-{microbatch}"], "cp": 1},
                    {name: (array.dtype.name, array.shape) for name, array in arrays.items()},
                )
                self.fds[WindowId(step, microbatch)] = seal(layout, arrays)
            self.changed.notify_all()

    async def hold(self, rank: object, window: WindowId, revision: int) -> tuple[Answer, int]:
        if window.step in self.refused:
            raise WindowRefused(self.refused[window.step])
        self.waiting += 1
        try:
            async with self.changed:
                self.changed.notify_all()
                await self.changed.wait_for(lambda: window in self.fds)
        finally:
            self.waiting -= 1
        answer = Answer(
            step=window.step,
            microbatch=window.microbatch,
            microbatches=2,
            last=window.microbatch == 1,
            revision=revision + 1 if revision else 0,
        )
        return answer, self.fds[window]

    def release(self, rank: object, window: WindowId) -> None:
        self.released.append(window)

    def gone(self, rank: object) -> None:
        self.departed += 1

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)


@pytest.fixture
def path() -> Iterator[Path]:
    # Not tmp_path: its name may be longer than a socket's may be.
    with tempfile.TemporaryDirectory(prefix="pt") as directory:
        yield Path(directory) / "packer-0.sock"


@pytest.fixture
async def shelf() -> AsyncIterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.close()


@asynccontextmanager
async def serving(path: Path, shelf: Shelf) -> AsyncIterator[None]:
    """A server that dies as a killed one does: without unlinking its socket."""
    listening = listen(path)
    task = asyncio.create_task(serve_windows(listening, shelf))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        listening.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def values(feed: Feed, step: int) -> list[list[int]]:
    return [micro_batch.arrays["tokens"].tolist() for micro_batch in feed.batch(step)]


def open_fds() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_micro_batches_come_in_order_and_are_acknowledged_after_use(path: Path, shelf: Shelf) -> None:
    await shelf.put(1)
    async with serving(path, shelf):
        with Feed(path, timeout_s=DEADLINE_S) as feed:
            batch = feed.batch(1)
            first: MicroBatch = await asyncio.to_thread(next, batch)
            assert (first.step, first.index, first.count, first.sequences) == (1, 0, 2, ("s-1-0",))
            assert first.arrays["tokens"].tolist() == [1, 0, 7]
            assert shelf.released == []
            second = await asyncio.to_thread(next, batch)
            assert second.arrays["tokens"].tolist() == [1, 1, 7]
            assert first.arrays == {}
            await until(lambda: shelf.released == [WindowId(1, 0)])
            assert await asyncio.to_thread(next, batch, None) is None
            await until(lambda: shelf.released == [WindowId(1, 0), WindowId(1, 1)])
        await until(lambda: shelf.departed == 1)


async def test_a_batch_left_early_is_acknowledged(path: Path, shelf: Shelf) -> None:
    await shelf.put(1)
    async with serving(path, shelf):
        with Feed(path, timeout_s=DEADLINE_S) as feed:
            batch = feed.batch(1)
            await asyncio.to_thread(next, batch)
            batch.close()
            await until(lambda: shelf.released == [WindowId(1, 0)])


async def test_a_rank_waits_for_its_batch(path: Path, shelf: Shelf) -> None:
    async with serving(path, shelf):
        with Feed(path, timeout_s=DEADLINE_S) as feed:
            reading = asyncio.create_task(asyncio.to_thread(values, feed, 3))
            await until(lambda: shelf.waiting == 1)
            await shelf.put(3)
            assert await reading == [[3, 0, 7], [3, 1, 7]]


async def test_several_ranks_share_one_copy(path: Path, shelf: Shelf) -> None:
    await shelf.put(1)
    async with serving(path, shelf):
        feeds = [Feed(path, timeout_s=DEADLINE_S) for _ in range(4)]
        got = await asyncio.gather(*[asyncio.to_thread(values, feed, 1) for feed in feeds])
        assert got == [[[1, 0, 7], [1, 1, 7]]] * 4
        for feed in feeds:
            feed.close()


async def test_a_killed_packer_is_asked_again_for_the_same_window(path: Path, shelf: Shelf) -> None:
    await shelf.put(1)
    with Feed(path, timeout_s=DEADLINE_S) as feed:
        batch = feed.batch(1)
        reading = asyncio.create_task(asyncio.to_thread(next, batch))  # before there is a packer at all
        async with serving(path, shelf):
            first = await reading
        assert first.arrays["tokens"].tolist() == [1, 0, 7]  # what was handed over outlives the packer
        reading = asyncio.create_task(asyncio.to_thread(lambda: [m.arrays["tokens"].tolist() for m in batch]))
        async with serving(path, shelf):
            assert await reading == [[1, 1, 7]]


async def test_a_packer_killed_while_a_rank_waits(path: Path, shelf: Shelf) -> None:
    with Feed(path, timeout_s=DEADLINE_S) as feed:
        reading = asyncio.create_task(asyncio.to_thread(values, feed, 2))
        async with serving(path, shelf):
            await until(lambda: shelf.waiting == 1)
        assert shelf.waiting == 0
        await shelf.put(2)
        async with serving(path, shelf):
            assert await reading == [[2, 0, 7], [2, 1, 7]]


async def test_a_refusal_reaches_the_rank_and_the_connection_lives(path: Path, shelf: Shelf) -> None:
    shelf.refused[2] = "needs 7 bytes"
    await shelf.put(1)
    async with serving(path, shelf):
        with Feed(path, timeout_s=DEADLINE_S) as feed:
            with pytest.raises(FeedError, match=r"step 2 micro-batch 0 .*needs 7 bytes"):
                await asyncio.to_thread(values, feed, 2)
            assert await asyncio.to_thread(values, feed, 1) == [[1, 0, 7], [1, 1, 7]]
            assert shelf.departed == 0


async def test_a_reason_that_grows_on_its_way_reaches_the_rank(path: Path, shelf: Shelf) -> None:
    shelf.refused[2] = "\x01" * 9000  # six bytes each in JSON
    async with serving(path, shelf):
        with Feed(path, timeout_s=DEADLINE_S) as feed, pytest.raises(FeedError, match=r"\x01{1000}"):
            await asyncio.to_thread(values, feed, 2)


async def test_an_answer_that_cannot_be_sent_does_not_leave_its_rank_to_wait(path: Path) -> None:
    class Failing(Shelf):
        async def hold(self, rank: object, window: WindowId, revision: int) -> tuple[Answer, int]:
            answer, fd = await super().hold(rank, window, revision)
            return answer, fd if self.departed else 1 << 20  # no descriptor

    shelf = Failing()
    await shelf.put(1)
    async with serving(path, shelf):
        with Feed(path, timeout_s=DEADLINE_S) as feed:
            assert await asyncio.to_thread(values, feed, 1) == [[1, 0, 7], [1, 1, 7]]
    shelf.close()


async def test_waiting_ends_by_time_or_by_the_callers_wish(path: Path, shelf: Shelf) -> None:
    for stop, expected in ((None, FeedTimeout), (lambda: shelf.waiting > 0, FeedStopped)):
        with Feed(path, timeout_s=0.3 if stop is None else DEADLINE_S, stop=stop) as feed:
            if stop is None:
                with pytest.raises(FeedTimeout, match="is the packer up"):
                    await asyncio.to_thread(values, feed, 9)
            async with serving(path, shelf):
                with pytest.raises(expected, match="step 9 micro-batch 0"):
                    await asyncio.to_thread(values, feed, 9)
                # A feed that gave up hung up: an answer that comes late is not taken for the next one's.
                await until(lambda: shelf.waiting == 0)


@pytest.mark.parametrize(
    "message",
    [
        (0).to_bytes(4, "big"),
        (MAX_MESSAGE + 1).to_bytes(4, "big"),
        (2).to_bytes(4, "big") + b"{}",
        (4).to_bytes(4, "big") + b"\xff\xfe\xfd\xfc",
        frame(Request(kind="ask", step=9, microbatch=0)) * 2,
        b"\0\0",
        (100).to_bytes(4, "big") + b"{",
    ],
)
async def test_a_malformed_message_costs_only_its_sender(path: Path, shelf: Shelf, message: bytes) -> None:
    await shelf.put(1)
    async with serving(path, shelf):
        loop = asyncio.get_running_loop()
        bad = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bad.setblocking(False)
        await loop.sock_connect(bad, str(path))
        await loop.sock_sendall(bad, message)
        bad.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(DEADLINE_S):
            assert await loop.sock_recv(bad, 1) == b""
        bad.close()
        assert shelf.departed == 1
        with Feed(path, timeout_s=DEADLINE_S) as feed:
            assert len(await asyncio.to_thread(values, feed, 1)) == 2


async def test_descriptors_sent_to_the_packer_are_dropped(path: Path, shelf: Shelf) -> None:
    async with serving(path, shelf):
        bad = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bad.connect(str(path))
        ack = frame(Request(kind="ack", step=1, microbatch=0))
        bad.sendall(ack)
        await until(lambda: len(shelf.released) == 1)
        before = open_fds()
        with Path("/dev/null").open() as file:
            socket.send_fds(bad, [ack], [file.fileno()] * 8)
            await until(lambda: len(shelf.released) == 2)
        assert open_fds() == before
        bad.close()
        await until(lambda: shelf.departed == 1)


async def test_a_rank_that_hangs_up_while_waiting_is_told_of(path: Path, shelf: Shelf) -> None:
    async with serving(path, shelf):
        rank = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        rank.connect(str(path))
        rank.sendall(frame(Request(kind="ask", step=9, microbatch=0)))
        await until(lambda: shelf.waiting == 1)
        rank.close()
        await until(lambda: shelf.departed == 1 and shelf.waiting == 0)


async def test_nothing_leaks_over_many_batches(path: Path, shelf: Shelf) -> None:
    await shelf.put(1)
    async with serving(path, shelf):
        with Feed(path, timeout_s=DEADLINE_S) as feed:
            await asyncio.to_thread(values, feed, 1)
            before = open_fds()
            for _ in range(20):
                await asyncio.to_thread(values, feed, 1)
            assert open_fds() == before


async def test_torch_sees_the_same_values_without_a_warning(path: Path, shelf: Shelf) -> None:
    await shelf.put(1)
    async with serving(path, shelf):
        with Feed(path, timeout_s=DEADLINE_S) as feed:
            batch = feed.batch(1)
            micro_batch = await asyncio.to_thread(next, batch)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                tensors = micro_batch.torch()
            tensors["tokens"][0] = 99  # private: no fault, and nobody else sees it
            assert tensors["tokens"].tolist() == [99, 0, 7]
            assert micro_batch.arrays["tokens"].tolist() == [1, 0, 7]
            # What torch has as unsigned: routing.
            assert [str(tensors[name].dtype) for name in ("routed", "narrow")] == [
                "torch.uint16",
                "torch.uint8",
            ]
            assert tensors["routed"].tolist() == ROUTED.tolist()
            assert tensors["narrow"].tolist() == (ROUTED & 255).tolist()
            batch.close()
            assert tensors["tokens"].tolist() == [99, 0, 7]


async def test_a_rank_says_which_revision_it_wants_and_is_told_which_it_has(path: Path, shelf: Shelf) -> None:
    await shelf.put(1)
    async with serving(path, shelf):
        with Feed(path, timeout_s=DEADLINE_S) as feed:
            for wanted, told in ((0, 0), (3, 4)):
                batch = feed.batch(1, wanted)
                micro_batch = await asyncio.to_thread(next, batch)
                assert micro_batch.revision == told
                assert micro_batch.meta == {"sequences": ["s-1-0"], "cp": 1}
                batch.close()


@pytest.mark.parametrize(("step", "revision"), [(2, 5), (1, 4)])
def test_an_answer_to_another_ask_is_refused_and_its_window_given_back(
    path: Path, step: int, revision: int
) -> None:
    before = open_fds()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen()

        def answer() -> None:
            rank, _ = server.accept()
            with rank, Path("/dev/null").open() as file:
                rank.recv(1024)
                other = Answer(step=step, microbatch=0, microbatches=1, last=True, revision=revision)
                socket.send_fds(rank, [frame(other)], [file.fileno()])

        packer = threading.Thread(target=answer)
        packer.start()
        with (
            Feed(path, timeout_s=DEADLINE_S) as feed,
            pytest.raises(Protocol, match=f"answered with step {step} micro-batch 0, revision {revision}"),
        ):
            next(feed.batch(1, revision=5))
        packer.join()
    assert open_fds() == before


def test_an_answer_with_the_wrong_descriptors_is_refused_and_leaks_none() -> None:
    ok = Answer(step=1, microbatch=0, microbatches=1)
    error = Answer(step=1, microbatch=0, error="no")
    before = open_fds()
    for answer, count in ((ok, 0), (ok, 2), (ok, 30), (error, 1)):
        ours, theirs = socket.socketpair()
        with ours, theirs, Path("/dev/null").open() as file:
            rights = (
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * count))]
                if count
                else []
            )
            theirs.sendmsg([frame(answer)], rights)
            with pytest.raises(Protocol):
                receive_answer(ours, lambda: None)
    assert open_fds() == before


def test_a_received_descriptor_is_close_on_exec() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, Path("/dev/null").open() as file:
        socket.send_fds(theirs, [frame(Answer(step=1, microbatch=0, microbatches=1))], [file.fileno()])
        _, fd = receive_answer(ours, lambda: None)
        assert fd is not None
        assert not os.get_inheritable(fd)
        os.close(fd)
