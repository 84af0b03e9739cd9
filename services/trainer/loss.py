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


def policy_loss(
    logprobs: Tensor, rollout: Tensor, advantages: Tensor, weights: Tensor, clip_low: float, clip_high: float
) -> LossTerms:
    """Clipped surrogate with unequal bounds, all inputs float32 [T] in label space.

    -sum_t w_t * min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t), r_t = exp(logprob_t - rollout_t). PPO, arXiv:1707.06347,
    eq. 7; unequal bounds from DAPO, arXiv:2503.14476, eq. 10. The old policy is the rollout engine's, so that the ratio
    also corrects for its staleness. `kl` sums rollout_t - logprob_t: an estimate of KL(rollout || trainer), in nats.
    """
    trained = weights > 0
    # Rows without loss hold no rollout log-probability: their ratio is set to 1, so that nothing infinite meets a 0.
    difference = torch.where(trained, logprobs - rollout, torch.zeros_like(logprobs))
    ratio = difference.exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -(weights * torch.minimum(ratio * advantages, bounded * advantages)).sum()
    with torch.no_grad():
        clipped = ((ratio != bounded) & trained).sum().float()
        return LossTerms(loss, -difference.sum(), clipped, trained.sum().float())
