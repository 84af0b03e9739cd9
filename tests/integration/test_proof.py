"""The proof: one batch (text, images, routing, candidate sets, penalties, a sidecar, cut and spilled contexts), from its payloads
in a store through plan, windows and eight ranks dp2 x cp2 x tp2 of the reference trainer, gives the loss and the gradients that
its contexts give one by one on one process, whatever the layout; and a single missing halo token, factor or image row shows.

Differences are relative: of the loss to the loss; of a weight's gradient, the largest difference to its largest element.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import pickle
import secrets
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from pipeline.batch.windows import (  # noqa: E402  # after importorskip
    Read,
    pack,
    plan_window,
    with_offsets,
    with_segments,
)
from pipeline.checksum import crc32c  # noqa: E402
from pipeline.feed.pixels import fetch_pixels  # noqa: E402
from pipeline.log import Log  # noqa: E402
from pipeline.store import ObjectStore  # noqa: E402
from pipeline.store.payload import read_columns  # noqa: E402
from pipeline.vision.owners import IMAGE_ARRAYS, window_images  # noqa: E402
from schemas.config import Batch, Broker, RunConfig  # noqa: E402
from schemas.facts import BatchYielded, SourceShare  # noqa: E402
from schemas.keys import plan_key  # noqa: E402
from schemas.parallel import LayoutName, Sizes  # noqa: E402
from schemas.plan import Plan  # noqa: E402
from schemas.servers import Store  # noqa: E402
from services import packer  # noqa: E402
from services.process import Context  # noqa: E402
from services.trainer.ranks import Mesh  # noqa: E402
from services.trainer.windows import Place  # noqa: E402
from tests import proof_batch, proof_model, proof_ranks  # noqa: E402
from tests.natsserver import NatsServer, free_port  # noqa: E402
from tests.proof_ranks import Arrays, Case, Outcome  # noqa: E402

pytestmark = pytest.mark.timeout(240)

LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)
SIZES = Sizes(dp=2, cp=2, tp=2)
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
SETTINGS = {
    **{layout: Batch(dp=2, cp=2, tp=2, layout=layout, token_budget=512) for layout in LAYOUTS},
    "adaptive": Batch(dp=2, cp=2, tp=2, layout="megatron", token_budget=224, adaptive_cp=True),
}
LOSS = ("labels", "loss_mask", "logprobs", "advantages", "loss_weights")
Windows = list[list[tuple[Place, Arrays]]]


async def fetched(store: ObjectStore, reads: tuple[Read, ...]) -> list[dict[str, Any]]:
    return [await read_columns(store, read.header, read.columns, read.spans) for read in reads]


async def window(store: ObjectStore, plan: Plan, dp: int, microbatch: int, cp: int) -> tuple[Place, Arrays]:
    made = plan_window(plan, dp, microbatch, cp, columns=("routed_experts", "candidates"))
    made = with_segments(made, await fetched(store, made.segment_reads))
    made = with_offsets(made, await fetched(store, made.offset_reads))
    arrays = pack(made, await fetched(store, made.reads))
    if (images := window_images(plan, dp, microbatch, cp)) is not None:
        pixels = np.zeros(images.pixel_bytes, np.uint8)
        for each in images.encode:
            place = pixels[each.start : each.end].reshape(each.shape)
            await fetch_pixels(store, plan.run, each.item, place)
        arrays |= {**images.arrays(), "images.pixels": pixels}
        assert set(IMAGE_ARRAYS) <= set(arrays)
    return Place(plan.layout, made.cp_size, made.cp_rank), arrays


async def windows(store: ObjectStore, plan: Plan) -> Windows:
    """Of each packer, in the order of their numbers."""
    return [
        [await window(store, plan, at.dp, j, at.cp) for j in range(plan.microbatches)]
        for at in map(SIZES._replace(dp=plan.dp, cp=plan.cp).coordinate, range(plan.dp * plan.cp))
    ]


def without_halo(found: Windows) -> Windows:
    """The weightiest of the rows that predict a token of another rank is as if that token had not been read."""
    rows: list[tuple[float, Arrays, int]] = []
    for arrays in (arrays for each in found for _, arrays in each):
        for t in np.flatnonzero(np.diff(arrays["position_ids"]) > 1):
            rows.append((abs(float(arrays["loss_weights"][t] * arrays["advantages"][t])), arrays, int(t)))
    most, arrays, t = max(rows, key=lambda row: row[0])
    assert most > 0, "no trained token has its predictor on another rank"
    for name in LOSS:
        arrays[name][t] = 0
    return found


def without_image_row(found: Windows) -> Windows:
    for arrays in (arrays for each in found for _, arrays in each):
        if len(arrays.get("images.local", ())):
            arrays["images.local"], arrays["images.take"] = (
                arrays[f"images.{name}"][:-1] for name in ("local", "take")
            )
            return found
    raise AssertionError("no window shows an image")


def without_factor(plan: Plan) -> Plan:
    assert plan.changes is not None
    first = {name: getattr(plan.changes, name)[1:] for name in type(plan.changes).model_fields}
    return plan.model_copy(update={"changes": plan.changes.model_copy(update=first)})


class Proof:
    """What every case gave: by case and rank; and what it should have given, by precision."""

    def __init__(self, got: list[dict[str, Outcome]], one: dict[str, Outcome], told: dict[str, Any]) -> None:
        self.got, self.one, self.told = got, one, told

    def difference(self, outcome: Outcome, dtype: str) -> float:
        loss, gradients = self.told[dtype]
        assert outcome.gradients.keys() == gradients.keys()
        each = [abs(outcome.loss - loss) / abs(loss)]
        for name, right in gradients.items():
            assert right.abs().max() > 0, f"{name} has no gradient: nothing is proven of it"
            off = np.abs(outcome.gradients[name].astype(np.float64) - right.double().numpy()).max()
            each.append(float(off / right.abs().max()))
        return max(each)


async def all_cases(store: ObjectStore, batch: proof_batch.Batch_) -> tuple[list[Case], list[Case]]:
    """Cases for eight ranks, and cases for one process."""
    many: list[Case] = []
    for name, settings in SETTINGS.items():
        plan = proof_batch.plan_of(batch, settings)
        found = await windows(store, plan)
        many += [Case(f"{name} {dtype}", dtype, found) for dtype in TOLERANCE]
        if name == "adaptive":
            assert set(plan.cp_sizes) == {1, 2}
    plan = proof_batch.plan_of(batch, SETTINGS["megatron"])
    broken: dict[str, Windows] = {
        "halo": without_halo(await windows(store, plan)),
        "factor": await windows(store, without_factor(plan)),
        "image row": without_image_row(await windows(store, plan)),
    }
    many += [Case(name, "float64", found) for name, found in broken.items()]
    alone = await windows(store, proof_batch.plan_of(batch, Batch(dp=1, token_budget=512)))
    return many, [Case(dtype, dtype, alone) for dtype in TOLERANCE]


@asynccontextmanager
async def packers(
    broker: Broker, batch: proof_batch.Batch_, store: ObjectStore, directory: Path
) -> AsyncIterator[None]:
    """The packers of a run that has yielded the batch as its first, serving in `directory`."""
    config = RunConfig.model_validate(
        {
            "run": batch.run,
            "engine": {"max_context": 512},
            "batch": SETTINGS["zigzag_pack"].model_dump(),
            "packer": {"socket_dir": str(directory), "columns": ["routed_experts", "candidates"]},
            "trainer": {"kind": "external"},
            "pools": [{"name": "p", "harness": "chat"}],
            "sources": [
                {
                    "name": "s",
                    "pool": "p",
                    "groups": 3,
                    "environment": {"kind": "arithmetic"},
                    "behaviour": {"max_tokens": 64},
                }
            ],
        }
    )
    plan = proof_batch.plan_of(batch, config.batch)
    body = plan.model_dump_json().encode()
    share = SourceShare(groups=3, sequences=12, tokens=1, loss_tokens=1, mean_reward=0, max_staleness=0)
    log = await Log.connect(broker, batch.run, "test")
    stop = asyncio.Event()
    try:
        await log.create()
        yielded = BatchYielded(
            step=1,
            through=0,
            policy_version=0,
            sources={"s": share},
            microbatches=plan.microbatches,
            plan=await store.create(plan_key(batch.run, 1, crc32c(body)), body),
        )
        await log.publish(yielded)
        async with asyncio.TaskGroup() as group:
            for number in range(SIZES.packers):
                context = Context(
                    config, f"packer-{number}", log, store, stop, logging.getLogger("packtrain"), number
                )
                group.create_task(packer.serve(context))
            try:
                yield
            finally:
                stop.set()
    finally:
        await log.close()


async def prove(broker: Broker, directory: Path, sockets: Path) -> Proof:
    store = ObjectStore.open(Store(url=f"file://{directory}/objects"))
    batch = proof_batch.made(f"proof{secrets.token_hex(4)}")
    await proof_batch.write(batch, store)
    many, one = await all_cases(store, batch)
    many.append(Case("packers", "float64", None, str(sockets)))
    path = directory / "cases.pickle"
    path.write_bytes(pickle.dumps(many))
    # A process that has imported torch, and nothing else, is what the ranks are forked from: no thread is lost in the fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.proof_ranks"])
    rendezvous = f"127.0.0.1:{free_port()}"
    async with packers(broker, batch, store, sockets):
        with ProcessPoolExecutor(SIZES.ranks, mp_context=context) as pool:
            running = [
                asyncio.wrap_future(pool.submit(proof_ranks.run, rank, SIZES, rendezvous, path))
                for rank in range(SIZES.ranks)
            ]
            # On threads: the packers are served by this loop.
            told = {
                dtype: await asyncio.to_thread(proof_model.expected, batch, getattr(torch, dtype))
                for dtype in TOLERANCE
            }
            here = {case.name: await asyncio.to_thread(proof_ranks.train, case, Mesh()) for case in one}
            async with asyncio.timeout(200):
                return Proof(await asyncio.gather(*running), here, told)


@pytest.fixture(scope="module")
def proof(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Proof:
    with tempfile.TemporaryDirectory(prefix="pt") as sockets:
        return asyncio.run(prove(nats_server.broker, tmp_path_factory.mktemp("proof"), Path(sockets)))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_process_trains_packs_as_it_trains_contexts(proof: Proof, dtype: str) -> None:
    assert proof.difference(proof.one[dtype], dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SETTINGS)
def test_eight_ranks_train_what_one_process_does(proof: Proof, name: str, dtype: str) -> None:
    for rank, outcomes in enumerate(proof.got):
        off = proof.difference(outcomes[f"{name} {dtype}"], dtype)
        assert off < TOLERANCE[dtype], f"rank {rank} is off by {off}"


def test_ranks_of_real_packers_train_the_same(proof: Proof) -> None:
    for outcomes in proof.got:
        assert proof.difference(outcomes["packers"], "float64") < TOLERANCE["float64"]


@pytest.mark.parametrize("missing", ["halo", "factor", "image row"])
def test_what_is_missing_shows(proof: Proof, missing: str) -> None:
    least = min(proof.difference(outcomes[missing], "float64") for outcomes in proof.got)
    assert least > 10 * TOLERANCE["float32"], f"without one {missing} the result is off by {least} only"
