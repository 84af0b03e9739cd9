"""From logits to sampled tokens: the processed distribution, and draws that no neighbour in the batch can change.

Promises: the returned log-probabilities are those of the distribution that was sampled (after temperature, top-k and top-p,
renormalized), which is what off-policy correction needs; a row's draw depends on its own logits and its own uniform number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.engines.wire import SamplingParams


def restricted(params: SamplingParams) -> bool:
    """Whether top-k or top-p leaves tokens out."""
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)


def processed_logprobs(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Log-probabilities [B, vocab] float32 after temperature, then top-k, then top-p (vLLM's order); -inf outside.

    At temperature 0 the choice is the argmax, and the log-probabilities are those at temperature 1, as vLLM has it.
    The smallest set whose mass reaches ``top_p`` is kept, never less than the likeliest token.
    """
    scale = torch.tensor([p.temperature if p.temperature > 0 else 1.0 for p in params])
    logits = logits / scale[:, None]
    rows = [i for i, p in enumerate(params) if restricted(p)]
    if rows:
        vocab = logits.shape[1]
        top_k = torch.tensor([params[i].top_k if params[i].top_k > 0 else vocab for i in rows])
        top_p = torch.tensor([params[i].top_p for i in rows])
        ordered, index = logits[rows].sort(dim=-1, descending=True, stable=True)
        ordered = ordered.masked_fill(torch.arange(vocab) >= top_k[:, None], -torch.inf)
        mass = ordered.softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass
        drop = before >= top_p[:, None]
        drop[:, 0] = False
        ordered = ordered.masked_fill(drop, -torch.inf)
        logits[rows] = torch.empty_like(ordered).scatter_(1, index, ordered)
    return torch.log_softmax(logits, dim=-1)


def draw(logprobs: Tensor, uniform: Tensor, greedy: Tensor) -> Tensor:
    """Token ids int64 [B] by inversion of the cumulative distribution at ``uniform`` float64 [B] in [0, 1).

    greedy: bool [B], rows that take the argmax. Raises FloatingPointError when a row's log-probabilities are not a
    distribution (weights that overflow): such a token must never be trained on.
    """
    best = logprobs.argmax(dim=-1)
    if not torch.isfinite(logprobs.gather(1, best[:, None])).all():
        raise FloatingPointError("the model's logits are not finite: the loaded weights overflow or hold NaN")
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding can put the target on the total, past the last token; the likeliest token is in every candidate set.
    chosen = torch.where(chosen == logprobs.shape[1], best, chosen)
    return torch.where(greedy, best, chosen)
