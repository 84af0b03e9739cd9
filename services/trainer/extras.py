"""What the proof adds to the policy, and no policy of a run has: experts whose choice is replayed, and a vision encoder.

Promises: the experts of a row are those of its `routed_experts`, whatever the router says now, which only weighs them
(routing replay, R3, arXiv:2510.11370): rows of the window choose, and nothing else; an image's rows depend on its pixels
alone, so that it does not matter which rank encodes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from services.trainer.collectives import Group, copied, summed


class Replayed(nn.Module):
    """A mixture of experts after a layer: the sum of the chosen ones, weighed by a softmax of the router over them alone.

    The inner width of every expert is divided over tensor-parallel ranks: `inner` is a rank's own. Padding rows, whose choice
    is expert 0 all over, are as good as any."""

    def __init__(self, hidden: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts_up = nn.Parameter(torch.randn(experts, inner, hidden) * hidden**-0.5)
        self.experts_down = nn.Parameter(torch.randn(experts, hidden, inner) * hidden**-0.5)

    def forward(self, x: Tensor, routed: Tensor, tensor: Group) -> Tensor:
        """x: [T, hidden]; routed: int64 [T, k]; [T, hidden]."""
        # Each rank has a part of what the weights multiply, and so a part of their gradient.
        weights = copied(self.router(x).gather(1, routed).softmax(-1), tensor)
        inner = torch.einsum("th,eih->tei", copied(x, tensor), self.experts_up)
        out = torch.einsum("tei,ehi->teh", nn.functional.silu(inner), self.experts_down)
        chosen = out.gather(1, routed[..., None].expand(-1, -1, out.shape[2]))
        return summed((weights[..., None] * chosen).sum(1), tensor)


class Encoder(nn.Module):
    """A vision encoder: patches of patch * patch pixels, one attention block over those of the image, a mean over each
    merge * merge of them."""

    def __init__(self, hidden: int, patch: int, merge: int, heads: int = 2) -> None:
        super().__init__()
        self.patch, self.merge, self.heads = patch, merge, heads
        self.embed = nn.Linear(3 * patch * patch, hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """images: uint8 [height, width, 3], sides multiples of patch * merge; their rows, one image after the other,
        [sum of height * width / (patch * merge)^2, hidden]."""
        none = self.embed.weight.new_zeros(0, self.embed.out_features)
        return torch.cat([none, *(self._one(image) for image in images)])

    def _one(self, image: Tensor) -> Tensor:
        p, m = self.patch, self.merge
        high, wide = image.shape[0] // p, image.shape[1] // p
        pixels = image.to(self.embed.weight.dtype) / 127.5 - 1
        x = self.embed(pixels.view(high, p, wide, p, 3).transpose(1, 2).reshape(high * wide, -1))
        # Patches know where they are by this alone: rows of one image must not be alike.
        x = x + torch.linspace(-1, 1, len(x), dtype=x.dtype)[:, None]
        q, k, v = self.qkv(x).view(1, len(x), 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(len(x), -1)
        x = x + self.out(attended)
        return x.view(high // m, m, wide // m, m, -1).mean((1, 3)).flatten(0, 1)
