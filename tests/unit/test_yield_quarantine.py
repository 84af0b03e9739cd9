"""A batch whose sequences turn out damaged: what is decided, once, in whatever order it is told."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batch.quarantine import Quarantine
from pipeline.batch.sampler import SamplerCore
from pipeline.replay import SERVICES, Rerun
from pipeline.replay.trace import Tracer
from schemas.config import Packer
from schemas.envelope import Event, encode, new_event
from schemas.facts import (
    MAX_LEFT_OUT,
    BatchReplanned,
    BatchYielded,
    Fact,
    SequenceQuarantined,
    StepTrained,
)
from schemas.payload import Ref
from services.cli.events import line
from services.cli.live import event_line
from services.dashboard import View, fold
from services.packer.steps import Revision, Step, too_many
from tests.unit.factories import event
from tests.unit.signal_life import Life, member
from tests.unit.signal_world import graded


def quarantined(
    sequence: str, step: int = 1, reason: Literal["damaged", "missing"] = "damaged", **given: Any
) -> SequenceQuarantined:
    return SequenceQuarantined(
        source="math",
        sample=sequence.rpartition("-")[0],
        sequence=sequence,
        step=step,
        reason=reason,
        key=f"runs/r/payloads/math/{sequence}-a1.safetensors",
        **given,
    )


def trained(step: int) -> StepTrained:
    ref = Ref(key="w", bytes=1, crc32c=0)
    return StepTrained(
        step=step,
        parent=None,
        loss=0.0,
        kl=0.0,
        grad_norm=0.0,
        loss_tokens=1,
        seconds=1.0,
        weights=ref,
        optimizer=ref,
    )


def yielded(batches: int = 1, hold: tuple[type[Fact], ...] = ()) -> Life:
    """A run with batches of one group of three."""
    life = Life(hold=hold, group_size=3, accept={"drop_all_zero": False})
    for sample in range(batches):
        members = [member(n, float(n == 0), sample=sample) for n in range(3)]
        life.tell(graded(life.roll_out(*members, sample=sample, task=sample), 0))
    return life


FIRST, SECOND, THIRD = (f"math-000000-{n}" for n in range(3))


def test_each_sequence_has_its_revision_which_leaves_out_those_before_it_too() -> None:
    life = yielded()
    life.tell(quarantined(SECOND), quarantined(FIRST))
    assert life.of(BatchReplanned) == [
        BatchReplanned(step=1, revision=1, without=(SECOND,)),
        BatchReplanned(step=1, revision=2, without=(SECOND, FIRST)),
    ]
    assert len(life.of(BatchYielded)) == 1, "the plan stands"


def test_what_is_told_again_is_decided_again_in_the_same_words() -> None:
    life = yielded()
    life.tell(quarantined(SECOND), quarantined(FIRST), quarantined(SECOND, reason="missing"))
    one, two, again = life.of(BatchReplanned)
    assert again == one
    life.tell(quarantined(THIRD))
    assert life.of(BatchReplanned)[-1] == BatchReplanned(step=1, revision=3, without=(*two.without, THIRD))


@pytest.mark.parametrize(
    "fact",
    [
        quarantined(FIRST, step=2),
        quarantined("math-000001-0", step=1),
        quarantined("math-000000-3", step=1),
    ],
    ids=["of a batch that is not yielded", "of another batch's sequence", "of no sequence"],
)
def test_what_is_not_about_a_batch_decides_nothing(fact: SequenceQuarantined) -> None:
    life = yielded()
    life.tell(fact)
    assert not life.of(BatchReplanned)
    # Nor does it stand in the way of what is.
    life.tell(quarantined(FIRST))
    assert life.of(BatchReplanned) == [BatchReplanned(step=1, revision=1, without=(FIRST,))]


def test_of_a_batch_that_is_trained_nothing_is_decided() -> None:
    life = yielded(2)
    assert [f.step for f in life.of(BatchYielded)] == [1, 2]
    life.tell(trained(1), quarantined(FIRST), quarantined("math-000001-0", step=2))
    assert life.of(BatchReplanned) == [BatchReplanned(step=2, revision=1, without=("math-000001-0",))]
    life.tell(trained(2))
    assert life.core.quarantine.dump()["batches"] == [], "names are kept while they are needed"


def test_a_batch_that_comes_back_after_its_training_is_not_kept() -> None:
    core = yielded().core
    core.quarantine.trained(3)
    core.quarantine.yielded(2, [THIRD])
    core.quarantine.quarantined(quarantined(THIRD, step=2))
    assert core.quarantine.replanned(quarantined(THIRD, step=2)) is None


def test_a_batch_leaves_out_no_more_sequences_than_an_event_can_name() -> None:
    # Names as long as names may be: one more, and no sampler could publish what it has decided.
    names = [f"{'s' * 119}-000000-{n:03}"[-128:] for n in range(MAX_LEFT_OUT + 2)]
    core = Quarantine()
    core.yielded(10**9, names)
    decided: list[BatchReplanned | None] = []
    for name in names:
        fact = quarantined(name, step=10**9).model_copy(update={"key": "k"})
        core.quarantined(fact)
        decided.append(core.replanned(fact))
    assert [fact and fact.revision for fact in decided] == [*range(1, MAX_LEFT_OUT + 1), None, None]
    last = decided[MAX_LEFT_OUT - 1]
    assert last is not None
    assert last.without == tuple(names[:MAX_LEFT_OUT])
    encode(new_event(last, "sampler", None), "r")
    # Packers, who wait for each of them, know it too, whatever share may be lost.
    step = Step(event(quarantined(FIRST), 1), yielded().of(BatchYielded)[0], sequences=10 * MAX_LEFT_OUT)
    allowed = frozenset(names[:MAX_LEFT_OUT])
    assert too_many(Packer(quarantine=1.0), 1, step, Revision(MAX_LEFT_OUT, allowed)) is None
    step.found[names[-1]] = "damaged"
    said = too_many(Packer(quarantine=1.0), 1, step, Revision(MAX_LEFT_OUT, allowed))
    assert said is not None
    assert f"allows {MAX_LEFT_OUT}" in said


FACTS: list[Fact] = [
    *(quarantined(sequence, step=1) for sequence in (FIRST, SECOND, THIRD)),
    *(quarantined(f"math-000001-{n}", step=2) for n in range(2)),
    quarantined(FIRST, step=2),
    trained(1),
]


@given(told=st.lists(st.sampled_from(FACTS), max_size=12), cut=st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_a_sampler_that_is_replaced_or_doubled_decides_the_same(told: list[Fact], cut: int) -> None:
    life = yielded(2)
    for fact in told:
        life.tell(fact)
    # Two samplers on one log; one goes through a dump.
    cores = [SamplerCore("r"), SamplerCore("r")]
    decided: list[dict[str, Fact]] = [{}, {}]
    for number, each in enumerate(life.log):
        for core, mine in zip(cores, decided, strict=True):
            core.fold(each)
            for decision in core.decide(each):
                subject = decision.fact.subject("r").text
                assert mine.setdefault(subject, decision.fact) == decision.fact
        if number == cut:
            state = orjson.loads(orjson.dumps(cores[1].dump()))
            cores[1] = SamplerCore("r")
            cores[1].load(state)
    assert decided[0] == decided[1]
    assert cores[0].dump() == cores[1].dump()
    replanned = [f for f in decided[0].values() if isinstance(f, BatchReplanned)]
    for step in (1, 2):
        mine = [f for f in replanned if f.step == step]
        assert [f.revision for f in mine] == list(range(1, len(mine) + 1))
        for before, after in pairwise(mine):
            assert after.without[:-1] == before.without
            assert after.without[-1] not in before.without


def test_a_replay_decides_it_again_and_names_what_differs() -> None:
    life = yielded()
    life.tell(quarantined(SECOND), quarantined(FIRST))
    for name in ("sampler", "yield"):
        again = Rerun("r", SERVICES[name])
        for each in life.log:
            again.feed(each)
        report = again.report()
        assert report.divergences == ()
        assert report.compared["batch.replanned"] == 2
    altered = Rerun("r", SERVICES["sampler"])
    for each in life.log:
        if isinstance(each.fact, BatchReplanned):
            each = Event(**{**_fields(each), "fact": each.fact.model_copy(update={"without": (THIRD,)})})
        altered.feed(each)
    assert [d.field for d in altered.report().divergences] == ["without[0]", "without[0]"]


def _fields(each: Event) -> dict[str, Any]:
    return {name: getattr(each, name) for name in each.__dataclass_fields__}


def test_people_are_told() -> None:
    life = yielded()
    life.tell(quarantined(SECOND, column="tokens", block=3, detail="bytes differ"))
    view = View()
    told: list[str] = []
    for each in life.log:
        fold(view, each)
        if isinstance(each.fact, SequenceQuarantined | BatchReplanned):
            told += [line(each), event_line(view, each) or ""]
    assert view.source("math").quarantined == 1
    assert 'reason="damaged"' in told[0]
    assert 'column="tokens"' in told[0]
    assert told[1].startswith(f"step 1: an object of {SECOND} is damaged: runs/r/payloads/")
    assert told[2].endswith(f'step=1 revision=1 without=1 newest="{SECOND}"')
    assert told[3] == f"step 1: batch without 1 sequence: {SECOND} is left out too"
    whole = line(event(quarantined(SECOND), 1))
    assert "column" not in whole, "the object as a whole"
    tracer = Tracer("r", "1")
    for each in life.log:
        tracer.feed(each)
    notes = {node.type: node.note for node in tracer.trace().nodes}
    assert notes["sequence.quarantined"].endswith("-a1.safetensors column tokens block 3")
    assert notes["batch.replanned"] == f"without 1, the newest {SECOND}"
