"""A session's tree as a payload's columns. Pure.

Promises: contexts are whole paths, main first; a sampled turn that several share is trained in the first of them; what an
excluded kind of request sampled is left out and counted; what the template adds after a context's last turn is left out;
what rules have flagged is told of the turns that a context trains, by the scope of their penalties.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.capture.tree import TEMPLATE, ContextTree, Ids, Node, leaves
from pipeline.signal.rules import NO_RULES, Judge
from schemas.payload import ContextMeta, Flag, Span

FLAG_SAMPLED, FLAG_LOSS = 1, 2
"""Bits of a segment's flags: the policy sampled it; this context trains it."""
RULE_BITS = 8
"""Bit RULE_BITS + i of a segment's flags: the source's penalty i flags it. Only segments that a context trains have any."""
COMPACTING = ("compaction", "summary")
"""Kinds of requests after which an agent may go on in a new dialogue."""


@dataclass(frozen=True, slots=True)
class Export:
    """The payload's columns (dtypes of `schemas.payload.COLUMNS`, and the optional ones where the engine gave them) and one
    ContextMeta a context, main first. `excluded`: sampled tokens left out, by the label of their request."""

    columns: dict[str, npt.NDArray[np.generic]]
    contexts: tuple[ContextMeta, ...]
    excluded: dict[str, int] = field(default_factory=dict[str, int])


def export(tree: ContextTree, exclude: Collection[str] = (), judge: Judge = NO_RULES) -> Export:
    """Every context that ends in a sampled turn that no later one continues; `exclude`: labels that are left out; `judge`
    tells the scopes of the rules that have flagged turns.

    The main context is the main agent's with most sampled turns, then the oldest. Another is labelled by its request's
    kind; `subagent` if an agent of its own holds it; `fork` if it shares a sampled turn with the main one; `compacted` if
    it began after a compaction; else `other`.
    """
    own = {node.number for node in tree.nodes if node.turn is not None and node.kind.told not in exclude}
    ends = leaves(tree.nodes, own)
    ends.sort(key=lambda node: (_is_main(node), -node.sampled, node.number))
    rows = _Rows(own, _Flags(tree.flags, judge, ends))
    main = {node.number for node in ends[0].path() if node.turn is not None} if ends else set[int]()
    compacted = [node.number for node in tree.nodes if node.kind.label in COMPACTING]
    for i, leaf in enumerate(ends):
        # An auxiliary dialogue that another one continues is a part of that one's context.
        if leaf.number not in rows.claimed:
            rows.context(_label(leaf, i == 0, main, compacted), leaf.path())
    excluded: dict[str, int] = {}
    for node in tree.nodes:
        if node.turn is not None and node.number not in own and (label := node.kind.told) is not None:
            excluded[label] = excluded.get(label, 0) + len(node.ids)
    return Export(rows.columns(), tuple(rows.contexts), excluded)


def _is_main(leaf: Node) -> bool:
    # False sorts first.
    return leaf.kind.label is not None or leaf.kind.agent != ""


def _label(leaf: Node, first: bool, main: set[int], compacted: list[int]) -> str:
    if (told := leaf.kind.told) is not None:
        return told
    if first:
        return "main"
    turns = [node.number for node in leaf.path() if node.turn is not None]
    if main.intersection(turns):
        return "fork"
    return "compacted" if any(number < turns[0] for number in compacted) else "other"


class _Flags:
    """What rules flag of each turn, by scope: the turn, or all of a context when a turn on its path is flagged, or all of the
    sequence when one of any context is."""

    def __init__(self, flags: Mapping[int, int], judge: Judge, ends: Sequence[Node]) -> None:
        self._flags = flags
        self._context = judge.context
        self._sequence = self._of(node for leaf in ends for node in leaf.path()) & judge.sequence

    def context(self, path: Iterable[Node]) -> int:
        """The bits of all turns of a context with that path."""
        return self._of(path) & self._context | self._sequence

    def turn(self, number: int) -> int:
        """The bits of that turn alone, whatever its context's are."""
        return self._flags.get(number, 0)

    def _of(self, nodes: Iterable[Node]) -> int:
        if not self._flags:
            return 0
        found = 0
        for node in nodes:
            found |= self._flags.get(node.number, 0)
        return found


