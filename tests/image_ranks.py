"""Four ranks over gloo that redistribute images, against one dense computation. Run as a program: `python -m tests.image_ranks`.

torch is imported once and the ranks are forked: they take a moment instead of four imports. Says what went wrong, exits 1.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.feed.images import fill, redistribute
from pipeline.vision.owners import window_images
from schemas.plan import Plan
from tests.vision_parts import a_plan, code, dense

RANKS, FEATURES, HIDDEN = 4, 5, 3
CASES = ((5, "megatron", 2, 2), (9, "zigzag_pack", 1, 4), (5, "contiguous", 4, 1), (5, "slime", 2, 2))
TOLERANCE = 1e-12


def features(codes: list[int]) -> torch.Tensor:
    """What the encoder is given, float64 [rows, FEATURES]: different for each row of each image."""
    values = torch.tensor(codes, dtype=torch.float64)
    return torch.sin(values[:, None] * torch.arange(1, FEATURES + 1, dtype=torch.float64))


def weight() -> torch.Tensor:
    """The encoder, float64 [HIDDEN, FEATURES]."""
    made = torch.arange(HIDDEN * FEATURES, dtype=torch.float64).reshape(HIDDEN, FEATURES).cos()
    return made.requires_grad_()


def loss(hidden: torch.Tensor, seed: int) -> torch.Tensor:
    """Of one window: not linear, and different at each place."""
    generator = torch.Generator().manual_seed(seed)
    at = torch.rand(hidden.shape, generator=generator, dtype=torch.float64)
    return (torch.tanh(hidden) * at + hidden.square() * (1 - at)).sum()


def expected(plan: Plan) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the whole batch, without ranks."""
    encoder = weight()
    total = torch.zeros((), dtype=torch.float64)
    for j in range(plan.microbatches):
        for rank in range(RANKS):
            codes = dense(plan, rank // plan.cp, j, rank % plan.cp, frozenset())
            hidden = features(codes.tolist()) @ encoder.T
            total = total + loss(
                torch.where(torch.from_numpy(codes)[:, None] > 0, hidden, 0.5), 100 * j + rank
            )
    (gradient,) = torch.autograd.grad(total, encoder)
    return total.item(), gradient


def trained(plan: Plan, rank: int) -> tuple[float, torch.Tensor]:
    """The same over ranks."""
    encoder = weight()
    total = torch.zeros((), dtype=torch.float64)
    for j in range(plan.microbatches):
        dp, cp = divmod(rank, plan.cp)
        rows = len(dense(plan, dp, j, cp, frozenset()))
        hidden = torch.full((rows, HIDDEN), 0.5, dtype=torch.float64)
        window = window_images(plan, dp, j, cp)
        if window is not None:
            arrays = {name: torch.from_numpy(array) for name, array in window.arrays().items()}
            codes = [code(each.item.digest, row) for each in window.encode for row in range(each.rows)]
            # Nothing to encode: what a trainer may well give is no result of its encoder.
            encoded = features(codes) @ encoder.T if codes else torch.empty((0, HIDDEN), dtype=torch.float64)
            hidden = fill(hidden, encoded, arrays)
        total = total + loss(hidden, 100 * j + rank)
    if total.requires_grad:
        total.backward()
    gradient = torch.zeros_like(encoder) if encoder.grad is None else encoder.grad
    summed = total.detach().clone()
    dist.all_reduce(summed)
    dist.all_reduce(gradient)
    return summed.item(), gradient


def check(plan: Plan, rank: int, known: tuple[float, torch.Tensor], name: str) -> None:
    found, gradient = trained(plan, rank)
    if abs(found - known[0]) > TOLERANCE * abs(known[0]) or not torch.allclose(
        gradient, known[1], rtol=TOLERANCE, atol=TOLERANCE
    ):
        raise AssertionError(f"{name}: loss {found} for {known[0]}, gradient\n{gradient}\nfor\n{known[1]}")


def refusals(plan: Plan, rank: int) -> None:
    window = window_images(plan, rank // plan.cp, 0, rank % plan.cp)
    assert window is not None
    arrays = {name: torch.from_numpy(array) for name, array in window.arrays().items()}
    for given, told in ((torch.zeros(10_000, 3), "embeddings are"), (torch.zeros(3), "embeddings are")):
        try:
            redistribute(given, arrays)
        except ValueError as error:
            assert told in str(error)  # noqa: PT017  # not pytest: a rank
        else:
            raise AssertionError("embeddings of a wrong number of rows were taken")


def run(rank: int, store: str, plans: list[tuple[str, Plan, tuple[float, torch.Tensor]]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name, plan, known in plans:
        check(plan, rank, known, name)
    refusals(plans[0][1], rank)
    dist.destroy_process_group()


def main() -> int:
    torch.set_num_threads(1)
    plans: list[tuple[str, Plan, tuple[float, torch.Tensor]]] = []
    for seed, layout, dp, cp in CASES:
        plan = a_plan(random.Random(seed), layout, dp, cp)  # type: ignore[arg-type]
        assert plan.images is not None
        plans.append((f"{layout} dp {dp} cp {cp}", plan, expected(plan)))
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [fork.Process(target=run, args=(rank, store, plans)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
            if rank.is_alive():
                rank.kill()
    return int(any(rank.exitcode != 0 for rank in ranks))


if __name__ == "__main__":
    sys.exit(main())
