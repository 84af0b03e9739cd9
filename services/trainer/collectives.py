"""What ranks send each other inside a forward pass, each with its gradient. A group of None is one rank: nothing is sent.

`copied` and `summed` are f and g of Megatron-LM (arXiv:1909.08053, figure 3): around a block whose weights are divided over
tensor-parallel ranks, they make its input's gradient and its output whole on every rank, so that all weights outside such
blocks have the same, whole gradient on each and need no sum. `gathered` is all-gather context parallelism, as in Llama 3
(arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

Group = dist.ProcessGroup | None


def copied(x: Tensor, group: Group) -> Tensor:
    """x; its gradient is the sum of the ranks' gradients."""
    return x if group is None else cast(Tensor, _Copied.apply(x, group))


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' x; the gradient is each rank's own, which is the same on all."""
    return x if group is None else cast(Tensor, _Summed.apply(x, group))


def gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    """The ranks' x, all of one shape, one after the other along `dim`; the gradient of a rank's part is the sum over ranks."""
    return x if group is None else cast(Tensor, _Gathered.apply(x, dim, group))


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _total(gradients[0], ctx.group), None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _total(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, x.shape[dim]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # A reduce-scatter would send half of this; here it is proof that counts, and what it shares with the rest.
        whole = _total(gradients[0], ctx.group)
        return whole.narrow(ctx.dim, ctx.group.rank() * ctx.length, ctx.length), None, None


def _total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group)
    return whole
