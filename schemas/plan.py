"""The plan of a batch: which contexts go to which micro-batch of which data-parallel rank, with their factors.

Written once to the store by the sampler at yield, read by the packers. Metadata only: making it touches no tensor.

Promises (`Plan.check` checks the first two):
- every row's context is in exactly one (dp, microbatch), and every rank has the same number of micro-batches;
- no micro-batch holds more than `token_budget` tokens; one of a batch with fewer rows than micro-batches is empty;
- denominators ride in the plan: a row's `loss_weight` is per loss token, so ranks only sum.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.names import Name
from schemas.payload import ContextMeta, Frozen, PayloadHeader

PLAN_VERSION = 1


class PlanSequence(Frozen):
    """A sequence whose contexts are rows of the plan; its header spares the packers a fetch."""

    source: Name
    sample: Name
    sequence: Name
    payload: PayloadHeader
    contexts: tuple[ContextMeta, ...]


class PlanRows(Frozen):
    """The rows as columns, all of one length. Row i is context `context[i]` of `sequences[sequence[i]]`."""

    sequence: tuple[int, ...]
    context: tuple[int, ...]
    dp: tuple[int, ...]
    microbatch: tuple[int, ...]
    advantage: tuple[float, ...] = Field(description="of every loss token of the row")
    loss_weight: tuple[float, ...] = Field(
        description="of every loss token of the row; the weights of a batch sum to 1 over its loss tokens"
    )


class Plan(Frozen):
    version: Literal[1] = 1
    run: Name
    step: int = Field(ge=1)
    policy_version: int = Field(ge=0)
    dp: int = Field(ge=1)
    cp: int = Field(default=1, ge=1)
    microbatches: int = Field(ge=1, description="per data-parallel rank")
    token_budget: int = Field(ge=1, description="largest micro-batch, in tokens")
    loss_tokens: int = Field(ge=0, description="of the whole batch")
    sequences: tuple[PlanSequence, ...]
    rows: PlanRows

    def check(self) -> None:
        """Asserts the promises; raises ValueError that names the row or micro-batch at fault."""
        rows = self.rows
        count = len(rows.sequence)
        lengths = {name: len(getattr(rows, name)) for name in type(rows).model_fields}
        if set(lengths.values()) != {count}:
            raise ValueError(f"plan {self.run}/{self.step}: columns of unequal length {lengths}")
        seen: set[tuple[int, int]] = set()
        fill: dict[tuple[int, int], int] = {}
        for i in range(count):
            if not 0 <= rows.sequence[i] < len(self.sequences):
                raise ValueError(
                    f"plan {self.run}/{self.step}: row {i} is of sequence {rows.sequence[i]}, there are {len(self.sequences)}"
                )
            if not 0 <= rows.context[i] < len(self.sequences[rows.sequence[i]].contexts):
                raise ValueError(
                    f"plan {self.run}/{self.step}: row {i} is of context {rows.context[i]}, which its sequence does not have"
                )
            place, home = (rows.sequence[i], rows.context[i]), (rows.dp[i], rows.microbatch[i])
            if place in seen:
                raise ValueError(
                    f"plan {self.run}/{self.step}: sequence {place[0]} context {place[1]} is planned twice"
                )
            if not (0 <= home[0] < self.dp and 0 <= home[1] < self.microbatches):
                raise ValueError(f"plan {self.run}/{self.step}: row {i} sits at {home}, outside the batch")
            seen.add(place)
            fill[home] = fill.get(home, 0) + self.sequences[place[0]].contexts[place[1]].tokens
        for home, tokens in fill.items():
            if tokens > self.token_budget:
                raise ValueError(
                    f"plan {self.run}/{self.step}: micro-batch {home} holds {tokens} tokens, budget {self.token_budget}"
                )
