"""Groups of sequences for the benchmark of the signal: what their events say, and the objects in the store.

Contexts have lognormal lengths: 8,000 tokens in the median, a mean of 12,000, 131,072 at most; a turn for every 700 tokens, of
which the policy sampled two fifths. A quarter of the sequences have a second context, as of a subagent, a twentieth a third.
Payloads hold the same turns with `shrink` times fewer tokens.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from log_server import say
from report import Figure

from pipeline.store import ObjectStore
from pipeline.store.payload import write_payload, write_sidecar
from schemas.config import Broker, RunConfig
from schemas.facts import Fact, RunStarted, SequenceDispatched, SequenceFinished, SequenceScored
from schemas.keys import payload_key, sidecar_key
from schemas.names import attempt_id, sample_id, sequence_id
from schemas.payload import ColumnHeader, ContextMeta, PayloadHeader, Span

MEMBERS = 16
AT_ONCE = 24
"""Sequences over those that run at a time."""
CONNECT_S = 60.0
TEACHER = "large"
POOL = "bench"
_MEDIAN, _SIGMA, _LONGEST, _SHORTEST = 8_000, 0.9, 131_072, 700
_TURN = 700
_SAMPLED = 0.4
_CONTEXTS = ((1, 0.75), (2, 0.20), (3, 0.05))
_ROUTED = (4, 8)
"""Layers and experts of a token's routing, in a column that nobody names: 32 of a token's 45 bytes."""
_WRITERS = 32
_SAMPLES = np.random.default_rng(1)
_PROBABLE = -_SAMPLES.exponential(0.5, 1 << 20).astype(np.float32)
_BYTES = _SAMPLES.integers(0, 255, (1 << 16, *_ROUTED), np.uint8)


def figure(name: str, value: float, unit: str, goal: float, against: float, better: str = "lower") -> Figure:
    """`goal` 0: none, it is told only."""
    return {
        "name": f"signal.{name}",
        "value": round(value, 4),
        "unit": unit,
        "goal": round(goal, 4),
        "better": better,
        "against": round(against, 4),
    }


def configured(run: str, broker: Broker, store: str, sources: Sequence[dict[str, Any]]) -> RunConfig:
    """A run of one batch, of these sources."""
    common = {"pool": POOL, "group_size": MEMBERS, "environment": {"kind": "arithmetic"}}
    return RunConfig.model_validate(
        {
            "run": run,
            "steps": 1,
            "batch": {"dp": 8, "token_budget": _LONGEST},
            "broker": broker.model_dump(),
            "store": {"url": store},
            "pools": [{"name": POOL, "harness": "chat"}],
            "teachers": [{"name": TEACHER}],
            "sources": [common | source for source in sources],
        }
    )


@dataclass(frozen=True, slots=True)
class Member:
    """A sequence. `took`: of a rollout, in tokens; `scored`: None where no teacher scores its source."""

    dispatched: SequenceDispatched
    finished: SequenceFinished
    scored: SequenceScored | None
    took: int

    def facts(self) -> list[Fact]:
        """All that the world says of it after it was dispatched."""
        return [self.finished, self.scored] if self.scored is not None else [self.finished]


Group = tuple[Member, ...]


def started(config: RunConfig) -> RunStarted:
    return RunStarted(run=config.run, config=config.decisions())


def groups_of(config: RunConfig, shrink: int = 1) -> list[Group]:
    """The groups of one batch, those of its sources in turn; every one has some members that passed, and some that did not."""
    rng = np.random.default_rng(0)
    indices = {source.name: itertools.count() for source in config.sources}
    turns = [
        source
        for at in range(max(source.groups for source in config.sources))
        for source in config.sources
        if at < source.groups
    ]
    made: list[Group] = []
    for source in turns:
        sample = sample_id(source.name, next(indices[source.name]))
        passed = rng.permutation(MEMBERS) < rng.integers(1, MEMBERS)
        made.append(
            tuple(
                _member(
                    config.run, source.name, sample, i, float(passed[i]), bool(source.teachers), shrink, rng
                )
                for i in range(MEMBERS)
            )
        )
    return made


def _member(
    run: str,
    source: str,
    sample: str,
    member: int,
    reward: float,
    scored: bool,
    shrink: int,
    rng: np.random.Generator,
) -> Member:
    sequence = sequence_id(sample, member)
    count = int(rng.choice([n for n, _ in _CONTEXTS], p=[p for _, p in _CONTEXTS]))
    lengths = np.clip(_MEDIAN * rng.lognormal(0, _SIGMA, count), _SHORTEST, _LONGEST).astype(int)
    contexts: list[ContextMeta] = []
    offset = 0
    for at, length in enumerate(lengths):
        turns = max(1, int(length) // _TURN)
        tokens = max(int(length) // shrink, 4 * turns)
        each = tokens // turns
        sampled = max(1, int(_SAMPLED * each))
        contexts.append(
            ContextMeta(
                label="subagent" if at else "main",
                offset=offset,
                tokens=tokens,
                generated=turns * sampled,
                loss_spans=tuple(
                    Span(start=end - sampled, end=end) for end in range(each, turns * each + 1, each)
                ),
                min_version=0,
                max_version=0,
            )
        )
        offset += tokens
    key = payload_key(run, source, attempt_id(sequence, 1))
    ids: dict[str, Any] = {"source": source, "sample": sample, "sequence": sequence}
    finished = SequenceFinished(
        **ids,
        attempt=1,
        reward=reward,
        termination="completed",
        turns=sum(len(c.loss_spans) for c in contexts),
        contexts=tuple(contexts),
        payload=_header(key, offset),
    )
    loss = sum(c.loss_tokens() for c in contexts)
    scores = SequenceScored(
        **ids, teacher=TEACHER, tokens=loss, scores=_header(sidecar_key(key, f"teacher.{TEACHER}"), loss)
    )
    dispatched = SequenceDispatched(
        **ids, member=member, group_size=MEMBERS, pool=POOL, task_index=int(sample.rpartition("-")[2])
    )
    return Member(dispatched, finished, scores if scored else None, int(lengths.sum()))


def _header(key: str, rows: int) -> PayloadHeader:
    """As of an object that holds its columns, for who reads none."""
    columns: list[ColumnHeader] = []
    at = 1024
    for name, dtype, shape, width in (
        ("tokens", "int32", (rows,), 4),
        ("logprobs", "float32", (rows,), 4),
        ("policy_version", "int32", (rows,), 4),
        ("segments", "int32", (rows // _TURN + 1, 5), 0),
        ("loss_mask", "uint8", (rows,), 1),
        ("routed_experts.L0-3", "uint8", (rows, *_ROUTED), 32),
    ):
        size = rows * width or 20 * shape[0]
        crc = tuple(int(c) for c in _SAMPLES.integers(0, 1 << 32, -(-shape[0] // 65_536)))
        given = {"name": name, "dtype": dtype, "shape": shape, "offset": at, "bytes": size, "crc32c": crc}
        columns.append(ColumnHeader.model_validate(given))
        at += size
    return PayloadHeader(key=key, bytes=at, columns=tuple(columns))


async def stored(store: ObjectStore, groups: Sequence[Group]) -> list[Group]:
    """The groups with their payloads and their teacher's scores in the store."""
    free = asyncio.Semaphore(_WRITERS)
    say(f"  {MEMBERS * len(groups):,} payloads are written")

    async def one(member: Member) -> Member:
        async with free:
            finished, scored = member.finished, member.scored
            payload = await write_payload(store, finished.payload.key, _columns(finished))
            finished = finished.model_copy(update={"payload": payload})
            if scored is not None:
                assert scored.scores is not None
                made = {"logprobs": _from(_PROBABLE, scored.tokens, scored.tokens)}
                header = await write_sidecar(store, scored.scores.key, made)
                scored = scored.model_copy(update={"scores": header})
            return Member(member.dispatched, finished, scored, member.took)

    written = await asyncio.gather(*[one(member) for group in groups for member in group])
    return [tuple(written[at : at + MEMBERS]) for at in range(0, len(written), MEMBERS)]


