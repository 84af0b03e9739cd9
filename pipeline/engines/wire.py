"""The token-in/token-out wire of ``POST /inference/v1/generate``: vLLM's, of which our engine serves a subset.

Promises: a request that the engine would answer from a distribution other than the asked one is refused (see
``distribution_gaps``); any other unknown field is accepted, listed by ``unknown_fields`` and counted by the server, as
clients send what their engine of the day knows. Versions are strings on the wire, as vLLM has them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]

# Parameters of vLLM that change the distribution or the stopping rule and that we do not implement, with the values at
# which they change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "stop": (None, [], ""),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
}


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    def unknown_fields(self) -> list[str]:
        """Names of fields that were received and are not ours."""
        return sorted(self.model_extra or ())


class SamplingParams(_Open):
    """How to sample. ``temperature`` 0 is greedy; ``top_k`` 0 or -1 is off; without ``max_tokens`` the context is filled.

    ``logprobs``: 0 asks for the sampled token's log-probability; other counts are answered as 0. ``prompt_logprobs``:
    asks for those of the prompt's tokens, and of so many of the likeliest at each place.
    """

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop_token_ids: tuple[StrictInt, ...] = ()
    logprobs: int | None = Field(default=0, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)

    def distribution_gaps(self) -> list[str]:
        """Received parameters that would change what is sampled and that are not implemented, as ``name=value``."""
        extra = self.model_extra or {}
        return [
            f"{name}={extra[name]!r}"
            for name, ok in _NEUTRAL.items()
            if name in extra and extra[name] not in ok
        ]


class GenerateRequest(_Open):
    """One prompt, as token ids."""

    token_ids: tuple[StrictInt, ...]
    sampling_params: SamplingParams = SamplingParams()
    request_id: str | None = Field(default=None, max_length=256)
    stream: bool = False
    content_parts: list[Any] | None = None


def error_body(message: str, kind: str, code: int) -> dict[str, Any]:
    """The error object that OpenAI-style clients read; `code` is the HTTP status, which an event of a stream has not."""
    return {"error": {"message": message, "type": kind, "code": code}}
