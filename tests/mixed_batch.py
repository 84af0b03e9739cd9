"""A run that mixes harnesses, played by a scripted policy, and what must hold of it: 2 groups x 4 sequences of each source."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pipeline.harnesses.shell import SYSTEM
from pipeline.store import ObjectStore
from schemas.envelope import Event
from schemas.facts import BatchYielded, SequenceVerified, WindowPacked
from schemas.plan import Plan
from tests.scaffolds.plays import in_turn
from tests.scaffolds.policy import Play, Scene, call
from tests.scaffolds.solutions import solving
from tests.scripted_engine import ServedPolicy, attempt, check_trained
from tests.workspace_parts import groups, mounts

ROOT = Path(__file__).resolve().parents[1]
TASKS = ROOT / "examples/tasks"
NAMES = ("edit-config", "csv-report")
GROUPS, SIZE = 2, 4

MARKS = {
    "shell": SYSTEM,
    "pi": "operating inside pi",
    "claude-code": "You are Claude Code",
    "opencode": "You are opencode",
    "openhands": "You are OpenHands agent",
    "terminus": "solving command-line tasks in a Linux environment",
}
"""What the prompts of a harness say, and no other's."""


def mixed(scene: Scene) -> str:
    """The policy: finds out by the prompt whose it is, and solves the task in every other sequence of a group."""
    right = attempt(scene).member % 2 == 0
    told = "\n".join(text for _, text in scene.turns[:2])
    who = [name for name, mark in MARKS.items() if mark in told]
    if not who:
        return _calculates(scene, right) if scene.tools else _adds(scene, right)
    assert len(who) == 1, who
    script = _solution(scene) if right else "true"
    return _by_shell(script)(scene) if who == ["shell"] else solving(who[0], script)(scene)


def _solution(scene: Scene) -> str:
    text = "\n".join(text for _, text in scene.turns)
    for name in NAMES:
        if (TASKS / name / "instruction.md").read_text().strip() in text:
            return (TASKS / name / "solution/solve.sh").read_text()
    # A request beside the work, for a title.
    return "true"


def _by_shell(script: str) -> Play:
    return in_turn(call("bash", command=script), call("bash", command="submit"))


def _calculates(scene: Scene, right: bool) -> str:
    if not right:
        return "0"
    if scene.said:
        return scene.last
    found = re.search(r"compute (.*)\.$", scene.first)
    assert found is not None, scene.first
    return call("calculator", expression=found[1])


def _adds(scene: Scene, right: bool) -> str:
    found = re.search(r"([-+\d ]+)[=.?]", scene.first)
    assert found is not None, scene.first
    terms = re.findall(r"-?\s*\d+", found[1].replace(" ", ""))
    return str(sum(int(term) for term in terms) + (not right))


def pool_and_source(name: str, harness: str, kind: str, options: str = "{}", max_tokens: int = 2048) -> str:
    """A pool and a source of the same name, as TOML."""
    given = f'{{ tasks = "{TASKS}", names = {list(NAMES)} }}' if kind == "harbor" else "{}"
    return f"""
[[pools]]
name = "{name}"
harness = "{harness}"
options = {options}
tenants = 8

[[sources]]
name = "{name}"
pool = "{name}"
groups = {GROUPS}
group_size = {SIZE}
oversample = 1
[sources.behaviour]
max_tokens = {max_tokens}
max_turns = 8
[sources.environment]
kind = "{kind}"
options = {given}
"""


async def check_batch(events: list[Event], store: ObjectStore, policy: ServedPolicy, sources: Mapping[str, str]) -> None:
    """The batch is mixed, packed, of the policy's own tokens; every trial told what it took and left. `sources`: the
    harness of each."""
    facts = [event.fact for event in events]
    [batch] = [fact for fact in facts if isinstance(fact, BatchYielded)]
    assert {name: (share.groups, share.sequences) for name, share in batch.sources.items()} == {
        name: (GROUPS, GROUPS * SIZE) for name in sources
    }
    assert {share.mean_reward for share in batch.sources.values()} == {0.5}
    plan = Plan.model_validate_json(await store.get(batch.plan))
    plan.check()
    assert Counter(s.source for s in plan.sequences) == dict.fromkeys(sources, GROUPS * SIZE)
    packed = {(f.dp, f.microbatch): f.tokens for f in facts if isinstance(f, WindowPacked)}
    assert set(packed) == {(dp, i) for dp in range(plan.dp) for i in range(plan.microbatches)}
    tokens = [plan.sequences[s].contexts[c].tokens for s, c in zip(plan.rows.sequence, plan.rows.context, strict=True)]
    assert sum(packed.values()) == sum(tokens)
    await check_trained(plan, store, policy)
    for fact in facts:
        if isinstance(fact, SequenceVerified):
            await _check_trial(fact, store, sources[fact.source])


async def _check_trial(fact: SequenceVerified, store: ObjectStore, harness: str) -> None:
    assert fact.failure is None, fact
    workspace = harness in ("shell", "harbor")
    assert set(fact.seconds) == {"queue", "agent", "verify"} | ({"start"} if workspace else set()), fact
    assert (fact.peak_bytes > 0) == workspace
    left = {artefact.name: await store.get(artefact.ref) for artefact in fact.artefacts}
    verifier = {"verifier_stdout", "verifier_reward"} if workspace else set()
    assert set(left) == verifier | ({"agent_stdout", "agent_stderr"} if harness == "harbor" else set())
    if workspace:
        assert float(left["verifier_reward"]) == fact.reward


def nothing_left(source: str) -> list[str]:
    """Control groups and mounts of the source's trials."""
    return [*(group for group in groups() if f"-{source}-" in group), *mounts()]
