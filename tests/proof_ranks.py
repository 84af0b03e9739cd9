"""A rank of the proof: takes its windows of each case, trains on them, and tells loss and whole gradients."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.feed.feed import open_feed
from schemas.parallel import Sizes
from services.trainer import ranks
from services.trainer.loss import policy_loss
from services.trainer.sharding import whole
from services.trainer.windows import Place, window_logprobs
from tests.proof_model import CLIP, Model, divided, whole_model

Arrays = dict[str, np.ndarray[Any, Any]]


Window = tuple[Place, dict[str, Tensor]]


@dataclass
class Case:
    """`windows[packer]`: of each micro-batch its place and arrays; None: they are step 1 of the packers that listen in `sockets`."""

    name: str
    dtype: str
    windows: list[list[tuple[Place, Arrays]]] | None
    sockets: str = ""

    def of(self, mesh: ranks.Mesh) -> Iterator[Window]:
        """The windows of a rank."""
        if self.windows is None:
            with open_feed(self.sockets, mesh.rank, mesh.sizes, timeout_s=120) as feed:
                for micro_batch in feed.batch(1):
                    meta = micro_batch.meta
                    yield Place(meta["layout"], meta["cp_size"], meta["cp_rank"]), micro_batch.torch()
            return
        for place, arrays in self.windows[mesh.sizes.packer_of(mesh.rank)]:
            yield place, {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


@dataclass
class Outcome:
    loss: float
    gradients: Arrays


def run(rank: int, sizes: Sizes, rendezvous: str, cases: Path) -> dict[str, Outcome]:
    """All cases, in a process of its own; the outcome of each by name."""
    torch.set_num_threads(1)
    mesh = ranks.join(rendezvous, rank, sizes, adaptive=True)
    try:
        return {case.name: train(case, mesh) for case in pickle.loads(cases.read_bytes())}
    finally:
        ranks.leave()


def train(case: Case, mesh: ranks.Mesh) -> Outcome:
    model = divided(whole_model(getattr(torch, case.dtype)), mesh)
    loss = ranks.sum_tensor(_backward(model, case.of(mesh), mesh), mesh.batch)
    ranks.sum_gradients(model.parameters(), mesh.batch)
    parts = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return Outcome(float(loss), {name: grad.numpy() for name, grad in whole(parts, mesh).items()})


def _backward(model: Model, windows: Iterable[Window], mesh: ranks.Mesh) -> torch.Tensor:
    dtype = model.llama.model.norm.weight.dtype
    total = torch.zeros((), dtype=dtype)
    for place, window in windows:
        experts: Any = list(model.experts)
        logprobs = window_logprobs(model.llama, window, place, mesh, experts, model.encoder)
        old, advantages, weights = (
            window[name].to(dtype) for name in ("logprobs", "advantages", "loss_weights")
        )
        loss = policy_loss(logprobs, old, advantages, weights, CLIP).loss
        loss.backward()
        total += loss.detach()
    return total
