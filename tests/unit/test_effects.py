"""What the effect `mask` of a termination does to a group, its plan and its dump; and that without effects nothing differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.batch.planning import plan_body
from pipeline.batch.sampler import SamplerCore
from pipeline.config import load
from pipeline.decision import Decision
from schemas.config import RunConfig
from schemas.facts import (
    BatchYielded,
    Fact,
    RunStarted,
    SampleAccepted,
    SampleCompleted,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFinished,
)
from schemas.plan import Plan
from services.cli.check import Place, faults
from tests.recorded import demo_events
from tests.unit.factories import config, event, finished

SAMPLE = "math-000000"
MASKED = {"agent_timeout": "mask", "overlong": "mask"}


def run_config(effects: dict[str, str] | None, **source: Any) -> RunConfig:
    whole = {
        "name": "math",
        "pool": "p",
        "groups": 1,
        "group_size": 3,
        "environment": {"kind": "arithmetic"},
        "effects": effects or {},
        **source,
    }
    return config(sources=[whole])


def member(number: int, reward: float, termination: str = "completed", **given: Any) -> SequenceFinished:
    fact = finished(f"{SAMPLE}-{number}", reward, **given)
    return fact.model_copy(update={"termination": termination})


class Life:
    """A group's life in a sampler, up to its batch."""

    def __init__(self, run: RunConfig, *members: SequenceFinished) -> None:
        self.core = SamplerCore("r")
        self.seq = 0
        self.facts: list[Fact] = []
        self.plans: list[Plan] = []
        self.tell(RunStarted(run="r", config=run.decisions()))
        for number in range(len(members)):
            self.tell(
                SequenceDispatched(
                    source="math",
                    sample=SAMPLE,
                    sequence=f"{SAMPLE}-{number}",
                    member=number,
                    group_size=len(members),
                    pool="p",
                    task_index=0,
                )
            )
        for fact in members:
            self.tell(fact)

    def tell(self, fact: Fact) -> None:
        self.seq += 1
        self.facts.append(fact)
        told = event(fact, self.seq)
        self.core.fold(told)
        for decision in self.core.decide(told):
            self.decided(decision)

    def decided(self, decision: Decision) -> None:
        match decision.fact:
            case SampleCompleted(rewards=rewards):
                self.facts.append(decision.fact)
                self.tell(SampleGraded(source="math", sample=SAMPLE, grader="none", rewards=rewards))
            case BatchYielded():
                self.facts.append(decision.fact)
                self.plans += [Plan.model_validate_json(body) for body in decision.objects.values()]
            case SampleAccepted() | SampleShaped() | SampleRejected():
                self.tell(decision.fact)
            case _:
                raise AssertionError(decision.fact)

    def only(self, kind: type[Any]) -> Any:
        [found] = [fact for fact in self.facts if isinstance(fact, kind)]
        return found


def rows(plan: Plan) -> list[tuple[str, float, float]]:
    """(sequence, advantage, weight) of each row."""
    names = [plan.sequences[i].sequence for i in plan.rows.sequence]
    return sorted(zip(names, plan.rows.advantage, plan.rows.loss_weight, strict=True))


def test_a_masked_sequence_counts_in_its_group_and_is_in_no_row() -> None:
    members = (member(0, 1.0), member(1, 0.0, "agent_timeout", generated=7), member(2, 0.0))
    masked, trained = Life(run_config(MASKED), *members), Life(run_config(None), *members)
    for life in (masked, trained):
        assert life.only(SampleAccepted).pass_rate == pytest.approx(1 / 3)
        assert life.only(SampleAccepted).mean_reward == pytest.approx(1 / 3)
    assert masked.only(SampleShaped) == trained.only(SampleShaped), (
        "the same baseline, with the masked one in it"
    )
    assert [name for name, _, _ in rows(masked.plans[0])] == [f"{SAMPLE}-0", f"{SAMPLE}-2"]
    assert [name for name, _, _ in rows(trained.plans[0])] == [f"{SAMPLE}-{n}" for n in range(3)]
    assert masked.plans[0].loss_tokens == 8
    assert sum(weight for _, _, weight in rows(masked.plans[0])) * 4 == pytest.approx(1.0)
    [share] = masked.only(BatchYielded).sources.values()
    assert (share.sequences, share.loss_tokens) == (3, 8)


def test_what_a_masked_sequence_is_like_does_not_decide_over_the_others() -> None:
    """Its tokens are not trained: how old, how many and in how large a context they are is nobody's matter."""
    long_and_old = member(1, 0.0, "overlong", tokens=1 << 20, generated=1 << 19, version=0)
    others = (member(0, 1.0, version=9), member(2, 0.0, version=9))
    run = run_config(MASKED, staleness=0)
    life = Life(run, others[0], long_and_old, others[1])
    assert life.only(SampleAccepted).min_version == 9
    unmasked = Life(run_config(None), others[0], long_and_old, others[1])
    assert unmasked.only(SampleRejected).reason == "overlong"


def test_a_group_of_which_nothing_is_left_to_train_is_rejected() -> None:
    all_masked = Life(run_config(MASKED), *(member(n, float(n == 0), "overlong") for n in range(3)))
    assert all_masked.only(SampleRejected).reason == "no_loss"
    # Rewards 0.5, 1, 0: the only one that is trained has the mean.
    no_signal = Life(
        run_config(MASKED, estimator="dr_grpo", accept={"pass_reward": 1.0}),
        member(0, 0.5),
        member(1, 1.0, "overlong"),
        member(2, 0.0, "overlong"),
    )
    assert no_signal.only(SampleRejected).reason == "all_zero"


def test_a_mask_survives_a_dump() -> None:
    life = Life(run_config(MASKED, groups=2), member(0, 1.0), member(1, 0.0, "overlong"), member(2, 0.0))
    loaded = SamplerCore("another")
    loaded.load(orjson.loads(orjson.dumps(life.core.dump())))
    assert [f.masked for f in loaded.groups[SAMPLE].ordered()] == [False, True, False]
    plans = [
        Plan.model_validate_json(plan_body([core.groups[SAMPLE]], core.decisions, "r", 1, None).body)
        for core in (life.core, loaded)
        if core.decisions is not None
    ]
    assert plans[0] == plans[1]


def test_without_effects_the_recorded_run_decides_what_it_decided() -> None:
    """Every decision of the recorded run is made again in the same words, plans by their checksums."""
    core = SamplerCore("demo")
    recorded = {e.fact.subject("demo").text: e.fact for e in demo_events()}
    made: dict[str, Fact] = {}
    for found in demo_events():
        core.fold(found)
        for decision in core.decide(found):
            made.setdefault(decision.fact.subject("demo").text, decision.fact)
    kinds = (SampleCompleted, SampleAccepted, SampleRejected, SampleShaped, BatchYielded)
    assert {s: f for s, f in made.items() if s in recorded} == {
        s: f for s, f in recorded.items() if isinstance(f, kinds)
    }


def test_effects_are_looked_at_before_anything_starts() -> None:
    demo = load(Path(__file__).parents[2] / "examples" / "demo.toml")

    def said(effects: dict[str, str]) -> list[tuple[Place, str]]:
        first = demo.sources[0].model_copy(update={"effects": effects})
        changed = demo.model_copy(update={"sources": (first, *demo.sources[1:])})
        return [fault for fault in faults(changed) if "effects" in fault[0]]

    assert said({"overlong": "mask"}) == []
    [(place, what)] = said({"harness_lost": "train"})
    assert place == ("sources", 0, "effects")
    assert "'harness_lost'" in what
    assert "leave it out" in what
