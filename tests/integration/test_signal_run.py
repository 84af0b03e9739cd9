"""examples/signal.toml from its start to its trained steps: what the trainers got is, token by token, what an independent
computation makes of the payloads, the teacher's scores, the graders' answers and the flags."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import load
from pipeline.engines.policies import policy_dir
from pipeline.engines.tiny.model import load_policy, save_policy
from pipeline.feed.feed import Feed
from pipeline.feed.wire import socket_path
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.config import RunConfig
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    SampleAccepted,
    SampleGraded,
    SampleShaped,
    SequenceFinished,
    SequenceScored,
)
from schemas.plan import Plan
from services.cli.check import load_checked
from tests.launched import Launched, check_history, history
from tests.signal_example import EXAMPLE, ROOT, check_signal, example

pytestmark = pytest.mark.timeout(300)
STEPS = 2
CLIP = 20.0
KAPPA = 1.25
Array = np.ndarray[Any, Any]


JUDGE = """
import json
group = json.load(open("group.json"))
members = [(each, reward, int(each.rpartition("-")[2])) for each, reward in zip(group["sequences"], group["rewards"])]
print(json.dumps({"sequences": [
    {"sequence": each, "quality": (1 + member % 4) / 4, "hack": reward == 1 and member == 2, "reason": ""}
    for each, reward, member in members
]}))
"""


def flagging(teacher: Path) -> Callable[[dict[str, Any]], None]:
    """Rules that whatever the tiny policy writes meets now and then, a grader that finds differences, and a teacher that is not the
    policy."""

    def change(run: dict[str, Any]) -> None:
        malformed, weighed = run["arithmetic"]["penalties"]
        assert (malformed["strategy"], weighed["strategy"]) == ("mask", "weigh")
        weighed |= {"rule": "garbled", "options": {"run": 1}}  # a minus
        masked, _, subtracted, monitored = run["calculator"]["penalties"]
        strategies = [each["strategy"] for each in (masked, subtracted, monitored)]
        assert (strategies, subtracted["value"]) == (["mask", "subtract", "monitor"], 0.2)
        masked |= {"rule": "nonzero_exit", "options": {"pattern": "[37]$"}}
        subtracted["options"] = {"pattern": "[0-4]$"}
        monitored |= {"rule": "nonzero_exit", "options": {"pattern": "[0-9]$"}}
        # Limits that are not met: else any factors would do.
        run["arithmetic"]["hooks"][-1]["options"] = {"kappa": KAPPA, "alpha_max": 1000.0, "beta_min": 0.0}
        run["calculator"]["hooks"][-1]["options"]["clip"] = CLIP
        run["teachers"][0]["policy"] = str(teacher)
        for source in ("arithmetic", "drill"):
            run[source]["grader"]["options"]["argv"] = [sys.executable, "-c", JUDGE]

    return change


def another_policy(at: Path) -> Path:
    """The tiny policy with its weights shaken."""
    shutil.copytree(policy_dir("tiny"), at)
    config, state = load_policy(at)
    shaken = torch.Generator().manual_seed(5)
    save_policy(
        at, config, {k: v * (1 + 0.3 * torch.randn(v.shape, generator=shaken)) for k, v in state.items()}
    )
    return at


class Fed:
    """What the trainers of a run get, by step and rank: the windows of one more rank beside each, as it reads them."""

    def __init__(self, config: RunConfig) -> None:
        self.windows: dict[tuple[int, int], list[tuple[tuple[str, ...], dict[str, Array]]]] = {}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, args=(socket_path(config, rank), rank), daemon=True)
            for rank in range(config.batch.dp)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, path: Path, rank: int) -> None:
        with Feed(path, stop=self._over.is_set) as feed:
            for step in range(1, STEPS + 1):
                self.windows[step, rank] = [
                    (each.sequences, {name: array.copy() for name, array in each.arrays.items()})
                    for each in feed.batch(step)
                ]

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(10)


@dataclass
class Members:
    """A group of the batch, its members in order. loss: of each, by row of its payload, whether it is trained; flags: the bits
    of its penalties."""

    source: str
    rewards: Array
    quality: Array
    sequences: list[str]
    columns: list[dict[str, Array]]
    scores: list[Array | None]
    flags: list[Array] = field(default_factory=list)
    advantages: list[Array] = field(default_factory=list)
    kept: list[Array] = field(default_factory=list)


def test_the_example_can_be_started_from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_checked(EXAMPLE)
    hooks = {source.name: [hook.kind for hook in source.hooks] for source in config.sources}
    assert "redistribute" in hooks["arithmetic"]
    assert "opd" in hooks["calculator"]
    assert all("length_penalty" in hooks[name] for name in ("arithmetic", "calculator"))


async def test_what_the_trainers_get_is_what_was_decided(tmp_path: Path) -> None:
    teacher = another_policy(tmp_path / "teacher")
    run = Launched(tmp_path, example(STEPS, flagging(teacher)), "signal")
    with run:
        run.start()
        log = await run.log()
        fed = Fed(load(run.home / "config.toml"))
        try:
            events = await asyncio.wait_for(history(run, log), 200)
        finally:
            fed.close()
            await log.close()
        assert await asyncio.to_thread(run.finish, 60) == 0, run.told()
    store = ObjectStore.open(load(run.home / "config.toml").store)
    await check_history(events, store, STEPS)
    check_signal(events)
    late = [e.fact for e in events if isinstance(e.fact, SampleGraded) and e.fact.revision == 1]
    assert late, "no answer of the grader that lags came"
    assert {fact.source for fact in late} == {"drill"}
    anew = {e.fact.sample for e in events if isinstance(e.fact, SampleShaped) and e.fact.revision == 1}
    assert anew, "no group was shaped anew"
    seen = set()
    batches = [event.fact for event in events if isinstance(event.fact, BatchYielded)]
    for batch in batches:
        groups = await gathered(batch, events, store)
        weighed(groups, batch)
        seen |= {
            (group.source, int(bit)) for group in groups for each in group.flags for bit in np.unique(each)
        }
        compare(groups, [fed.windows[batch.step, rank] for rank in range(2)])
    flags = {source: np.bitwise_or.reduce([bits for s, bits in seen if s == source]) for source, _ in seen}
    assert (flags["arithmetic"] & 2, flags["calculator"], flags["drill"]) == (2, 1 | 4 | 8, 0), seen


async def gathered(batch: BatchYielded, events: list[Event], store: ObjectStore) -> list[Members]:
    """The batch's groups with the advantages that their hooks make, from facts up to the batch and from columns."""
    plan = Plan.model_validate_json(await store.get(batch.plan))
    finished = {e.fact.sequence: e.fact for e in events if isinstance(e.fact, SequenceFinished)}
    scored = {e.fact.sequence: e.fact.scores for e in events if isinstance(e.fact, SequenceScored)}
    groups = []
    for sample in dict.fromkeys(each.sample for each in plan.sequences):
        members = [each.sequence for each in plan.sequences if each.sample == sample]
        graded = standing(sample, batch.through, events)
        columns = [
            await read_columns(store, finished[m].payload, ["tokens", "logprobs", "loss_mask", "segments"])
            for m in members
        ]
        scores = [
            (await read_columns(store, header, ["logprobs"]))["logprobs"]
            if (header := scored.get(m))
            else None
            for m in members
        ]
        source = finished[members[0]].source
        quality = np.array(graded.quality or (1.0,) * len(members))
        group = Members(source, np.array(graded.rewards), quality, members, columns, scores)
        for each in columns:
            flags = np.zeros(len(each["tokens"]), np.int64)
            for start, end, _, bits, _ in each["segments"]:
                flags[start:end] = bits >> 8
            group.flags.append(np.where(each["loss_mask"], flags, 0))
        group.advantages = [a * c["loss_mask"] for a, c in zip(shaped(group), columns, strict=True)]
        groups.append(group)
    return groups


