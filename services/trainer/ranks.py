"""The trainer's ranks: one torch.distributed group over gloo. Ranks live and die together."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT = timedelta(minutes=10)


def join(rendezvous: str, rank: int, world: int) -> None:
    """Joins the group whose rank 0 listens on `rendezvous`, host:port; raises ValueError on an address of another form."""
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"trainer.rendezvous {rendezvous!r} is not host:port")
    # TCPStore is public, but torch's stubs do not list it.
    store = dist.TCPStore(host, int(port), world, is_master=rank == 0, timeout=_TIMEOUT)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_TIMEOUT)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def agree(value: object) -> object:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def union(values: set[str]) -> set[str]:
    """The union of all ranks' sets, on every rank."""
    found: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, values)
    return set().union(*found)


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Adds the gradients of all ranks, in one message; a parameter without one counts as zero."""
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def sum_tensor(tensor: Tensor) -> Tensor:
    """Sum over ranks, in place."""
    dist.all_reduce(tensor)
    return tensor
