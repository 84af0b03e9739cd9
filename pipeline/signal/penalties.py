"""What penalties do to the advantages of the tokens that rules have flagged, from events alone.

Promises:
- a token's advantage A becomes multiply * A + add: the rules that flagged it compose in the order of the configuration, as
  affine maps. `scale` multiplies, `set` forgets what was, `subtract` subtracts, `monitor` does nothing. A token that any rule
  masks is not trained, whatever the others do;
- `weigh` is MiMo's Eq. 5, one step at the place of the source's first such rule, on all tokens of the sequence: in one with
  a positive advantage flagged tokens have 0 and the others alpha * A, in one with a negative advantage kappa * A and beta * A.
  Where neither limit is met, alpha and beta leave the batch's positive and its negative mass what they were;
- only loss tokens are changed or counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any, NamedTuple

from pydantic import Field

from pipeline.signal.hooks import Signal, Stage
from schemas.facts import PenaltyFactors
from schemas.payload import ContextMeta
from schemas.section import Section
from schemas.signal import Penalty
from schemas.sources import Source


class Weighing(Section):
    """Options of the hook `segment_penalty`."""

    kappa: float = Field(
        default=2.0, gt=1, le=1e3, description="of flagged tokens in sequences with a negative advantage"
    )
    alpha_max: float = Field(default=2.0, ge=1, le=1e3, description="alpha, at most")
    beta_min: float = Field(default=0.5, ge=0, le=1, description="beta, at least")


class SegmentPenalty:
    """The hook `segment_penalty`: says that the strategy `weigh` counts, and how. Advantages pass as they are: what they
    become depends on the whole batch, and is decided when it yields."""

    stage: Stage = "after"
    columns: tuple[str, ...] = ()

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = Weighing.model_validate(options or {})

    def __call__(self, signal: Signal) -> Signal:
        return signal


def weighing(source: Source) -> Weighing | None:
    """How the source weighs flagged tokens; None where it does not have the hook. Imports none of its other hooks."""
    hooks = (SegmentPenalty(hook.options) for hook in source.hooks if hook.kind == "segment_penalty")
    return next((hook.options for hook in hooks), None)


class Change(NamedTuple):
    """Loss tokens [start, end) of a context that rules changed: A becomes multiply * A + add; not `keep`: not trained.
    weighed: the strategy `weigh` has flagged them."""

    start: int
    end: int
    multiply: float
    add: float
    keep: bool
    weighed: bool


class Counts(NamedTuple):
    """Loss tokens that no rule masks; of these, those that `weigh` has flagged, and the others."""

    surviving: int
    flagged: int
    unflagged: int


class Factors(NamedTuple):
    """What Eq. 5 multiplies the advantages of one sequence by."""

    flagged: float
    others: float


NO_FACTORS = Factors(1.0, 1.0)


def changes(
    context: ContextMeta, penalties: Sequence[Penalty], factors: Factors = NO_FACTORS, skip: int = 0
) -> list[Change]:
    """The flagged loss tokens of a context, ascending and disjoint, without those that only `monitor` flagged.

    factors: the sequence's, of `factors_of`. skip: tokens at its beginning that are left out; the one after them carries no loss
    then. A flag of a rule that `penalties` does not have counts for nothing.
    """
    found: list[Change] = []
    first = skip + 1 if skip else 0
    spans = iter(context.loss_spans)
    span = next(spans, None)
    for flag in context.flags:
        while span is not None and span.end <= flag.start:
            span = next(spans, None)
        while span is not None and span.start < flag.end:
            start, end = max(span.start, flag.start, first), min(span.end, flag.end)
            change = _composed(start, end, flag.rules, penalties, factors) if start < end else None
            if change is not None:
                found.append(change)
            if span.end > flag.end:
                break
            span = next(spans, None)
    return found


def _composed(
    start: int, end: int, rules: int, penalties: Sequence[Penalty], factors: Factors
) -> Change | None:
    multiply, add, keep, counts = 1.0, 0.0, True, False
    weighs = [i for i, penalty in enumerate(penalties) if penalty.strategy == "weigh"]
    weighed = any(rules >> i & 1 for i in weighs)
    for i, penalty in enumerate(penalties):
        if weighs and i == weighs[0]:
            factor = factors.flagged if weighed else factors.others
            multiply, add = multiply * factor, add * factor
        if not rules >> i & 1 or penalty.strategy == "monitor":
            continue
        counts = True
        match penalty.strategy:
            case "mask":
                keep = False
            case "scale":
                multiply, add = multiply * penalty.value, add * penalty.value
            case "set":
                multiply, add = 0.0, penalty.value
            case "subtract":
                add -= penalty.value
            case "weigh":
                pass
    return Change(start, end, multiply, add, keep, weighed) if counts else None


def counts(context: ContextMeta, penalties: Sequence[Penalty], skip: int | None = 0) -> Counts:
    """What is left of a context's loss tokens. skip: tokens at its beginning that are left out; None: all of them."""
    if skip is None:
        return Counts(0, 0, 0)
    loss = context.loss_tokens(skip)
    if not context.flags:
        return Counts(loss, 0, loss)
    found = changes(context, penalties, skip=skip)
    surviving = loss - sum(c.end - c.start for c in found if not c.keep)
    flagged = sum(c.end - c.start for c in found if c.keep and c.weighed)
    return Counts(surviving, flagged, surviving - flagged)


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence of the batch whose source has the hook. advantage: of each of its tokens, or their mean."""

    weighing: Weighing
    advantage: float
    flagged: int
    unflagged: int


def batch_factors(parts: Iterable[Part]) -> PenaltyFactors:
    """alpha = min(alpha_max, 1 + sum_H+ A / sum_C+ A) and beta = max(beta_min, 1 - sum_H- (kappa - 1) |A| / sum_C- |A|), where
    H are flagged and C unflagged loss tokens, + and - the sign of their sequence's advantage; 1 for a sum over C of 0.

    MiMo, Eq. 5. Where sources differ, each kappa is its own source's, and the tightest limits hold for all.
    """
    parts = list(parts)
    positive = [p for p in parts if p.advantage > 0]
    negative = [p for p in parts if p.advantage < 0]
    kept = fsum(p.advantage * p.unflagged for p in positive)
    lost = fsum(p.advantage * p.flagged for p in positive)
    alpha = 1.0 + lost / kept if kept else 1.0
    kept = fsum(-p.advantage * p.unflagged for p in negative)
    added = fsum((p.weighing.kappa - 1.0) * -p.advantage * p.flagged for p in negative)
    beta = 1.0 - added / kept if kept else 1.0
    return PenaltyFactors(
        alpha=min([alpha, *(p.weighing.alpha_max for p in parts)]),
        beta=max([beta, *(p.weighing.beta_min for p in parts)]),
    )


def factors_of(weighing: Weighing, advantage: float, batch: PenaltyFactors) -> Factors:
    """What the batch's factors mean for a sequence of that advantage."""
    if advantage > 0:
        return Factors(0.0, batch.alpha)
    if advantage < 0:
        return Factors(weighing.kappa, batch.beta)
    return NO_FACTORS