def standing(sample: str, through: int, events: list[Event]) -> SampleGraded:
    """The grading by which a group of a batch is shaped, as docs/signal.md says."""
    facts = [(e.seq, e.fact) for e in events if getattr(e.fact, "sample", "") == sample and e.seq <= through]
    graded = {fact.revision: (seq, fact) for seq, fact in facts if isinstance(fact, SampleGraded)}
    [accepted] = [seq for seq, fact in facts if isinstance(fact, SampleAccepted)]
    anew = any(isinstance(fact, SampleShaped) and fact.revision == 1 for _, fact in facts)
    if 1 in graded and (anew or graded[1][0] < accepted):
        return graded[1][1]
    return graded[0][1]


def shaped(group: Members) -> list[Array]:
    """The hooks of examples/signal.toml, by the formulas of docs/signal.md: of each member, by row of its payload."""
    rewards, masks = group.rewards, [each["loss_mask"].astype(bool) for each in group.columns]
    passes = rewards >= (1.0 if group.source == "calculator" else 0.3)
    if group.source != "drill" and passes.mean() > 0.5:
        lengths = np.array([mask.sum() for mask in masks])
        over = lengths / np.quantile(lengths[passes], 0.3) - 1
        rewards = rewards - passes * 0.2 * np.clip(over, 0, 1) ** 1.5
    centred = rewards - rewards.mean()
    if group.source == "calculator":
        plain = centred / (np.sqrt((centred**2).sum() / (len(rewards) - 1)) + 1e-6)
    else:
        cap = 1.5 if group.source == "arithmetic" else np.inf
        plain = centred * (len(rewards) / (len(rewards) - 1) if group.source == "drill" else 1)
        mass, by_quality = (plain * passes).sum(), (plain * group.quality * passes).sum()
        if min(mass, by_quality) > 1e-9:
            factor = min(cap, mass / by_quality)
            plain = np.where(passes, factor * group.quality * plain, plain)
            plain = plain - plain.mean()
    found = [np.full(len(mask), advantage) for mask, advantage in zip(masks, plain, strict=True)]
    if group.source == "calculator":
        for each, mask, columns, scores in zip(found, masks, group.columns, group.scores, strict=True):
            assert scores is not None
            each[mask] += 0.1 * np.clip(scores - columns["logprobs"][mask], -CLIP, CLIP)
    return found


