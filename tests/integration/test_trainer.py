"""One trainer rank as a service, its packer, a real broker and store: resuming, empty micro-batches, ruined gradients."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from pipeline.checksum import crc32c  # noqa: E402  # after importorskip
from pipeline.engines.policies import policy_dir  # noqa: E402
from pipeline.engines.tiny.model import load_model, weights_from_bytes, weights_to_bytes  # noqa: E402
from pipeline.log import Log  # noqa: E402
from pipeline.store import ObjectStore  # noqa: E402
from pipeline.store.payload import write_payload  # noqa: E402
from schemas.config import Broker, RunConfig  # noqa: E402
from schemas.facts import (  # noqa: E402
    BatchConsumed,
    BatchYielded,
    Fact,
    PolicyPublished,
    SourceShare,
    StepTrained,
)
from schemas.keys import optimizer_key, payload_key, plan_key, weights_key  # noqa: E402
from schemas.names import attempt_id, sample_id, sequence_id  # noqa: E402
from schemas.parallel import Sizes  # noqa: E402
from schemas.payload import ContextMeta, Span  # noqa: E402
from schemas.plan import Plan, PlanRows, PlanSequence  # noqa: E402
from schemas.servers import Store  # noqa: E402
from services import packer, trainer  # noqa: E402
from services.process import Context, run_service  # noqa: E402
from services.trainer import ranks  # noqa: E402
from services.trainer.model import optimizer_to_bytes  # noqa: E402
from tests.natsserver import free_port  # noqa: E402

pytestmark = pytest.mark.timeout(90)
LENGTH, LOSS = 12, 5
NEAR = -12.0
"""Log-probability of a rollout that leaves no gradient next to nothing, whatever the policy gives the tokens."""
ONE, FOUR = Sizes(), Sizes(cp=2, tp=2)


@pytest.fixture
def run_config(tmp_path: Path, run_name: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": run_name,
            "steps": 2,
            "batch": {"dp": 1, "layout": "megatron"},
            "packer": {"socket_dir": str(tmp_path)},
            "trainer": {"rendezvous": f"127.0.0.1:{free_port()}"},
            "pools": [{"name": "p", "harness": "chat"}],
            "sources": [
                {
                    "name": "s",
                    "pool": "p",
                    "groups": 1,
                    "group_size": 2,
                    "environment": {"kind": "arithmetic"},
                }
            ],
        }
    )


@asynccontextmanager
async def serving(
    config: RunConfig, log: Log, store: ObjectStore, *services, index: int = 0
) -> AsyncIterator[asyncio.Task]:
    """The services in this process; gives the task of the last."""
    stop = asyncio.Event()
    context = Context(config, "test-0", log, store, stop, logging.getLogger("packtrain"), index)
    tasks = [asyncio.create_task(service.serve(context)) for service in services]
    try:
        yield tasks[-1]
    finally:
        stop.set()
        await asyncio.wait(tasks, timeout=30)
        ranks.leave()


@asynccontextmanager
async def packing(config: RunConfig, log: Log, store: ObjectStore) -> AsyncIterator[None]:
    """All packers of a run, in this process."""
    async with AsyncExitStack() as stack:
        for number in range(config.batch.sizes.packers):
            await stack.enter_async_context(serving(config, log, store, packer, index=number))
        yield


async def first(log: Log, kind: type[Fact], step: int) -> Fact:
    async with asyncio.timeout(60):
        async for event in log.subscribe(kind.type):
            if event.fact.id() == f"{step:06d}":
                return event.fact
    raise AssertionError("the log ended")


async def trained_before(log: Log, store: ObjectStore) -> StepTrained:
    """Step 1, as its ranks left it who died before they could publish the policy."""
    model = load_model(policy_dir("tiny"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(5)[None]).square().mean().backward()
    optimizer.step()
    fact = StepTrained(
        step=1,
        parent=None,
        weights=await store.create(weights_key(log.run, 1, "x"), weights_to_bytes(model.state_dict())),
        optimizer=await store.create(
            optimizer_key(log.run, 1, "x"), optimizer_to_bytes(optimizer, model, ranks.Mesh())
        ),
        loss=0,
        grad_norm=0,
        kl=0,
        loss_tokens=1,
        seconds=1,
    )
    await log.publish(fact)
    return fact


async def yield_batch(
    log: Log, store: ObjectStore, step: int, logprob: float = -1.0, sizes: Sizes = ONE
) -> None:
    """A batch of two sequences, the second with two contexts, in three micro-batches, of which one is empty."""
    mask = (np.arange(LENGTH) >= LENGTH - LOSS).astype(np.uint8)
    sequences: list[PlanSequence] = []
    for member, contexts in enumerate((1, 2)):
        sequence = sequence_id(sample_id("s", step), member)
        whole = np.tile(mask, contexts)
        columns = {
            "tokens": np.arange(LENGTH * contexts, dtype=np.int32) % 40,
            "loss_mask": whole,
            "logprobs": (logprob * whole).astype(np.float32),
            "policy_version": np.zeros(LENGTH * contexts, np.int32),
            "segments": np.zeros((1, 5), np.int32),
        }
        sequences.append(
            PlanSequence(
                source="s",
                sample=sample_id("s", step),
                sequence=sequence,
                payload=await write_payload(
                    store, payload_key(log.run, "s", attempt_id(sequence, 1)), columns
                ),
                contexts=tuple(
                    ContextMeta(
                        offset=LENGTH * i,
                        tokens=LENGTH,
                        generated=LOSS,
                        loss_spans=(Span(start=LENGTH - LOSS, end=LENGTH),),
                        min_version=0,
                        max_version=0,
                    )
                    for i in range(contexts)
                ),
            )
        )
    plan = Plan(
        run=log.run,
        step=step,
        policy_version=step - 1,
        dp=1,
        cp=sizes.cp,
        tp=sizes.tp,
        layout="megatron",
        microbatches=3,
        token_budget=1000,
        loss_tokens=3 * LOSS,
        sequences=tuple(sequences),
        rows=PlanRows(
            sequence=(0, 1, 1),
            context=(0, 0, 1),
            dp=(0, 0, 0),
            microbatch=(0, 0, 1),
            advantage=(1.0, -1.0, -1.0),
            loss_weight=(1 / (3 * LOSS),) * 3,
        ),
    )
    body = plan.model_dump_json().encode()
    share = SourceShare(groups=1, sequences=2, tokens=36, loss_tokens=15, mean_reward=0.5, max_staleness=0)
    await log.publish(
        BatchYielded(
            step=step,
            through=0,
            policy_version=step - 1,
            sources={"s": share},
            microbatches=3,
            plan=await store.create(plan_key(log.run, step, crc32c(body)), body),
        )
    )


async def test_a_trained_step_that_was_not_published_is_and_the_next_starts_from_it(
    run_config: RunConfig, log: Log, store: ObjectStore
) -> None:
    before = await trained_before(log, store)
    await yield_batch(log, store, 2)
    async with serving(run_config, log, store, packer, trainer) as rank:
        published = await first(log, PolicyPublished, 1)
        after = await first(log, StepTrained, 2)
        await first(log, PolicyPublished, 2)
        assert not rank.done(), "the run may have evaluations to finish"
    assert published == PolicyPublished(step=1, weights=before.weights)
    assert isinstance(after, StepTrained)
    assert (after.parent, after.loss_tokens) == (before.weights, 3 * LOSS)
    assert after.grad_norm > 0
    consumed = await first(log, BatchConsumed, 2)
    # The second sequence has contexts in two micro-batches, and is one.
    assert consumed == BatchConsumed(step=2, sequences=2, loss_tokens=3 * LOSS)
    old, new = [weights_from_bytes(await store.get(ref)) for ref in (before.weights, after.weights)]
    largest = max(float((old[name] - new[name]).abs().max()) for name in old)
    # One AdamW step of a restored optimizer: each weight moves by about lr, none by more than a few of them.
    assert 0 < largest < 10 * run_config.trainer.lr


async def test_a_run_whose_last_step_was_not_published_trains_nothing_more(
    run_config: RunConfig, log: Log, store: ObjectStore
) -> None:
    before = await trained_before(log, store)
    config = run_config.model_copy(update={"steps": 1})
    async with serving(config, log, store, trainer) as rank:
        assert await first(log, PolicyPublished, 1) == PolicyPublished(step=1, weights=before.weights)
        assert not rank.done()
    assert (await log.size())[0] == 2


async def test_a_ruined_gradient_ends_the_rank_and_writes_nothing(
    run_config: RunConfig, log: Log, store: ObjectStore
) -> None:
    await yield_batch(log, store, 1, logprob=-500.0)
    async with serving(run_config, log, store, packer, trainer) as rank:
        with pytest.raises(
            ValueError, match=r"step 1: loss inf .* not both finite, and the step is not taken"
        ):
            await asyncio.wait_for(rank, 60)
    assert await log.latest("step.trained") is None
    assert [key async for key, _ in store.list(f"runs/{log.run}/weights")] == []


def serve_rank(config: RunConfig, rank: int) -> None:
    """A rank in a process of its own."""
    torch.set_num_threads(1)
    asyncio.run(run_service(trainer.serve, config, f"trainer-{rank}", rank))


@contextmanager
def rank_processes(config: RunConfig) -> Iterator[None]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["services.trainer.loop"])
    running = [context.Process(target=serve_rank, args=(config, r)) for r in range(config.batch.sizes.ranks)]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.join(30)
        killed = [process.pid for process in running if process.is_alive()]
        for process in running:
            process.kill()
        assert not killed, "ranks did not stop when they were told to"


async def moments(store: ObjectStore, fact: Fact) -> dict[str, Any]:
    assert isinstance(fact, StepTrained)
    state = weights_from_bytes(await store.get(fact.optimizer))
    return {name: tensor for name, tensor in state.items() if name.startswith("exp_avg")}


async def test_a_run_goes_on_with_ranks_of_other_sizes(
    run_config: RunConfig, broker: Broker, log: Log, store: ObjectStore, tmp_path: Path
) -> None:
    """Step 1 on cp2 x tp2 and step 2 on one rank are what both are on one rank."""
    run_config = run_config.model_copy(
        update={
            "broker": broker,
            "store": Store(url=f"file://{tmp_path}/objects"),
            "directory": str(tmp_path),
        }
    )
    wide = run_config.model_copy(
        update={
            "batch": run_config.batch.model_copy(update={"cp": 2, "tp": 2}),
            "trainer": run_config.trainer.model_copy(update={"rendezvous": f"127.0.0.1:{free_port()}"}),
        }
    )
    await yield_batch(log, store, 1, NEAR, FOUR)
    with rank_processes(wide):
        async with packing(wide, log, store):
            first_wide = await first(log, StepTrained, 1)
    assert isinstance(first_wide, StepTrained)
    consumed = await first(log, BatchConsumed, 1)
    assert consumed == BatchConsumed(step=1, sequences=2, loss_tokens=3 * LOSS)
    await yield_batch(log, store, 2, NEAR)
    async with serving(run_config, log, store, packer, trainer):
        second_wide = await first(log, StepTrained, 2)

    other = await Log.connect(broker, f"{log.run}b", "test")
    await other.create()
    alone = run_config.model_copy(
        update={
            "run": other.run,
            "trainer": run_config.trainer.model_copy(update={"rendezvous": f"127.0.0.1:{free_port()}"}),
        }
    )
    for step in (1, 2):
        await yield_batch(other, store, step, NEAR)
    async with serving(alone, other, store, packer, trainer):
        second = await first(other, StepTrained, 2)
        once = await first(other, StepTrained, 1)
    await other.close()
    for one, many in ((once, first_wide), (second, second_wide)):
        assert isinstance(one, StepTrained)
        assert isinstance(many, StepTrained)
        assert one.grad_norm > 0.01
        for name in ("loss", "grad_norm", "kl"):
            assert getattr(many, name) == pytest.approx(getattr(one, name), rel=1e-4)
        right, found = await moments(store, one), await moments(store, many)
        assert found.keys() == right.keys()
        for name, tensor in right.items():
            off = float((found[name] - tensor).abs().max() / tensor.abs().max())
            assert off < 1e-4, f"step {one.step}: {name} is off by {off}"
        right, found = [weights_from_bytes(await store.get(fact.weights)) for fact in (one, many)]
        for name, tensor in right.items():
            # AdamW divides by the gradient's size: where that is next to nothing, its sign is rounding's.
            off = float((found[name] - tensor).abs().mean())
            assert off < 0.01 * run_config.trainer.lr, f"step {one.step}: {name} is off by {off}"
