"""Bytes on their way: never more than the gate's, the earliest window first, nothing lost to those who leave."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.feed.ahead import WindowId
from pipeline.feed.gate import Gate

A, B = WindowId(1, 0), WindowId(1, 1)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Visit:
    """One that goes in, and stays until it is told."""

    def __init__(self, gate: Gate, window: WindowId, size: int, order: list[str], name: str) -> None:
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(gate, window, size, order, name))

    async def _run(self, gate: Gate, window: WindowId, size: int, order: list[str], name: str) -> None:
        async with gate.entered(window, size):
            order.append(name)
            await self.leave.wait()


async def test_the_earliest_window_goes_first_and_nobody_passes_it() -> None:
    gate, order = Gate(10), list[str]()
    inside = Visit(gate, B, 8, order, "inside")
    await turns()
    later = Visit(gate, B, 2, order, "later")
    await turns()
    assert order == ["inside", "later"]
    waiting = [Visit(gate, B, 1, order, "b"), Visit(gate, A, 5, order, "a"), Visit(gate, A, 5, order, "a2")]
    later.leave.set()
    await turns()
    # Room for b, but an earlier window waits for more.
    assert order == ["inside", "later"]
    inside.leave.set()
    await turns()
    assert order[2:] == ["a", "a2"]
    waiting[1].leave.set()
    await turns()
    assert order[4:] == ["b"]
    for each in waiting:
        each.leave.set()
        await each.task


async def test_one_that_is_larger_than_the_gate_has_it_alone() -> None:
    gate, order = Gate(10), list[str]()
    small, large = Visit(gate, A, 1, order, "small"), Visit(gate, A, 99, order, "large")
    await turns()
    assert order == ["small"]
    small.leave.set()
    await turns()
    after = Visit(gate, A, 1, order, "after")
    await turns()
    assert order == ["small", "large"]
    large.leave.set()
    await turns()
    assert order == ["small", "large", "after"]
    after.leave.set()
    await after.task


@pytest.mark.parametrize("moment", ["waiting", "admitted", "inside"])
async def test_whoever_is_cancelled_gives_back_what_it_had(moment: str) -> None:
    gate, order = Gate(10), list[str]()
    first = Visit(gate, A, 10, order, "first")
    await turns()
    second = Visit(gate, A, 10, order, "second")
    await turns()
    if moment != "waiting":
        first.leave.set()
        await first.task  # the second one is let in, but has not run yet
    if moment == "inside":
        await turns()
    second.task.cancel()
    await asyncio.wait([second.task])
    first.leave.set()
    await turns()
    third = Visit(gate, B, 10, order, "third")
    await turns()
    assert order[-1] == "third"
    third.leave.set()
    await third.task


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 15), st.booleans()), max_size=20))
def test_never_too_much_and_everybody_gets_in(visits: list[tuple[int, int, bool]]) -> None:
    async def run() -> None:
        gate, inside, entered = Gate(10), 0, 0

        async def one(microbatch: int, size: int, slow: bool) -> None:
            nonlocal inside, entered
            async with gate.entered(WindowId(1, microbatch), size):
                inside += min(size, 10)
                entered += 1
                assert inside <= 10
                await turns(4 if slow else 1)
                inside -= min(size, 10)

        await asyncio.gather(*(one(*visit) for visit in visits))
        assert entered == len(visits)

    asyncio.run(run())
