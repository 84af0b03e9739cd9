"""The seam between capture and an engine: token ids in, token ids with log-probabilities and versions out.

Every engine promises: a generation has one log-probability (nats, of the distribution that was sampled from) and one
weight version a token, whatever happened in between; a generation that a weight update or a lost replica interrupted is
continued from its own tokens; trouble that is not the request's fault is `EngineUnavailable` once the deadline has
passed; a request that the engine refuses is `EngineRefused` at once, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.engines.wire import SamplingParams


class EngineUnavailable(RuntimeError):
    """Infrastructure trouble: the attempt may be repeated elsewhere or later, and is never the policy's fault."""


class EngineRefused(ValueError):
    """The engine rejected the request itself (400, 413, 422); repeating it cannot help."""


@dataclass(frozen=True, slots=True)
class ImageItem:
    """An image of the prompt, in the order of its placeholders. `digest` (SHA-256, hexadecimal) is its identity to the
    engine's cache; `data` is sent only when the engine has not seen it. `start`, `tokens`: the placeholders in the prompt that
    stand for it, as many as the engine itself will make of one; 0 tokens: there is one, of which nothing is known."""

    digest: str
    media_type: str
    data: bytes
    start: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of a stretch of a sequence: `rows` is uint8 or uint16 [rows, layers, k], row i routes token `start + i` as
    input."""

    start: int
    rows: npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Generation:
    """One continuation. ``logprobs`` in nats, float32 precision; ``versions`` the weight version of each token.

    candidates: the ids that top-k and top-p left open, per token; empty where the whole vocabulary was. () without any.
    routing: where the engine returns it, rows from the asked `routed_from` to the last token that was an input.
    resumed: how often the generation was interrupted and continued. away_s: seconds in which no replica would answer.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    candidates: tuple[tuple[int, ...], ...] = ()
    resumed: int = 0
    routing: Routing | None = None
    away_s: float = 0.0


Watch = Callable[[Sequence[int]], int | None]
"""Is given the tokens as they come, each once; None: go on; a number: the turn ends here, keep so many of these."""


class Engine(Protocol):
    async def generate(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        request_id: str,
        session_id: str,
        *,
        watch: Watch | None = None,
        images: Sequence[ImageItem] = (),
        routed_from: int = 0,
        within: float | None = None,
    ) -> Generation:
        """Sample one continuation of `token_ids`.

        session_id: keeps a session on the replica that has its prefix cached. watch: asks for tokens as they come; a
        generation that it ends has finish reason `stop`. routed_from: rows of routing before it are known already.
        within: seconds for the whole generation; default: the engine's own. Raises EngineRefused, EngineUnavailable.
        """
        ...

    async def version(self) -> int:
        """The weight version that is sampled under now (of several replicas: the oldest). Raises EngineUnavailable."""
        ...

    async def healthy(self) -> bool: ...

    async def close(self) -> None: ...
