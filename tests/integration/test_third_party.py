"""The adapter of `docs/harnesses.md`, as it stands there, in a run: captured, grouped, packed into a batch, and replayed."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pipeline.log import Log
from pipeline.replay.rerun import Rerun
from pipeline.replay.service import SERVICES
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.config import Broker, RunConfig
from schemas.envelope import Event
from schemas.facts import BatchYielded, RunStarted, SequenceFinished, SequenceVerified
from schemas.plan import Plan
from services import agent_loop, dispatcher, grader, harness, sampler
from tests.rollout_stage import Stage, staged

PAGE = Path(__file__).parents[2] / "docs" / "harnesses.md"


def as_written() -> str:
    [example] = re.findall(
        r"<!-- example: a test runs it -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    assert len(example.splitlines()) < 30
    return example


def wavering(prompt: str) -> str:
    """Right in the group's even members when asked again; the arithmetic is that of the prompt's first line."""
    question = re.search(r"user\n(?:.*?)([-+*\d ]+)[=.?]", prompt, re.DOTALL)
    assert question is not None, prompt
    right = str(sum(int(term) for term in re.findall(r"-?\s*\d+", question[1].replace(" ", ""))))
    if "Check this." not in prompt:
        wavering.asked += 1  # type: ignore[attr-defined]
        return f"perhaps {right}" if wavering.asked % 2 else "perhaps -1"  # type: ignore[attr-defined]
    return right if f"perhaps {right}<" in prompt else "no idea"


@pytest.fixture
async def stage(
    tmp_path: Path,
    broker: Broker,
    run_name: str,
    log: Log,
    store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Callable[..., Stage]]:
    (tmp_path / "selfcheck.py").write_text(as_written())
    monkeypatch.syspath_prepend(tmp_path)
    wavering.asked = 0  # type: ignore[attr-defined]
    async with staged(tmp_path, broker, run_name, log, store, wavering) as make:
        yield make


async def test_an_adapter_of_ones_own_gets_capture_batches_and_replay(stage: Callable[..., Stage]) -> None:
    made = stage()
    source = {
        "name": "sums",
        "pool": "mine",
        "groups": 2,
        "group_size": 2,
        "environment": {"kind": "arithmetic"},
        "behaviour": {"max_tokens": 200},
        "accept": {"min": -1, "max": 2, "drop_all_zero": False},
    }
    whole = {
        **made.config.model_dump(mode="json"),
        "steps": 1,
        "pools": [{"name": "mine", "harness": "selfcheck:SelfCheck"}],
        "sources": [source],
    }
    s = Stage(RunConfig.model_validate(whole), made.log, made.store, made.engine)
    await s.log.publish(RunStarted(run=s.config.run, config=s.config.decisions()))
    events: list[Event] = []
    async with s.running(
        (dispatcher.serve, ""),
        (agent_loop.serve, ""),
        (harness.serve, "mine"),
        (grader.serve, ""),
        (sampler.serve, ""),
    ):
        async for event in s.log.subscribe("*"):
            events.append(event)
            if isinstance(event.fact, BatchYielded):
                break
    finished = [e.fact for e in events if isinstance(e.fact, SequenceFinished)]
    assert len(finished) >= 4
    assert {f.reward for f in finished} >= {1.0}
    for fact in finished:
        [context] = fact.contexts
        assert len(context.loss_spans) == fact.turns == 2, "both turns in one context"
        columns = await read_columns(s.store, fact.payload, ["tokens", "loss_mask"])
        assert int(columns["loss_mask"].sum()) == context.generated
    for event in events:
        if isinstance(event.fact, SequenceVerified):
            assert "queue" in event.fact.seconds
    [yielded] = [e.fact for e in events if isinstance(e.fact, BatchYielded)]
    plan = Plan.model_validate_json(await s.store.get(yielded.plan))
    plan.check()
    assert len(plan.rows.sequence) == 4
    for name in ("mixer", "sampler"):
        rerun = Rerun(s.config.run, SERVICES[name])
        for event in events:
            rerun.feed(event)
        report = rerun.report()
        assert report.divergences == ()
        assert sum(report.compared.values()) > 0
