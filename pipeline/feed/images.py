"""The encoder's output to where its tokens are: one all-to-all over the (dp, cp) ranks, whose backward is its reverse.

    hidden = fill(embed(tokens), encoder(pixels), micro_batch.torch(), group)

Promises: a row of the encoder's output goes once to each rank that has use for it, and its gradient is the sum of the gradients
of all places that show it, on whatever ranks; nothing else is changed. The backward pass has its collective on every rank or
on none: a rank that encodes nothing, or shows nothing, takes part in it, if only its loss depends on what `fill` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class _AllToAll(torch.autograd.Function):
    """Rows [sum of send, hidden] to ranks, `send` counts of them each, in order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch declares it of any arguments
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # as above
        return _exchange(gradient, ctx.receive, ctx.send, ctx.group), None, None, None


def redistribute(
    embeddings: Tensor, arrays: Mapping[str, Tensor], group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """(rows, local): row i of `rows` [N, hidden] belongs at the window's local row `local[i]` (int64 [N], ascending).

    embeddings: [rows, hidden], the encoder's output for this rank's images, in their order, as many as `images.lengths` says.
    arrays: the micro-batch's, on the embeddings' device or the CPU. group: of dp * cp ranks, rank dp * cp + c in order; all
    call this for the micro-batches of one number together. A micro-batch without `images.*` arrays has no images on any rank:
    this is not to be called. An encoder that is not trained is called, and this with it, under `torch.no_grad()`.

    Raises ValueError when the counts do not fit."""
    send, receive = (_counts(arrays[f"images.{name}_counts"]) for name in ("send", "receive"))
    wanted = int(arrays["images.lengths"].sum())
    if embeddings.ndim != 2 or embeddings.shape[0] != wanted:
        raise ValueError(
            f"embeddings are {list(embeddings.shape)}; the images that this rank encodes have {wanted} rows: [{wanted}, hidden]"
        )
    ranks = dist.get_world_size(group) if len(send) > 1 else 1
    if ranks != len(send):
        raise ValueError(f"the group has {ranks} ranks; the plan's images go to dp * cp = {len(send)}")
    send_rows, take, local = (
        arrays[f"images.{name}"].to(embeddings.device) for name in ("send", "take", "local")
    )
    if torch.is_grad_enabled() and not embeddings.requires_grad:
        # A rank that encodes nothing: without it, it would not take part in the backward pass.
        embeddings = embeddings.detach().requires_grad_()
    rows: Tensor = embeddings.index_select(0, send_rows)
    if ranks > 1:
        # torch does not type what a Function's `apply` returns.
        rows = cast("Tensor", _AllToAll.apply(rows, send, receive, group))  # pyright: ignore[reportUnknownMemberType]
    return rows.index_select(0, take), local


def fill(
    hidden: Tensor, embeddings: Tensor, arrays: Mapping[str, Tensor], group: ProcessGroup | None = None
) -> Tensor:
    """The window's token embeddings [T, hidden] with those of its images' tokens put in their places; see `redistribute`."""
    rows, local = redistribute(embeddings, arrays, group)
    return hidden.index_copy(0, local, rows.to(hidden.dtype))


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    found = rows.new_empty((sum(receive), rows.shape[1]))
    dist.all_to_all_single(found, rows.contiguous(), receive, send, group=group)  # pyright: ignore[reportUnknownMemberType]
    return found


def _counts(counts: Tensor) -> list[int]:
    return [int(count) for count in counts.tolist()]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]
