"""A damaged object in a pipeline that runs: sampler, packer and trainer rank, on a real broker and the store's own files.

The last micro-batch is the damaged one, and a packer that builds one window ahead meets it when the rank has trained on the
first already: what the rank has done by then is to be undone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from pipeline.engines.policies import policy_dir  # noqa: E402  # after importorskip
from pipeline.engines.tiny.model import load_model  # noqa: E402
from pipeline.log import Log  # noqa: E402
from pipeline.replay.rerun import Rerun  # noqa: E402
from pipeline.replay.service import SERVICES  # noqa: E402
from pipeline.store import ObjectStore  # noqa: E402
from pipeline.store.payload import write_payload  # noqa: E402
from schemas.config import RunConfig  # noqa: E402
from schemas.facts import (  # noqa: E402
    BatchConsumed,
    BatchReplanned,
    BatchYielded,
    Fact,
    RunStarted,
    SampleCompleted,
    SampleGraded,
    SequenceDispatched,
    SequenceQuarantined,
    StepTrained,
)
from schemas.keys import payload_key  # noqa: E402
from schemas.names import attempt_id  # noqa: E402
from schemas.payload import PayloadHeader  # noqa: E402
from schemas.plan import Plan  # noqa: E402
from services import packer, sampler, trainer  # noqa: E402
from services.trainer.loss import Clip, policy_loss  # noqa: E402
from services.trainer.model import label_logprobs  # noqa: E402
from tests.integration.test_publish import stored  # noqa: E402
from tests.integration.test_trainer import serving  # noqa: E402
from tests.natsserver import free_port  # noqa: E402
from tests.packer_parts import Columns, columns_of  # noqa: E402
from tests.unit.factories import finished  # noqa: E402

pytestmark = pytest.mark.timeout(90)
LENGTH = 12
F = TypeVar("F", bound=Fact)
REWARDS = (1.0, 0.0, 0.0)


def config(run: str, sockets: Path) -> RunConfig:
    """One group, whose sequences are too long to share a micro-batch."""
    return RunConfig.model_validate(
        {
            "run": run,
            "steps": 1,
            "batch": {"dp": 1, "token_budget": 16, "overlong": "drop"},
            "packer": {"socket_dir": str(sockets), "prefetch": 1},
            "trainer": {"rendezvous": f"127.0.0.1:{free_port()}"},
            "pools": [{"name": "p", "harness": "chat"}],
            "sources": [
                {
                    "name": "s",
                    "pool": "p",
                    "groups": 1,
                    "group_size": len(REWARDS),
                    "environment": {"kind": "arithmetic"},
                }
            ],
        }
    )


def flipped(path: Path, header: PayloadHeader) -> None:
    with path.open("r+b") as file:
        file.seek(header.column("logprobs").offset + 4 * (LENGTH - 1))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def truncated(path: Path, header: PayloadHeader) -> None:
    os.truncate(path, header.bytes - 1)


async def rolled_out(log: Log, store: ObjectStore) -> None:
    """What dispatcher, hosts and grader say of the group, in as far as the sampler listens."""
    for member, reward in enumerate(REWARDS):
        sequence = f"s-000000-{member}"
        await log.publish(
            SequenceDispatched(
                source="s",
                sample="s-000000",
                sequence=sequence,
                member=member,
                group_size=len(REWARDS),
                pool="p",
                task_index=0,
            )
        )
        key = payload_key(log.run, "s", attempt_id(sequence, 1))
        header = await write_payload(store, key, columns_of(member, LENGTH))
        fact = finished(sequence, reward, tokens=LENGTH, generated=LENGTH // 2)
        await log.publish(fact.model_copy(update={"payload": header}))


async def first(log: Log, kind: type[F]) -> F:
    async with asyncio.timeout(60):
        async for event in log.subscribe(kind.type):
            assert isinstance(event.fact, kind)
            return event.fact
    raise AssertionError("the log ended")


def step_of(plan: Plan, members: Sequence[int]) -> tuple[float, float]:
    """Loss and gradient norm of the first step, of these sequences alone, with the weights that they have in the whole batch."""
    model, total = load_model(policy_dir("tiny")), 0.0
    for row, member in enumerate(plan.rows.sequence):
        if member not in members:
            continue
        columns: Columns = columns_of(int(plan.sequences[member].sequence[-1]), LENGTH)
        shifted = {name: np.append(columns[name][1:], 0) for name in ("tokens", "loss_mask", "logprobs")}
        labels, mask, old = (
            torch.from_numpy(shifted["tokens"].astype(np.int64)),
            torch.from_numpy(shifted["loss_mask"].astype(np.float32)),
            torch.from_numpy(shifted["logprobs"].astype(np.float32)),
        )
        tokens = torch.from_numpy(columns["tokens"].astype(np.int64))
        new = label_logprobs(model, tokens, labels, torch.tensor([0, LENGTH], dtype=torch.int32))
        terms = policy_loss(
            new, old, mask * plan.rows.advantage[row], mask * plan.rows.loss_weight[row], Clip(0.2, 0.28)
        )
        terms.loss.backward()
        total += float(terms.loss.detach())
    gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    return total, float(torch.cat(gradients).norm())


@pytest.mark.parametrize("damage", [flipped, truncated])
async def test_a_damaged_object_costs_its_sequence_and_nothing_else(
    damage: Callable[[Path, PayloadHeader], None],
    run_name: str,
    log: Log,
    store: ObjectStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "packtrain")
    run = config(run_name, tmp_path)
    await log.publish(RunStarted(run=log.run, config=run.decisions()))
    async with serving(run, log, store, sampler):
        await rolled_out(log, store)
        completed = await first(log, SampleCompleted)
        await log.publish(
            SampleGraded(source="s", sample=completed.sample, grader="none", rewards=completed.rewards)
        )
        yielded = await first(log, BatchYielded)
        plan = Plan.model_validate_json(await store.get(yielded.plan))
        assert plan.microbatches == len(REWARDS)
        lost = plan.rows.sequence[plan.rows.microbatch.index(len(REWARDS) - 1)]
        name, header = plan.sequences[lost].sequence, plan.sequences[lost].payload
        damage(tmp_path / "objects" / header.key, header)
        async with serving(run, log, store, packer, trainer):
            quarantined = await first(log, SequenceQuarantined)
            trained = await first(log, StepTrained)
            consumed = await first(log, BatchConsumed)
    assert (quarantined.sequence, quarantined.step, quarantined.reason) == (name, 1, "damaged")
    assert quarantined.key == header.key
    assert header.key in quarantined.detail
    if damage is flipped:
        assert (quarantined.column, quarantined.block) == ("logprobs", 0)
        assert "column logprobs, block 0, rows [0, 12)" in quarantined.detail
    assert await first(log, BatchReplanned) == BatchReplanned(step=1, revision=1, without=(name,))
    assert "step 1 was planned anew (revision 1) while it was trained" in caplog.text
    kept = [member for member in range(len(REWARDS)) if member != lost]
    assert trained.loss_tokens == len(kept) * (LENGTH // 2)
    loss, norm = step_of(plan, kept)
    assert (trained.loss, trained.grad_norm) == (pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=1e-3))
    assert trained.loss != pytest.approx(step_of(plan, range(len(REWARDS)))[0], rel=1e-2)
    # Its blank rows are the batch's too.
    assert consumed == BatchConsumed(step=1, sequences=len(REWARDS), loss_tokens=trained.loss_tokens)
    again = Rerun(log.run, SERVICES["sampler"])
    for event in await stored(log):
        again.feed(event)
    report = again.report()
    assert report.divergences == ()
    assert report.compared["batch.replanned"] == 1
