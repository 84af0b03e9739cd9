"""A hook of your own: unlikely tokens count for less.

    PYTHONPATH=examples/hooks packtrain run my.toml

    [[sources.hooks]]
    kind = "grpo"
    [[sources.hooks]]
    kind = "likely_tokens:LikelyTokens"
    options = { alpha = 0.3 }

The gradient of a token grows with 1 - its probability, so that rare tokens drown the others. Advantage reweighting
(arXiv:2505.12929) multiplies each token's advantage by alpha * p + 1 - alpha, where p is what the policy gave it as it sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pipeline.signal.hooks import Signal, Stage


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    alpha: float = Field(default=0.3, ge=0, le=1, description="0: every token counts the same")


class LikelyTokens:
    stage: Stage = "after"
    columns: tuple[str, ...] = ("logprobs",)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = Options.model_validate(options or {})

    def __call__(self, signal: Signal) -> Signal:
        alpha = self.options.alpha
        tokens = tuple(
            (advantage * (alpha * np.exp(columns["logprobs"]) + 1 - alpha)).astype(np.float32)
            for advantage, columns in zip(signal.made(), signal.columns, strict=True)
        )
        return replace(signal, tokens=tokens)
