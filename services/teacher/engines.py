"""The models that score: servers, or a tiny policy in this process, behind one interface."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.engines.base import EngineRefused
from pipeline.engines.policies import policy_dir
from pipeline.engines.replicas import Replicas
from pipeline.engines.scores import Scores
from pipeline.engines.sglang import SglangReplica
from pipeline.engines.vllm import VllmReplica
from pipeline.secret_file import read_secret
from schemas.config import Teacher

if TYPE_CHECKING:
    from pipeline.engines.tiny.runner import ModelRunner

_NEEDED = ("config.json", "model.safetensors")
"""Of a policy that only scores: it reads no text."""
Tokens = Sequence[int] | npt.NDArray[np.int32]


class Scorer(Protocol):
    """`pipeline.engines.replicas.Replicas`, or `TinyScorer`."""

    async def score(
        self,
        token_ids: Tokens,
        top_k: int,
        request_id: str,
        session_id: str = "",
        within: float | None = None,
    ) -> Scores:
        """See `pipeline.engines.scores`. Raises EngineRefused, EngineUnavailable."""
        ...

    async def healthy(self) -> bool: ...

    async def close(self) -> None: ...


async def open_scorer(teacher: Teacher, threads: int) -> Scorer:
    """threads: torch's, of a tiny teacher. Raises PolicyMissing, SecretUnreadable."""
    if teacher.kind == "tiny":
        return TinyScorer(await asyncio.to_thread(_loaded, teacher.policy, threads))
    token = (
        read_secret(teacher.token_file, f"teachers.{teacher.name}.token_file") if teacher.token_file else None
    )
    replica = SglangReplica if teacher.kind == "sglang" else VllmReplica
    return Replicas([replica(url, token) for url in (teacher.url, *teacher.replicas)], teacher.timeout_s)


def _loaded(policy: str, threads: int) -> ModelRunner:
    import torch

    from pipeline.engines.tiny.model import load_policy
    from pipeline.engines.tiny.runner import ModelRunner

    torch.set_num_threads(threads)
    # Scoring leaves the cache alone: one block, as there must be some.
    return ModelRunner(*load_policy(policy_dir(policy, _NEEDED)), blocks=1, block_size=16)


class TinyScorer:
    """A tiny policy, one row at a time on a thread of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="teacher")

    async def score(
        self,
        token_ids: Tokens,
        top_k: int,
        request_id: str,
        session_id: str = "",
        within: float | None = None,
    ) -> Scores:
        """As `Scorer.score`; nothing bounds its time."""
        vocabulary = self._runner.config.vocab_size
        if not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
            raise EngineRefused(
                f"tokens {min(token_ids)} to {max(token_ids)}, and the teacher has a vocabulary of {vocabulary}: it must have the policy's"
            )
        ids = tuple(int(token) for token in token_ids)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._scored, ids, top_k)

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _scored(self, ids: tuple[int, ...], top_k: int) -> Scores:
        own, top_ids, top = self._runner.score(ids, top_k)
        # Nothing is before the first token.
        return Scores(
            np.array([0.0, *own], np.float32),
            np.array([[-1] * top_k, *top_ids], np.int32).reshape(len(ids), top_k),
            np.array([[-np.inf] * top_k, *top], np.float32).reshape(len(ids), top_k),
        )
