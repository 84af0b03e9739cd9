"""What a teacher says of a sequence: log-probabilities of its tokens, and the likeliest ones at each place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Scores:
    """Of T tokens, in token space: row t is of token t given those before it; nothing is before token 0, whose row is
    0, -1 and -inf.

    logprobs: float32 [T], nats. top_ids: int32 [T, k] and top_logprobs: float32 [T, k], falling. They are at
    temperature 1 over the whole vocabulary.
    """

    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


def of_numbers(scores: Scores) -> Scores:
    """Raises ValueError where one is NaN, as which numpy also takes an engine's null."""
    if np.isnan(scores.logprobs).any() or np.isnan(scores.top_logprobs).any():
        raise ValueError("a log-probability that is no number")
    return scores
