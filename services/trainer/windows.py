"""Log-probabilities of a window that is a part of its pack, by a model of which this rank has a part.

Promises:
- whatever the layout, the context-parallel size and the tensor-parallel size, a real token's log-probability is what its
  context alone would give it, and its gradient reaches the weights of every rank that had a part in it;
- a row attends to the rows of its own sequence of the pack up to its own position, on whatever rank they are;
- ranks of one packer, and those of one pack, take part in the same collectives in the same order: an empty window is empty
  on all of them.

Keys and values are gathered over the context-parallel ranks and masked by pack position; the largest thing is a [T, S] mask
of a window's T rows and its pack's S. A trainer for long contexts has a ring, or a kernel, in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.batch.layouts import local_rows
from pipeline.engines.tiny.model import Llama, rotary
from pipeline.feed.images import fill
from schemas.parallel import LayoutName
from services.trainer.collectives import Group, gathered
from services.trainer.extras import Encoder, Replayed
from services.trainer.ranks import Mesh


@dataclass(frozen=True)
class Place:
    """Where a window lies in its pack: the context-parallel size of its micro-batch, its rank inside, and the layout."""

    layout: LayoutName = "contiguous"
    cp_size: int = 1
    cp_rank: int = 0


@dataclass(frozen=True)
class Gathered:
    """The "cache" of a forward pass over a window: keys and values of the whole pack. `mask`: bool [T, S]."""

    mask: Tensor
    group: Group

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = gathered(torch.stack((k, v)), 3, self.group).unbind()
        return keys, values


def pack_view(place: Place, cu_seqlens_padded: Tensor, mesh: Mesh) -> Gathered:
    """What the rows of the window at `place` of the pack attend to."""
    ends = cu_seqlens_padded.numpy()
    peers = [
        torch.from_numpy(local_rows(place.layout, ends, place.cp_size, rank)) for rank in range(place.cp_size)
    ]
    mine, every = peers[place.cp_rank], torch.cat(peers)
    bounds = cu_seqlens_padded.long()
    sequence = torch.bucketize(mine, bounds, right=True), torch.bucketize(every, bounds, right=True)
    mask = (sequence[0][:, None] == sequence[1][None, :]) & (mine[:, None] >= every[None, :])
    return Gathered(mask, mesh.context[place.cp_size] if place.cp_size > 1 else None)


def window_logprobs(
    model: Llama,
    window: Mapping[str, Tensor],
    place: Place,
    mesh: Mesh,
    experts: Sequence[Replayed] = (),
    encoder: Encoder | None = None,
) -> Tensor:
    """log p(labels[t] | its context's tokens up to t) in the model's precision, [T], at temperature 1.

    `window`: as the packer builds it, T rows; where it has `candidates`, over the candidates of each label that has some.
    `experts`: one after each layer, routed by `routed_experts`. `encoder`: of the images that the window's rank encodes, whose
    rows it sends to their places; a collective of `mesh.batch`, where any window of the round shows an image.
    """
    x = model.model.embed_tokens(window["tokens"])
    if encoder is not None and "images.pixels" in window:
        x = fill(x, encoder(pictures(window)), window, mesh.batch)
    if not len(x):
        # An empty pack: its ranks may have encoded images of others, whose gradient they wait for.
        return x.sum(1)
    view = pack_view(place, window["cu_seqlens_padded"], mesh)
    cos, sin = rotary(window["position_ids"][None], model.config.head_dim, model.config.rope_theta)
    x = x[None]
    for number, layer in enumerate(model.model.layers):
        x = layer(x, cos, sin, None, view)
        if experts:
            x = x + experts[number](x[0], window["routed_experts"][:, number].long(), mesh.tensor)
    logits = nn.functional.linear(model.model.norm(x[0]), model.model.embed_tokens.weight)
    if "candidates.ids" in window:
        allowed = candidate_mask(window["candidates.offsets"], window["candidates.ids"], logits.shape[1])
        logits = logits.masked_fill(~allowed, -torch.inf)
    return -nn.functional.cross_entropy(logits, window["labels"], reduction="none")


def pictures(window: Mapping[str, Tensor]) -> list[Tensor]:
    """The images that the window's rank encodes: uint8 [height, width, 3], views."""
    ends = window["images.offsets"].tolist()
    shapes = window["images.shapes"].tolist()
    return [
        window["images.pixels"][a:b].view(shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False)
    ]


def candidate_mask(offsets: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """bool [T, vocabulary]: row t's candidates, ids[offsets[t]:offsets[t + 1]]; of a row without any, the whole vocabulary."""
    counts = offsets.diff()
    allowed = (counts == 0)[:, None].repeat(1, vocabulary)
    allowed[torch.repeat_interleave(torch.arange(len(counts)), counts), ids.long()] = True
    return allowed
