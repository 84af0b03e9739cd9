"""A run that mixes harnesses, played by a scripted policy, and what must hold of it: 2 groups x 4 sequences of each source."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from pipeline.config import load
from pipeline.harnesses.kernel import MOUNT_POINT
from pipeline.harnesses.shell import SYSTEM
from pipeline.store import ObjectStore
from schemas.envelope import Event
from schemas.facts import BatchYielded, SequenceVerified, WindowPacked
from schemas.plan import Plan
from tests.capture_parts import Reply, served
from tests.launched import Launched, check_history, history
from tests.scaffolds.plays import in_turn
from tests.scaffolds.policy import Play, Scene, call
from tests.scaffolds.solutions import solving
from tests.scripted_engine import ServedPolicy, attempt, check_trained, small_policy
from tests.workspace_parts import mounts, processes, roots, workspaces

ROOT = Path(__file__).resolve().parents[1]
TASKS = ROOT / "examples/tasks"
NAMES = ("edit-config", "csv-report")
GROUPS, SIZE = 2, 4

MARKS = {
    "chat": "the following arithmetic problem",
    "tool": "Use the calculator to compute",
    "shell": SYSTEM,
    "pi": "operating inside pi",
    "claude-code": "You are a Claude agent",
    "opencode": "You are opencode",
    "openhands": "You are OpenHands agent",
    "terminus": "solving command-line tasks in a Linux environment",
}
"""What the prompts of a harness say, and no other's."""


def mixed(scene: Scene) -> Reply:
    """The policy: finds out by the prompt whose it is, and solves the task in every other sequence of a group."""
    told = "\n".join(text for _, text in scene.turns)
    who = [name for name, mark in MARKS.items() if mark in told]
    assert len(who) <= 1, who
    # A request beside the work, for a title or the like, has none.
    return _play(who[0], told, attempt(scene).member % 2 == 0)(scene) if who else "An aside."


def _play(who: str, told: str, right: bool) -> Play:
    if who in ("chat", "tool"):
        return partial(_adds if who == "chat" else _calculates, right=right)
    script = "true"
    if right:
        [script] = [
            (TASKS / name / "solution/solve.sh").read_text()
            for name in NAMES
            if (TASKS / name / "instruction.md").read_text().strip() in told
        ]
    if who == "shell":
        return in_turn(call("bash", command=script), call("bash", command="submit"))
    return solving(who, script)


def _adds(scene: Scene, right: bool) -> str:
    terms = re.findall(r"[-+]?\d+", scene.first.rpartition(":")[2].replace(" ", ""))
    return str(sum(map(int, terms)) + (not right))


def _calculates(scene: Scene, right: bool) -> str:
    if scene.said or not right:
        return scene.last if scene.said else "0"
    expression = scene.first.removeprefix(f"{MARKS['tool']} ").removesuffix(".")
    return call("calculator", expression=expression)


def pool_and_source(
    name: str, harness: str, kind: str, options: str = "{}", max_tokens: int = 2048, tenants: int = 8
) -> str:
    """A pool and a source of the same name, as TOML."""
    given = f'{{ tasks = "{TASKS}", names = {list(NAMES)} }}' if kind == "harbor" else "{}"
    return f"""
[[pools]]
name = "{name}"
harness = "{harness}"
options = {options}
tenants = {tenants}

[[sources]]
name = "{name}"
pool = "{name}"
groups = {GROUPS}
group_size = {SIZE}
oversample = 1
[sources.behaviour]
max_tokens = {max_tokens}
max_turns = 20
[sources.environment]
kind = "{kind}"
options = {given}
"""


async def check_batch(
    events: list[Event], store: ObjectStore, policy: ServedPolicy, sources: Mapping[str, str]
) -> None:
    """The batch is mixed, packed, of the policy's own tokens; every trial told what it took and left. `sources`: the
    harness of each."""
    facts = [event.fact for event in events]
    [batch] = [fact for fact in facts if isinstance(fact, BatchYielded)]
    assert {name: (share.groups, share.sequences) for name, share in batch.sources.items()} == dict.fromkeys(
        sources, (GROUPS, GROUPS * SIZE)
    )
    assert {share.mean_reward for share in batch.sources.values()} == {0.5}
    plan = Plan.model_validate_json(await store.get(batch.plan))
    plan.check()
    assert Counter(s.source for s in plan.sequences) == dict.fromkeys(sources, GROUPS * SIZE)
    labels = [[context.label for context in s.contexts] for s in plan.sequences]
    assert labels == [["main"]] * len(plan.sequences), "a request beside the work is trained"
    packed = {(f.dp, f.microbatch): f.tokens for f in facts if isinstance(f, WindowPacked)}
    assert set(packed) == {(dp, i) for dp in range(plan.dp) for i in range(plan.microbatches)}
    tokens = [
        plan.sequences[s].contexts[c].tokens
        for s, c in zip(plan.rows.sequence, plan.rows.context, strict=True)
    ]
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
    if harness == "harbor":
        assert left["agent_stdout"]
    if workspace:
        assert "verifier_stdout" in left
        assert float(left["verifier_reward"]) == fact.reward


async def run_mixed(
    folder: Path, sections: Sequence[str], harnesses: Mapping[str, str], context: int, within_s: float
) -> None:
    """A run of one step over pools and sources of `pool_and_source`, and all its checks. `harnesses`: of each source."""
    policy = ServedPolicy(mixed)
    async with served(policy.application()) as url:
        text = (
            f'run = "mixed"\nsteps = 1\n[engine]\nurl = "{url}"\npolicy = "{small_policy(folder / "policy")}"\n'
            f"max_context = {context}\n[agent_loop]\ntrial_budget_s = 600\n[batch]\ndp = 2\ntoken_budget = {context}\n"
        )
        with Launched(folder, text + "".join(sections), "mixed") as run:
            run.start()
            log = await run.log()
            try:
                hosts = [await run.pid(f"harness-{source}-0") for source in harnesses]
                events = await asyncio.wait_for(history(run, log), within_s)
                store = ObjectStore.open(load(run.home / "config.toml").store)
                await check_history(events, store, 1)
                await check_batch(events, store, policy, harnesses)
            finally:
                await log.close()
            assert await asyncio.to_thread(run.finish, 30) == 0, run.told()
    assert run.restarts() == {}
    assert [left for host in hosts for left in (*roots(host), *workspaces(host))] == []
    assert mounts() == [MOUNT_POINT]
    assert processes(str(folder)) == []
