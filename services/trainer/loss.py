"""The policy-gradient loss on packed windows.

Promises:
- a token with loss weight 0 has no part in the loss or its gradient;
- summed over the micro-batches and ranks of a batch, the loss is the plan's weighted mean over its loss tokens: ranks
  only add, whatever the cut.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LossTerms(NamedTuple):
    """`loss` scalar, to be summed over micro-batches and ranks. The others are sums over loss tokens, without gradient."""

    loss: Tensor
    kl: Tensor
    clipped: Tensor
    tokens: Tensor


class Clip(NamedTuple):
    """Bounds of the ratio: 1 - low to 1 + high, as PPO; `positive_low` and `negative_high` are ratios, 0: none."""

    low: float
    high: float
    positive_low: float = 0.0
    negative_high: float = 0.0


def policy_loss(
    logprobs: Tensor, rollout: Tensor, advantages: Tensor, weights: Tensor, clip: Clip
) -> LossTerms:
    """Clipped surrogate with four bounds, all inputs floating [T] in label space.

    -sum_t w_t * s_t, s_t = min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t), r_t = exp(logprob_t - rollout_t). PPO,
    arXiv:1707.06347, eq. 7; unequal bounds from DAPO, arXiv:2503.14476, eq. 10. These bound r from above where A > 0 and
    from below where A < 0. The other two sides: where A < 0, s_t = max(s_t, negative_high A_t), dual-clip PPO,
    arXiv:1912.09729, eq. 5; where A > 0, s_t = max(s_t, positive_low A_t), its mirror image, which that paper has not.

    The old policy is the rollout engine's, so that the ratio also corrects for its staleness. `kl` sums
    rollout_t - logprob_t: an estimate of KL(rollout || trainer), in nats.
    """
    trained = weights > 0
    # Rows without loss hold no rollout log-probability: their ratio is set to 1, so that nothing infinite meets a 0.
    difference = torch.where(trained, logprobs - rollout, torch.zeros_like(logprobs))
    ratio = difference.exp()
    bounded = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    for bound, side in (
        (clip.positive_low, (advantages > 0) & (ratio < clip.positive_low)),
        (clip.negative_high, (advantages < 0) & (ratio > clip.negative_high)),
    ):
        if bound:
            surrogate = torch.where(side, bound * advantages, surrogate)
    loss = -(weights * surrogate).sum()
    with torch.no_grad():
        clipped = ((ratio != bounded) & trained).sum().float()
        return LossTerms(loss, -difference.sum(), clipped, trained.sum().float())
