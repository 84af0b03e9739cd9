"""The plan of a batch, on lengths alone, against the rules by which verl and slime make theirs.

- verl (0.9.1, `verl/utils/seqlen_balancing.py` and the trainer's batch balancing): Karmarkar-Karp with equal sizes gives each rank
  its sequences by cost 24576 l + l^2; each rank divides its own by Karmarkar-Karp on that cost into as many micro-batches as its
  tokens need at least, all ranks as many; and again with one more until none is over the budget; the order has small ones at both
  ends. Its `karmarkar_karp` is taken out of the wheel in `<venv>/peers`.
- slime (main, `slime/utils/dp_schedule.py` with `balance_data` and dynamic batches): first fit in the order in which samples come, over
  all ranks; the largest bins split until their number is a multiple of dp; Karmarkar-Karp with equal sizes on cost gives each rank
  its bins, in the order of their numbers. Rewritten from that rule.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from log_server import say
from porter_world import figure
from report import Figure

from pipeline.batch.arranging import arrange, fit
from pipeline.batch.balance import cost, fill, pack
from pipeline.batch.planning import plan_body
from pipeline.signal.groups import Finished, Group
from schemas.config import Batch, Decisions
from schemas.payload import ContextMeta, Span
from tests import peers
from tests.unit.factories import config as run_config
from tests.unit.factories import finished

BUDGET = 1 << 20
MEAN, SPREAD = 114_000, 1.1
"""Of the lengths, in tokens: the mean before they are cut to the budget, and the standard deviation of their logarithm."""
BATCH = 25_088
"""Contexts of a batch: 1,568 groups of 16."""
Bins = list[list[list[int]]]
"""Of each rank its micro-batches, in order, of contexts."""


def lengths_of(count: int) -> list[int]:
    """Lognormal, one seed, of 1 to BUDGET tokens; their mean is MEAN."""
    drawn = np.random.default_rng(114).lognormal(0.0, SPREAD, count)
    low, high = 1.0, 1e7
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(drawn * middle, 64, BUDGET).mean() < MEAN else (low, middle)
    return [int(n) for n in np.clip(drawn * low, 64, BUDGET)]


def lower_bound(lengths: Sequence[int], room: int) -> int:
    """Bins that the lengths need at least: Martello and Toth's L2 (1990)."""
    ordered = np.sort(np.asarray(lengths, np.int64))[::-1]
    best = -(-int(ordered.sum()) // room)
    half = int((ordered > room // 2).sum())
    for threshold in np.unique(ordered[ordered <= room // 2]):
        large = int((ordered > room - threshold).sum())
        middle = ordered[large:half]
        small = ordered[half:]
        needed = int(small[small >= threshold].sum()) - (len(middle) * room - int(middle.sum()))
        best = max(best, half + max(0, -(-needed // room)))
    return best


def ours(lengths: list[int], dp: int) -> Bins:
    placed = arrange(lengths, Batch(dp=dp, token_budget=BUDGET))
    found: Bins = [[[] for _ in placed.sizes] for _ in range(dp)]
    for i, (rank, number) in enumerate(zip(placed.dp, placed.microbatch, strict=True)):
        found[rank][number].append(i)
    return found


def verl(lengths: list[int], dp: int) -> Bins:
    partition = _karmarkar_karp()
    costs = [cost(n) for n in lengths]
    ranks = partition(costs, dp, True)
    number = max(-(-sum(lengths[i] for i in rank) // BUDGET) for rank in ranks)
    order = list(range(dp))
    while True:
        found: Bins = [[] for _ in ranks]
        for r in order:
            mine = ranks[r]
            bins = [[mine[i] for i in each] for each in partition([costs[i] for i in mine], number, False)]
            if any(sum(lengths[i] for i in each) > BUDGET for each in bins):
                # Most likely over it with one more, too: no rank is worked out for nothing.
                order.remove(r)
                order.insert(0, r)
                break
            bins.sort(key=lambda each: -sum(costs[i] for i in each))
            found[r] = bins[::2][::-1] + bins[1::2]
        else:
            return found
        number += 1


def slime(lengths: list[int], dp: int) -> Bins:
    bins: list[list[int]] = []
    tokens: list[int] = []
    for i, n in enumerate(lengths):
        for at, used in enumerate(tokens):
            if used + n <= BUDGET:
                bins[at].append(i)
                tokens[at] += n
                break
        else:
            bins.append([i])
            tokens.append(n)
    bins = fill(bins, lengths, -(-len(bins) // dp) * dp)
    costs = [sum(cost(lengths[i]) for i in each) for each in bins]
    return [[bins[b] for b in rank] for rank in _karmarkar_karp()(costs, dp, True)]


def plans(count: int, dp: int) -> list[Figure]:
    """Rows of ours against each of the rules, on `count` lengths for `dp` ranks, and of the whole plan. Times are of the CPU."""
    lengths = lengths_of(count)
    bound = lower_bound(lengths, BUDGET)
    # Goals are of a whole batch: fewer contexts leave less to choose from.
    whole = count >= BATCH
    began = time.process_time()
    bins = len(pack(lengths, BUDGET))
    say(f"plan: {bins} bins, at least {bound}, in {time.process_time() - began:.2f} s")
    made, took = _timed(ours, lengths, dp)
    mine = _balance(made, lengths, dp)
    # Against what first-fit decreasing is never above.
    figures = [figure("plan.bins", bins / bound, "x", 1.0 * whole, 11 / 9, "lower"), _body(lengths, dp, took)]
    if missing := peers.missing():
        say(f"plan: no rows against verl and slime: {missing}")
        return figures
    for name, rule in (("verl", verl), ("slime", slime)):
        theirs, seconds = _timed(rule, lengths, dp)
        other = _balance(theirs, lengths, dp)
        filled, others = (len(each[0]) * dp / bound for each in (made, theirs))
        figures += [
            figure(f"plan.{name}.seconds", took, "s", 0.5, seconds, "lower"),
            figure(f"plan.{name}.microbatches", filled, "x", 0.0, others, "lower"),
            figure(f"plan.{name}.ranks", mine[0], "x", 0.0, other[0], "lower"),
            figure(f"plan.{name}.steps", mine[1], "x", 1.021 * whole, other[1], "lower"),
        ]
        say(f"plan against {name}: {took:.2f} s, {seconds:.2f} s")
    return figures


def _body(lengths: list[int], dp: int, took: float) -> Figure:
    """Seconds of the whole plan, with its bytes, of groups of 16 sequences whose contexts have 20 spans of loss; against those of
    placing the contexts alone."""
    source = {"name": "math", "pool": "p", "groups": -(-len(lengths) // 16), "group_size": 16}
    whole = run_config(
        sources=[{**source, "environment": {"kind": "arithmetic"}}],
        batch={"dp": dp, "token_budget": BUDGET},
    )
    decisions = Decisions.model_validate(whole.decisions())
    groups: list[Group] = []
    for at in range(0, len(lengths), 16):
        group = Group("math", f"math-{at:06d}", 16)
        for i, tokens in enumerate(lengths[at : at + 16]):
            spans = tuple(Span(start=1 + j * tokens // 20, end=(j + 1) * tokens // 20) for j in range(20))
            loss = sum(span.end - span.start for span in spans)
            context = ContextMeta(
                offset=0, tokens=tokens, generated=loss, loss_spans=spans, min_version=0, max_version=0
            )
            fact = finished(f"{group.sample}-{i}", 1.0).model_copy(update={"contexts": (context,)})
            group.members[fact.sequence] = i
            group.finished[fact.sequence] = Finished.of(fact, False, (), fit(decisions.batch))
        group.advantages = (1.0,) * len(group.members)
        groups.append(group)
    began = time.process_time()
    plan_body(groups, decisions, "r", 1, None)
    return figure("plan.body", time.process_time() - began, "s", 0.0, took, "lower")


def _timed(rule: Callable[[list[int], int], Bins], lengths: list[int], dp: int) -> tuple[Bins, float]:
    began = time.process_time()
    made = rule(lengths, dp)
    took = time.process_time() - began
    placed = sorted(i for rank in made for each in rank for i in each)
    assert placed == list(range(len(lengths)))
    assert len({len(rank) for rank in made}) == 1
    assert all(sum(lengths[i] for i in each) <= BUDGET for rank in made for each in rank)
    return made, took


def _balance(made: Bins, lengths: list[int], dp: int) -> tuple[float, float]:
    """The most loaded rank over the lower bound, and the sum over micro-batch numbers of the heaviest rank's cost over that of the
    mean: ranks wait for each other at each."""
    costs = np.array([[sum(cost(lengths[i]) for i in each) for each in rank] for rank in made], np.float64)
    ideal = max(costs.sum() / dp, float(max(cost(n) for n in lengths)))
    return costs.sum(axis=1).max() / ideal, costs.max(axis=0).sum() / costs.mean(axis=0).sum()


def _karmarkar_karp() -> Callable[[Sequence[int], int, bool], list[list[int]]]:
    names: dict[str, Any] = {"heapq": heapq}
    wanted = ("karmarkar_karp", "get_seqlen_balanced_partitions")
    found = peers._functions(  # pyright: ignore[reportPrivateUsage]  # the wheel is read in one place
        peers.VERL, "verl/utils/seqlen_balancing.py", names, lambda name: name in wanted
    )
    return found["get_seqlen_balanced_partitions"]