class _Rows:
    """Gathers the rows of contexts; claims each sampled turn that may be trained for the first context that holds it."""

    def __init__(self, own: set[int], flags: _Flags) -> None:
        self._own = own
        self._flags = flags
        self._tokens: list[Ids] = []
        self._mask: list[npt.NDArray[np.uint8]] = []
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._versions: list[npt.NDArray[np.int32]] = []
        self._segments: list[tuple[int, int, int, int, int]] = []
        self._candidates: list[tuple[int, ...]] = []
        self._routing: list[tuple[int, Node]] = []
        self._end = 0
        self.contexts: list[ContextMeta] = []
        self.claimed: set[int] = set()

    def context(self, label: str, path: Sequence[Node]) -> None:
        offset = self._end
        spans: list[Span] = []
        flagged: list[Flag] = []
        everywhere = self._flags.context(path)
        versions: list[npt.NDArray[np.int32]] = []
        for node in path:
            turn = node.turn
            if turn is None:
                self._plain(node.ids, node.role)
                continue
            self._plain(turn.lead, TEMPLATE)
            owns = node.number in self._own and node.number not in self.claimed
            rules = 0
            if owns:
                rules = everywhere | self._flags.turn(node.number)
                self.claimed.add(node.number)
                span = Span(start=self._end - offset, end=self._end - offset + len(turn.ids))
                spans.append(span)
                if rules:
                    _flag(flagged, span, rules)
                versions.append(turn.versions)
                self._candidates += turn.candidates or [()] * len(turn.ids)
            if turn.routing is not None:
                self._routing.append((offset, node))
            flags = FLAG_SAMPLED | (FLAG_LOSS if owns else 0) | rules << RULE_BITS
            self._append(turn.ids, node.role, flags, turn.logprobs, turn.versions)
            if node is not path[-1]:
                self._plain(turn.tail, TEMPLATE)
        trained = np.concatenate(versions)
        self.contexts.append(
            ContextMeta(
                label=label,
                offset=offset,
                tokens=self._end - offset,
                generated=len(trained),
                loss_spans=tuple(spans),
                min_version=int(trained.min()),
                max_version=int(trained.max()),
                flags=tuple(flagged),
            )
        )

    def _plain(self, ids: Ids, role: int) -> None:
        zeros = np.zeros(len(ids), np.int32)
        self._append(ids, role, 0, zeros.astype(np.float32), zeros)

    def _append(
        self,
        ids: Ids,
        role: int,
        flags: int,
        logprobs: npt.NDArray[np.float32],
        versions: npt.NDArray[np.int32],
    ) -> None:
        if not len(ids):
            return
        self._tokens.append(ids)
        self._mask.append(np.full(len(ids), 1 if flags & FLAG_LOSS else 0, np.uint8))
        self._logprobs.append(logprobs)
        self._versions.append(versions)
        self._segments.append((self._end, self._end + len(ids), role, flags, len(self.contexts)))
        self._end += len(ids)

    def columns(self) -> dict[str, npt.NDArray[np.generic]]:
        columns: dict[str, npt.NDArray[np.generic]] = {
            "tokens": np.concatenate([np.empty(0, np.int32), *self._tokens]),
            "loss_mask": np.concatenate([np.empty(0, np.uint8), *self._mask]),
            "logprobs": np.concatenate([np.empty(0, np.float32), *self._logprobs]),
            "policy_version": np.concatenate([np.empty(0, np.int32), *self._versions]),
            "segments": np.asarray(self._segments, np.int32).reshape(-1, 5),
        }
        if any(self._candidates):
            sizes = [len(ids) for ids in self._candidates]
            columns["candidates.offsets"] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            columns["candidates.ids"] = np.asarray(
                [token for ids in self._candidates for token in ids], np.int32
            )
        if self._routing:
            columns |= self._routed()
        return columns

    def _routed(self) -> dict[str, npt.NDArray[np.generic]]:
        """Rows of no routing (what was never an input: a context's last token) are 0."""
        routings = [
            (offset, node.turn.routing) for offset, node in self._routing if node.turn and node.turn.routing
        ]
        layers, k = routings[0][1].rows.shape[1:]
        wide = any(routing.rows.dtype == np.uint16 for _, routing in routings)
        found = np.zeros((self._end, layers, k), np.uint16 if wide else np.uint8)
        ends = {context.offset: context.offset + context.tokens for context in self.contexts}
        for offset, routing in routings:
            start = offset + routing.start
            room = ends[offset] - start
            found[start : start + min(room, len(routing.rows))] = routing.rows[:room]
        return {f"routed_experts.L0-{layers - 1}": found}


def _flag(flagged: list[Flag], span: Span, rules: int) -> None:
    """Adds a flagged span; one that goes on where the last ended, by the same rules, is a part of that."""
    if flagged and (flagged[-1].end, flagged[-1].rules) == (span.start, rules):
        flagged[-1] = Flag(start=flagged[-1].start, end=span.end, rules=rules)
    else:
        flagged.append(Flag(start=span.start, end=span.end, rules=rules))