def weighed(groups: list[Members], fact: BatchYielded) -> None:
    """The penalties, on the advantages of a batch."""
    flagged, others = {1: 0.0, -1: 0.0}, {1: 0.0, -1: 0.0}
    arithmetic = [group for group in groups if group.source == "arithmetic"]
    for group in arithmetic:
        for flags, advantages in zip(group.flags, group.advantages, strict=True):
            for sign in (1, -1):
                mass = np.abs(advantages) * (np.sign(advantages) == sign) * (flags & 1 == 0)
                flagged[sign] += mass[flags & 2 != 0].sum()
                others[sign] += mass[flags & 2 == 0].sum()
    alpha = 1 + flagged[1] / others[1] if others[1] else 1.0
    beta = max(0.0, 1 - (KAPPA - 1) * flagged[-1] / others[-1]) if others[-1] else 1.0
    assert fact.factors is not None
    assert (fact.factors.alpha, fact.factors.beta) == pytest.approx((alpha, beta))
    for group in groups:
        for i, (flags, plain) in enumerate(zip(group.flags, group.advantages, strict=True)):
            masked = {"arithmetic": 1, "calculator": 1 | 2, "drill": 0}[group.source]
            if group.source == "arithmetic":
                hit, factor = np.where(plain > 0, 0.0, KAPPA), np.where(plain > 0, alpha, beta)
                group.advantages[i] = plain * np.where(flags & 2, hit, factor)
            if group.source == "calculator":
                group.advantages[i] = plain - 0.2 * (flags & 4 != 0)
            group.kept.append(group.columns[i]["loss_mask"].astype(bool) & (flags & masked == 0))


def compare(groups: list[Members], ranks: list[list[tuple[tuple[str, ...], dict[str, Array]]]]) -> None:
    """Every window of the batch, in label space: row t is about the token after it in its context."""
    expected: dict[str, tuple[Mapping[str, Array], Array, Array, float]] = {}
    for group in groups:
        trained = sum(int(kept.sum()) for kept in group.kept)
        for i, sequence in enumerate(group.sequences):
            weight = 1 / (len(groups) * trained)
            expected[sequence] = (group.columns[i], group.advantages[i], group.kept[i], weight)
    left = {sequence for sequence, (_, _, kept, _) in expected.items() if kept.any()}
    total = 0.0
    for sequences, got in [window for windows in ranks for window in windows]:
        for sequence, (start, end) in zip(sequences, pairwise(got["cu_seqlens"]), strict=True):
            columns, advantages, kept, weight = expected[sequence]
            left.remove(sequence)
            rows = slice(start, end - 1)
            np.testing.assert_array_equal(got["tokens"][start:end], columns["tokens"])
            np.testing.assert_array_equal(got["loss_mask"][rows], kept[1:])
            np.testing.assert_allclose(got["advantages"][rows], (advantages * kept)[1:], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got["loss_weights"][rows], (weight * kept)[1:], rtol=1e-6)
            assert not any(got[name][end - 1] for name in ("loss_mask", "advantages", "loss_weights"))
        total += got["loss_weights"].sum(dtype=np.float64)
    assert left == set(), "a sequence of the batch was in no window"
    assert total == pytest.approx(1)
