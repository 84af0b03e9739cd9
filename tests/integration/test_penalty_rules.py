"""Rules of a source in a whole rollout, over a real broker, store and HTTP: their flags and their end are in the log."""

from __future__ import annotations

from pathlib import Path

from pipeline.capture.export import RULE_BITS
from pipeline.log import Log
from pipeline.signal.rules import Turn
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.config import Broker, Penalty
from schemas.facts import SequenceFailed, SequenceFinished
from services import agent_loop, harness
from tests.integration.test_harness_trials import act
from tests.rollout_stage import Stage, by_expression, staged

HERE = "tests.integration.test_penalty_rules"


class Raises:
    judges = "turn"

    def __call__(self, seen: Turn) -> bool:
        raise RuntimeError("no such turn")


def penalised(stage: Stage, *penalties: Penalty) -> Stage:
    """With these penalties on the source `calc` alone."""
    sources = tuple(
        source.model_copy(update={"penalties": penalties if source.name == "calc" else ()})
        for source in stage.config.sources
    )
    stage.config = stage.config.model_copy(update={"sources": sources})
    return stage


async def test_flags_and_early_stops_reach_the_log_and_the_store(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> None:
    def script(prompt: str) -> str:
        said = by_expression(prompt)
        return said if said.startswith("<tool_call>") else f"{said} ----------"

    repeats = {"n": 4, "times": 2, "tokens": 4}
    penalties = (
        Penalty(rule="malformed_call"),
        Penalty(rule="repetition", options=repeats, scope="sequence"),
        Penalty(rule="unknown_tool", stop=True),
    )
    async with staged(tmp_path, broker, run_name, log, store, script) as make:
        s = penalised(make(), *penalties)
        async with s.running((agent_loop.serve, ""), (harness.serve, "tools")):
            flagged = await s.outcome("calc", await s.dispatch("calc"))
            s.engine.script = lambda prompt: act(prompt).replace('"calculator"', '"abacus"')
            stopped = await s.outcome("calc", await s.dispatch("calc", 1))
    for fact, termination, turns, bits in (
        (flagged, "completed", 2, 0b010),
        (stopped, "early_stop", 1, 0b100),
    ):
        assert isinstance(fact, SequenceFinished), fact
        assert (fact.termination, fact.turns, fact.attempt) == (termination, turns, 1)
        (context,) = fact.contexts
        assert [flag.rules for flag in context.flags] == [bits] * turns
        assert [(flag.start, flag.end) for flag in context.flags] == [
            (span.start, span.end) for span in context.loss_spans
        ]
        segments = (await read_columns(s.store, fact.payload, ["segments"]))["segments"]
        assert [flags >> RULE_BITS for flags in segments[:, 3].tolist() if flags >> RULE_BITS] == [
            bits
        ] * turns


async def test_a_rule_that_raises_is_an_infra_failure_that_names_it(
    tmp_path: Path, broker: Broker, run_name: str, log: Log, store: ObjectStore
) -> None:
    async with staged(tmp_path, broker, run_name, log, store, by_expression) as make:
        s = penalised(make(max_attempts=1), Penalty(rule=f"{HERE}:Raises"))
        async with s.running((agent_loop.serve, ""), (harness.serve, "tools")):
            failed = await s.outcome("calc", await s.dispatch("calc"))
    assert isinstance(failed, SequenceFailed)
    assert (failed.failure.kind, failed.failure.reason) == ("infra", "rule_failed")
    assert f"rule '{HERE}:Raises' raised RuntimeError: no such turn" in failed.failure.detail
