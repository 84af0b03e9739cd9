"""The trainer's ranks as process groups over gloo: data, context and tensor parallel. Ranks live and die together.

Promises:
- ranks are numbered as `schemas.parallel` says (Megatron's order, tensor-parallel fastest); a group's ranks are ascending;
- a group of one rank is None: nothing is sent where there is nobody to send to;
- ranks only add: weights of the loss are in the plan, so a batch's gradient is the sum over `Mesh.batch`, and a weight
  that is divided over tensor-parallel ranks stays so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from schemas.parallel import Coordinate, Sizes

_TIMEOUT = timedelta(minutes=10)
_ALONE = Sizes()


@dataclass(frozen=True)
class Mesh:
    """The groups of one rank. `tensor`: ranks of its packer, which share its windows; `batch`: ranks of its tensor-parallel
    number, one a packer, number dp * cp + c, among which a batch is divided; `context[s]`: the s ranks that share a
    micro-batch of context-parallel size s."""

    sizes: Sizes = _ALONE
    rank: int = 0
    tensor: dist.ProcessGroup | None = None
    batch: dist.ProcessGroup | None = None
    context: Mapping[int, dist.ProcessGroup] = field(default_factory=dict[int, dist.ProcessGroup])

    @property
    def at(self) -> Coordinate:
        return self.sizes.coordinate(self.sizes.packer_of(self.rank))

    @property
    def tp_rank(self) -> int:
        return self.rank % self.sizes.tp


def join(rendezvous: str, rank: int, sizes: Sizes, adaptive: bool = False) -> Mesh:
    """Joins the ranks whose first listens on `rendezvous`, host:port; raises ValueError on an address of another form and
    on pipeline stages. `adaptive`: also groups for micro-batches of every divisor of cp."""
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"trainer.rendezvous {rendezvous!r} is not host:port")
    if sizes.pp > 1:
        raise ValueError(f"the reference trainer has no pipeline stages: pp is {sizes.pp}, must be 1")
    # TCPStore is public, but torch's stubs do not list it.
    store = dist.TCPStore(host, int(port), sizes.ranks, is_master=rank == 0, timeout=_TIMEOUT)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=sizes.ranks, timeout=_TIMEOUT)
    return mesh(rank, sizes, adaptive)


def mesh(rank: int, sizes: Sizes, adaptive: bool = False) -> Mesh:
    """The groups of a rank of the process group that it has joined. A collective: every rank makes every group."""
    dp, cp, tp, _ = sizes
    tensor = [[tp * packer + t for t in range(tp)] for packer in range(sizes.packers)]
    batch = [[tp * packer + t for packer in range(sizes.packers)] for t in range(tp)]
    widths = [s for s in range(2, cp + 1) if cp % s == 0] if adaptive else [cp]
    return Mesh(
        sizes=sizes,
        rank=rank,
        tensor=_mine(tensor),
        batch=_mine(batch),
        context={
            s: group
            for s in widths
            if (
                group := _mine(
                    [
                        [tp * sizes.packer(d, g * s + c) + t for c in range(s)]
                        for d in range(dp)
                        for g in range(cp // s)
                        for t in range(tp)
                    ]
                )
            )
        },
    )


def _mine(groups: list[list[int]]) -> dist.ProcessGroup | None:
    if len(groups[0]) == 1:
        return None
    # Where it is not a member, a rank is given a number in the group's place.
    made = [dist.new_group(ranks, timeout=_TIMEOUT) for ranks in groups]
    return next(group for group in made if isinstance(group, dist.ProcessGroup))


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def agree(value: object) -> object:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def largest(value: int) -> int:
    """The largest value of all ranks, on every rank."""
    box = torch.tensor(value)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return int(box)


def union(values: set[str]) -> set[str]:
    """The union of all ranks' sets, on every rank."""
    found: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, values)
    return set().union(*found)


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Adds the gradients of the group's ranks, in one message; a parameter without one counts as zero."""
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    if group is None:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def sum_tensor(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over the group's ranks, in place."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor
