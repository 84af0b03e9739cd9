"""A trainer of someone else's: its loop, and its reports."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from examples.feeds.drain import ADAPTERS, drain, next_step
from examples.feeds.loop import train
from pipeline.feed.reporting import BlockingReports, ReportRefused, Reports
from pipeline.log import Log
from pipeline.store import ObjectStore
from schemas.config import RunConfig
from schemas.envelope import Event
from schemas.facts import BatchConsumed, StepTrained
from schemas.payload import Ref
from tests.packer_parts import DEADLINE_S, LENGTH, MICROBATCHES, packer, publish_batch, yield_batch

REF = Ref(key="w", bytes=0, crc32c=0)
TOLD = ("batch.consumed", "step.trained", "policy.published")


def numbers(**other: Any) -> dict[str, Any]:
    told = {"weights": REF, "optimizer": REF, "loss": 0.0, "grad_norm": 1.0, "kl": 0.0, "seconds": 1.0}
    return {**told, **other}


async def told(log: Log, step: int) -> list[Event]:
    """The three facts of a step; asserts that each is caused by the one before."""
    cause = await log.last("batch.yielded", "all", f"{step:06d}")
    found: list[Event] = []
    for type_ in TOLD:
        event = await log.last(type_, "all", f"{step:06d}")
        assert event is not None, f"no {type_} of step {step}"
        assert cause is not None
        assert event.causation == cause.id
        found.append(event)
        cause = event
    return found


async def test_a_trainer_of_ones_own_takes_each_step_once_and_goes_on_after_the_last(
    packer_config: RunConfig, log: Log, store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    def config(steps: int) -> RunConfig:
        return packer_config.model_copy(update={"steps": steps})

    async with packer(packer_config, log):
        for step in (1, 2):
            await yield_batch(log, store, step)
        await asyncio.to_thread(train, config(1), timeout_s=DEADLINE_S)
        for name in ADAPTERS:
            assert await next_step(packer_config) == 2
            await asyncio.to_thread(drain, packer_config, name, 0, 2, DEADLINE_S)
        # The same again, as after a crash: step 1 is not given twice, the weights are those of step 1.
        await asyncio.to_thread(train, config(2), timeout_s=DEADLINE_S)
    _, first, _ = await told(log, 1)
    consumed, second, _ = await told(log, 2)
    assert isinstance(first.fact, StepTrained)
    assert isinstance(second.fact, StepTrained)
    assert second.fact.parent == first.fact.weights
    assert await store.get(first.fact.weights) != await store.get(second.fact.weights)
    assert isinstance(consumed.fact, BatchConsumed)
    # Of rank 0's half: each context's first loss token is predicted by the token before it.
    assert consumed.fact.loss_tokens == MICROBATCHES * LENGTH // 2
    printed = capsys.readouterr().out
    assert printed.count("step 1: loss") == printed.count("step 2: loss") == 1
    assert printed.count(f"of {MICROBATCHES}\n") == len(ADAPTERS) * MICROBATCHES
    assert "input_ids: torch.int64 nested, lengths [50]" in printed


async def test_a_step_is_reported_once_in_order_and_by_one(log: Log, packer_config: RunConfig) -> None:
    for step in (1, 2, 3):
        await publish_batch(log, step, REF)
    async with Reports.of(packer_config) as reports, Reports.of(packer_config) as other:
        assert reports.last is None
        with pytest.raises(ReportRefused, match=r"step 2 leaves some out: .* takes step 1"):
            await reports.trained(2, **numbers())
        with pytest.raises(ValueError, match="finite"):
            await reports.trained(1, **numbers(loss=float("nan")))
        assert await log.latest("batch.consumed") is None
        fact = await reports.trained(1, **numbers())
        assert (fact.parent, fact.loss_tokens, reports.last) == (None, 150, fact)
        with pytest.raises(ReportRefused, match="step 1 is reported already"):
            await reports.trained(1, **numbers())
        with pytest.raises(ReportRefused, match=r"step 1 was trained by another .*: stop one"):
            await other.trained(1, **numbers())
    async with Reports(packer_config.broker, log.run) as again:
        assert again.last == fact
        assert (await again.trained(2, **numbers())).parent == fact.weights
        with pytest.raises(ValueError, match="bytes need a store"):
            await again.trained(3, **numbers(weights=b"w"))
        await again.trained(3, **numbers())
        with pytest.raises(ReportRefused, match="step 4 cannot have been trained"):
            await again.trained(4, **numbers())
    with pytest.raises(ReportRefused, match="not open"):
        await again.trained(4, **numbers())
    for step in (1, 2, 3):
        await told(log, step)
    assert (await log.size())[0] == 3 * (1 + len(TOLD)), "nothing was said twice, or of what was refused"


async def test_what_a_crash_left_out_is_told_at_the_next_start(log: Log, packer_config: RunConfig) -> None:
    await publish_batch(log, 1, REF)
    batch = await log.last("batch.yielded", "all", "000001")
    consumed = await log.publish(BatchConsumed(step=1, sequences=6, loss_tokens=150), batch)
    trained = StepTrained(step=1, parent=None, loss_tokens=150, **numbers())
    await log.publish(trained, consumed.event)

    def blocking() -> StepTrained | None:
        with BlockingReports(Reports.of(packer_config)) as reports:
            return reports.last

    assert await asyncio.to_thread(blocking) == trained
    await told(log, 1)
