"""What the hook service decides: from the facts and the columns of an accepted group to its advantages, or that there are none.

Promises:
- a group is shaped on the rewards that the sampler judges it on: those of a late grading only where that stood in the log
  before `sample.accepted`, so that whoever shapes a group, and however often, shapes the same;
- members are in the order of `sample.completed`, and a member has a row of each column for each of its loss tokens;
- where the source drops groups whose advantages are all zero, that is rejected which turns out to be one;
- the largest group of a source whose `sample.shaped` fits into an event is known from its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.signal.groups import Finished, Group
from pipeline.signal.hooks import Chain, Columns, Signal
from pipeline.signal.overlong import ANY, Fit
from pipeline.signal.sampling import ZERO, signal
from schemas.envelope import Event
from schemas.facts import (
    MAX_BODY,
    SampleAccepted,
    SampleCompleted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceFinished,
)
from schemas.keys import payload_key, sidecar_key
from schemas.names import attempt_id, sample_id, sequence_id
from schemas.payload import BLOCK_TOKENS, ColumnHeader, ContextMeta, PayloadHeader, Span
from schemas.sources import Source

Tokens = npt.NDArray[np.float32] | None
"""Advantages of a member's loss tokens; None: one stands for all."""
_SAMPLES = 10**9
"""Groups of one source in one run: more are not dispatched in a year."""
COLUMN = "advantages"
"""The one column of an advantages sidecar."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The facts of an accepted group. finished: in the order of `completed`. fit: what becomes of its overlong contexts."""

    source: Source
    accepted: SampleAccepted
    completed: SampleCompleted
    graded: SampleGraded
    finished: tuple[SequenceFinished, ...]
    fit: Fit = ANY

    def signal(self, columns: Sequence[Columns]) -> Signal:
        """What the chain begins with, as the sampler makes it; columns: of each member, by name. Raises ValueError where the
        facts are not of one group."""
        n = len(self.finished)
        if len(self.graded.rewards) != n:
            raise ValueError(
                f"{self.accepted.sample}: {len(self.graded.rewards)} graded rewards for {n} finished sequences"
            )
        group = Group(self.source.name, self.accepted.sample, n)
        group.rewards, group.quality, group.hacks = (
            self.graded.rewards,
            self.graded.quality,
            self.graded.hacks,
        )
        for i, fact in enumerate(self.finished):
            masked = self.source.effects.get(fact.termination) == "mask"
            group.members[fact.sequence] = i
            group.finished[fact.sequence] = Finished.of(fact, masked, self.source.penalties, self.fit)
        return replace(signal(group, self.source), columns=tuple(columns))


def stands(own: SampleGraded, late: Event | None, accepted: Event, revision: int) -> SampleGraded:
    """The grading by which a revision is shaped: of `own`, revision 0, and the late one, if there is one."""
    if late is None or not isinstance(late.fact, SampleGraded) or len(late.fact.rewards) != len(own.rewards):
        return own
    return late.fact if revision or late.seq < accepted.seq else own


def rejected(accepted: SampleAccepted, reason: str = "failed") -> SampleRejected:
    """The end of an accepted group: `failed` where no advantages could be made, which are never made up, or `all_zero`."""
    return SampleRejected.model_validate(
        {**accepted.model_dump(exclude={"min_version"}), "reason": reason, "by": "hook"}
    )


def loss_rows(
    contexts: Sequence[ContextMeta], spilled: Mapping[int, Sequence[Span]] = MappingProxyType({})
) -> list[Span]:
    """The rows of the payload that carry loss, in its order. spilled: the spans of contexts that left them to the payload, by
    index."""
    for index, context in enumerate(contexts):
        if context.spilled and index not in spilled:
            raise ValueError(f"context {index} leaves its loss spans to the payload, which was not read")
    return [
        Span(start=context.offset + span.start, end=context.offset + span.end)
        for index, context in sorted(enumerate(contexts), key=lambda each: each[1].offset)
        for span in spilled.get(index, context.loss_spans)
    ]


def by_token(made: Signal) -> tuple[Tokens, ...]:
    """Of each member the advantages of its loss tokens, None where one stands for all of them."""
    tokens = made.tokens or (None,) * len(made.members)
    return tuple(
        None if array is None or not member.loss_tokens else np.ascontiguousarray(array, np.float32)
        for member, array in zip(made.members, tokens, strict=True)
    )


def all_zero(made: Signal) -> bool:
    """Whether no member would be trained with an advantage."""
    members = zip(made.members, made.made(), by_token(made), strict=True)
    return all(
        member.masked or np.max(np.abs(advantage if tokens is None else tokens)) < ZERO
        for member, advantage, tokens in members
    )


def shaped(
    accepted: SampleAccepted,
    chain: Chain,
    made: Signal,
    sidecars: Sequence[PayloadHeader | None],
    revision: int,
) -> SampleShaped:
    """The fact of a signal that has come through the chain; sidecars: where its `by_token` were written."""
    means = [
        float(advantage) if tokens is None else float(np.mean(tokens, dtype=np.float64))
        for advantage, tokens in zip(made.made(), by_token(made), strict=True)
    ]
    return SampleShaped(
        source=accepted.source,
        sample=accepted.sample,
        revision=revision,
        estimator=chain.estimator,
        advantages=tuple(means),
        sidecars=tuple(sidecars) if any(sidecars) else (),
        by="hook",
    )


def largest_group(run: str, source: Source, attempts: int) -> int:
    """Members of a group whose `sample.shaped` is an event at its largest: with a sidecar each, of as many tokens as
    `source.behaviour` lets one sample. attempts: agent_loop.max_attempts."""
    behaviour = source.behaviour
    tokens = min(
        behaviour.max_turns * behaviour.max_tokens,
        behaviour.max_session_tokens or behaviour.max_turns * behaviour.max_tokens,
    )
    sample = sample_id(source.name, _SAMPLES)
    key = payload_key(run, source.name, attempt_id(sequence_id(sample, source.group_size), attempts))
    rows = max(1, tokens)
    column = ColumnHeader(
        name=COLUMN,
        dtype="float32",
        shape=(rows,),
        offset=10**4 + 16 * (rows // BLOCK_TOKENS),
        bytes=4 * rows,
        crc32c=(2**32 - 1,) * -(-rows // BLOCK_TOKENS),
    )
    header = PayloadHeader(key=sidecar_key(key, f"{COLUMN}.1"), bytes=10**5 + 5 * rows, columns=(column,))

    def size(members: int) -> int:
        fact = SampleShaped(
            source=source.name,
            sample=sample,
            revision=1,
            estimator="e" * 128,
            advantages=(-1.2345678901234567e-100,) * members,
            sidecars=(header,) * members,
            by="hook",
        )
        return len(orjson.dumps(fact.model_dump(mode="json")))

    one = size(1)
    return 1 + max(0, MAX_BODY - one) // (size(2) - one) if one <= MAX_BODY else 0
