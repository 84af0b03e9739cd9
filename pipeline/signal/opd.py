"""On-policy distillation: a teacher's log-probabilities of what the policy sampled, as advantages of its tokens.

The advantage of a token is weight * (log p_teacher - log p_policy), no gradient through it: its mean over the policy's own samples
is the negative reverse KL divergence to the teacher (arXiv:2306.13649; as an advantage, MiMo-V2-Flash, arXiv:2601.02780).

Promises:
- a sequence that the teacher has not scored, or of which nothing is trained, gets nothing from it: zeros, or with `add` what the
  estimator gave it;
- the sequence's own advantage is the mean of its tokens';
- log-probabilities that are not finite, or of another number of tokens, are refused with BadHook.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from pipeline.signal.hooks import Array, BadHook, Columns, Member, Signal, Stage
from schemas.names import Name
from schemas.section import Section

Tokens = npt.NDArray[np.float32]

TAIL = 1e-6
"""Mass outside the top k, at least: less than that is the rounding of float32 log-probabilities."""


class OpdOptions(Section):
    """Options of the hooks `opd` and `opd_topk`."""

    teacher: Name = Field(description="the teacher, one of the source's", max_length=32)
    weight: float = Field(default=1.0, gt=0, le=1e3, description="of the difference of log-probabilities")
    clip: float = Field(
        default=0.0, ge=0, le=1e4, description="the difference's absolute value in nats, at most; 0: no limit"
    )
    add: bool = Field(
        default=False,
        description="whether it adds to the advantages that an estimator before it made; if not, it makes them itself, and rewards count for nothing",
    )


class Opd:
    """By the teacher's log-probability of each sampled token."""

    read: tuple[str, ...] = ("logprobs",)
    """Columns of the teacher's sidecar."""
    own: tuple[str, ...] = ("logprobs",)
    """Columns of the payload."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = OpdOptions.model_validate(options or {})

    @property
    def stage(self) -> Stage:
        return "after" if self.options.add else "advantages"

    @property
    def columns(self) -> tuple[str, ...]:
        return *self.own, *map(self._name, self.read)

    def _name(self, column: str) -> str:
        return f"teacher.{self.options.teacher}.{column}"

    def scores(self, columns: Columns) -> npt.NDArray[np.floating[Any]]:
        """The teacher's log-probabilities of the loss tokens, [L]."""
        return columns[self._name("logprobs")]

    def __call__(self, signal: Signal) -> Signal:
        n, add = len(signal.members), self.options.add
        advantages = signal.made().copy() if add else np.zeros(n)
        tokens: list[Tokens | None] = list(signal.tokens) if add and signal.tokens else [None] * n
        for i, (member, columns) in enumerate(zip(signal.members, signal.columns, strict=True)):
            scored = all(self._name(column) in columns for column in self.read)
            if scored and member.loss_tokens and not member.masked:
                before = tokens[i]
                found = self._difference(member, columns) + (advantages[i] if before is None else before)
                tokens[i] = found.astype(np.float32)
                advantages[i] = found.mean()
            elif not add:
                tokens[i] = np.zeros(member.loss_tokens, np.float32)
        return replace(signal, advantages=advantages, tokens=tuple(tokens))

    def _difference(self, member: Member, columns: Columns) -> Array:
        shapes = {name: columns[name].shape for name in self.columns}
        if any(shape[:1] != (member.loss_tokens,) for shape in shapes.values()):
            raise BadHook(
                f"sequence {member.sequence} has {member.loss_tokens} loss tokens, and its columns are of shapes {shapes}"
            )
        found = self.scores(columns).astype(np.float64) - columns["logprobs"]
        if not np.isfinite(found).all():
            raise BadHook(
                f"sequence {member.sequence}: {int((~np.isfinite(found)).sum())} differences of the teacher's "
                f"log-probabilities ({self.options.teacher}) and its own are not finite"
            )
        if self.options.clip:
            found = np.clip(found, -self.options.clip, self.options.clip)
        return self.options.weight * found


class OpdTopK(Opd):
    """By the teacher's k likeliest tokens alone, where it gives no more.

    The log-probability of a sampled token that is not among them is taken as the most it can be: the least of the k, or the log
    of all mass outside them (at least `TAIL`), whichever is less. So an unlikely token is punished too little, and too much only by
    what the rounding of the k leaves.
    """

    read = ("top_ids", "top_logprobs")
    own = ("tokens", "logprobs")

    def scores(self, columns: Columns) -> npt.NDArray[np.floating[Any]]:
        ids, logprobs = (columns[self._name(column)] for column in self.read)
        return top_scores(columns["tokens"], ids, logprobs)


def top_scores(
    tokens: npt.NDArray[np.integer[Any]],
    ids: npt.NDArray[np.integer[Any]],
    logprobs: npt.NDArray[np.floating[Any]],
) -> Array:
    """Log-probabilities of tokens [L], as `OpdTopK` takes them, by the likeliest ids and their logprobs, both [L, k], float64 [L].

    An id under 0 is a place that is not filled: the vocabulary has fewer than k tokens.
    """
    rows, filled = np.arange(len(tokens)), ids >= 0
    at = ids == tokens[:, None]
    mass = np.exp(logprobs, where=filled, out=np.zeros_like(logprobs)).sum(axis=1, dtype=np.float64)
    least = logprobs.min(axis=1, where=filled, initial=0.0)
    bound = np.minimum(np.log(np.maximum(1.0 - mass, TAIL)), least)
    return np.where(at.any(axis=1), logprobs[rows, at.argmax(axis=1)], bound).astype(np.float64)