def _columns(finished: SequenceFinished) -> dict[str, npt.NDArray[Any]]:
    rows = sum(context.tokens for context in finished.contexts)
    mask = np.zeros(rows, np.uint8)
    segments: list[tuple[int, ...]] = []
    for at, context in enumerate(finished.contexts):
        for span in context.loss_spans:
            mask[context.offset + span.start : context.offset + span.end] = 1
            segments.append((context.offset + span.start, context.offset + span.end, 2, 0, at))
    return {
        "tokens": np.arange(rows, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": _from(_PROBABLE, rows, finished.turns) * mask,
        "policy_version": np.zeros(rows, np.int32),
        "segments": np.array(segments, np.int32),
        "routed_experts.L0-3": _from(_BYTES, rows, finished.turns),
    }


def _from(pool: npt.NDArray[Any], rows: int, seed: int) -> npt.NDArray[Any]:
    """So many rows of it, from a place that the seed gives."""
    start = seed * 7919 % (len(pool) - rows)
    return pool[start : start + rows]


def order(groups: Sequence[Group], at_once: int) -> list[tuple[float, Member]]:
    """When each sequence finishes, in tokens, of `at_once` that run at a time and take as long as they have tokens."""
    waiting = [member for group in groups for member in group]
    running: list[tuple[float, int]] = []
    ended: list[tuple[float, Member]] = []
    for number, member in enumerate(waiting):
        now = 0.0
        if len(running) == at_once:
            now, first = heapq.heappop(running)
            ended.append((now, waiting[first]))
        heapq.heappush(running, (now + member.took, number))
    return [*ended, *((when, waiting[number]) for when, number in sorted(running))]
