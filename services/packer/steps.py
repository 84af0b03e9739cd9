"""The batches that a packer works on: their windows, and which sequences they have lost. No effects.

Promises:
- a window is of the newest revision of its batch in what matters to it: once the batch is planned anew without a sequence of
  its own, it is to be planned again, and not to be built before;
- a batch loses at most `packer.quarantine` of its sequences, and one at least, unless that share is 0; never more than an event
  can name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import ValidationError

from pipeline.batch.windows import Window, meta, plan_window, shapes, unknown_bytes
from pipeline.feed.memfd import Layout, plan_layout
from pipeline.store import ObjectDamaged, ObjectMissing
from pipeline.vision.owners import IMAGE_ARRAYS, WindowImages, window_images
from schemas.config import Packer, RunConfig
from schemas.envelope import Event
from schemas.facts import MAX_LEFT_OUT, BatchYielded, SequenceQuarantined
from schemas.keys import image_key
from schemas.parallel import Coordinate
from schemas.plan import Plan, PlanSequence


class Lost(NamedTuple):
    """A sequence, for a fact."""

    source: str
    sample: str
    sequence: str


def _lost(sequence: PlanSequence) -> Lost:
    return Lost(sequence.source, sequence.sample, sequence.sequence)


@dataclass(eq=False)
class Planned:
    """A window that may be built. `size`: its bytes, as far as they are known before anything is read, and exact after that;
    `owners`: of each object that it reads, the sequences that are lost with it; `blank`: those of its sequences that it leaves
    out; `sequences`: all that it depends on."""

    event: Event
    window: Window
    images: WindowImages | None
    size: int
    revision: int
    owners: Mapping[str, tuple[Lost, ...]]
    blank: frozenset[str]
    sequences: frozenset[str]


@dataclass
class Step:
    """A batch that is yielded and not trained. `windows`: of the coordinate, by micro-batch."""

    event: Event
    fact: BatchYielded
    sequences: int = 0
    windows: dict[int, Planned] = field(default_factory=dict[int, Planned])
    unusable: str | None = None
    """Why its plan cannot be used."""
    found: dict[str, str] = field(default_factory=dict[str, str])
    """Sequences of which this packer has found an object damaged or gone, and what was wrong."""


class Revision(NamedTuple):
    """The newest of a step, and the sequences that it leaves out."""

    number: int = 0
    without: frozenset[str] = frozenset()


def absent(plan: Plan, columns: Sequence[str]) -> list[str]:
    """The optional columns that no payload of the plan has."""
    names = {column.name.split(".")[0] for sequence in plan.sequences for column in sequence.payload.columns}
    return [column for column in columns if column not in names]


def current(planned: Planned, revision: Revision) -> bool:
    """Whether the window leaves out what the revision does."""
    return planned.sequences & revision.without == planned.blank


def may_be_built(step: Step, planned: Planned, revision: Revision) -> bool:
    """Not while it waits for a revision without a sequence in quarantine."""
    if not step.found and not revision.without:
        return True
    return current(planned, revision) and not planned.sequences & step.found.keys() - revision.without


def too_many(packer: Packer, number: int, step: Step, revision: Revision) -> str | None:
    """Why the step cannot be trained without the sequences that it has lost, if it has lost too many."""
    lost = len(revision.without | step.found.keys())
    share = max(1, int(packer.quarantine * step.sequences)) if packer.quarantine else 0
    allowed = min(share, MAX_LEFT_OUT)
    if lost <= allowed:
        return None
    last = next(reversed(step.found.values()), "")
    return (
        f"step {number} has lost {lost} of its {step.sequences} sequences, packer.quarantine = {packer.quarantine:g} allows "
        f"{allowed}: restore their objects, or raise it, and start the packer again{'; the last: ' if last else ''}{last}"
    )


def quarantined(lost: Lost, step: int, error: ObjectDamaged | ObjectMissing) -> SequenceQuarantined:
    damaged = error if isinstance(error, ObjectDamaged) else None
    return SequenceQuarantined(
        source=lost.source,
        sample=lost.sample,
        sequence=lost.sequence,
        step=step,
        reason="missing" if damaged is None else "damaged",
        key=error.key,
        column=(damaged and damaged.column) or "",
        block=damaged and damaged.block,
        detail=str(error)[:2000],
    )


def form(window: Window, images: WindowImages | None) -> Layout:
    """Where everything of the window lies: exact but for candidate ids, until their offsets are read."""
    arrays = shapes(window)
    if images is not None:
        arrays |= {name: (IMAGE_ARRAYS[name], shape) for name, shape in images.shapes().items()}
    return plan_layout(meta(window), arrays)


def _size(window: Window, images: WindowImages | None) -> int:
    """Bytes of the window, with what its candidate sets are thought to be."""
    return form(window, images).size + unknown_bytes(window)


def parse(body: bytes, run: str, fact: BatchYielded) -> Plan:
    """Raises ValueError on a plan that is not the event's, or breaks its promises."""
    try:
        plan = Plan.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(
            f"{fact.plan.key} is no plan ({error.error_count()} errors, first: {error.errors()[0]['msg']})"
        ) from error
    plan.check()
    if (plan.run, plan.step, plan.microbatches) != (run, fact.step, fact.microbatches):
        raise ValueError(
            f"{fact.plan.key} is for {plan.run}/{plan.step} with {plan.microbatches} micro-batches, "
            f"the event for {run}/{fact.step} with {fact.microbatches}"
        )
    return plan


def planned(
    plan: Plan,
    shows: Mapping[str, Sequence[int]],
    config: RunConfig,
    at: Coordinate,
    microbatch: int,
    event: Event,
    revision: Revision,
) -> Planned:
    """The window of a coordinate. `shows`: `showing` of the plan. Raises ValueError on what is outside the plan, or what its
    payloads contradict, KeyError on a payload without a column that it must have."""
    without = revision.without
    window = plan_window(
        plan,
        at.dp,
        microbatch,
        at.cp,
        at.pp,
        stages=config.batch.pp,
        pp_layers=config.batch.pp_layers,
        columns=config.packer.columns,
        without=without,
        revision=revision.number,
    )
    images = window_images(plan, at.dp, microbatch, at.cp, without) if at.pp == 0 else None
    owners: dict[str, tuple[Lost, ...]] = {}
    for row in window.rows:
        for header in (row.payload, row.sidecar):
            if header is not None:
                owners[header.key] = (_lost(plan.sequences[plan.rows.sequence[row.index]]),)
    for each in images.encode if images is not None else ():
        digest = each.item.digest
        owners[image_key(plan.run, digest)] = tuple(_lost(plan.sequences[i]) for i in shows[digest])
    sequences = frozenset(lost.sequence for each in owners.values() for lost in each)
    return Planned(
        event=event,
        window=window,
        images=images,
        size=_size(window, images),
        revision=revision.number,
        owners=owners,
        blank=sequences & without,
        sequences=sequences,
    )
