"""A session's tree as a payload's columns. Pure.

Promises: columns come in pieces, turn by turn, which are the tree's own arrays: what is large is not copied. Contexts are whole paths, main first; a sampled turn that several share is trained in the first of them; what an
excluded kind of request sampled is left out and counted; what the template adds after a context's last turn is left out;
what rules have flagged is told of the turns that a context trains, by the scope of their penalties.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from pipeline.batch.segments import FLAG_LOSS, FLAG_SAMPLED
from pipeline.capture.routing import Column, routed_rows, whole_name
from pipeline.capture.showing import image_items
from pipeline.capture.tree import TEMPLATE, ContextTree, Ids, Node, leaves
from pipeline.engines.base import Routing
from pipeline.signal.rules import NO_RULES, Judge
from schemas.payload import ContextMeta, Flag, Span

__all__ = ["FLAG_LOSS", "FLAG_SAMPLED", "RULE_BITS", "Export", "export"]

RULE_BITS = 8
"""Bit RULE_BITS + i of a segment's flags: the source's penalty i flags it. Only segments that a context trains have any."""
_SMALL = 4096
"""Bytes of a piece below which it is better copied than written by itself."""
COMPACTING = ("compaction", "summary")
"""Kinds of requests after which an agent may go on in a new dialogue."""


@dataclass(frozen=True, slots=True)
class Export:
    """The payload's columns, each as the pieces that make it up (dtypes of `schemas.payload.COLUMNS`, and the optional ones where
    the engine gave them; at least one piece, maybe of no row), and one ContextMeta a context, main first. `excluded`: sampled
    tokens left out, by the label of their request."""

    pieces: dict[str, list[Column]]
    contexts: tuple[ContextMeta, ...]
    excluded: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def columns(self) -> dict[str, Column]:
        """The columns as arrays: a copy of all of them."""
        return {name: np.concatenate(pieces) for name, pieces in self.pieces.items()}


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
    return Export(rows.pieces(), tuple(rows.contexts), excluded)


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
        self._tokens: list[Column] = []
        self._mask: list[Column] = []
        self._logprobs: list[Column] = []
        self._versions: list[Column] = []
        self._segments: list[tuple[int, int, int, int, int]] = []
        self._candidates: list[tuple[int, ...]] = []
        self._routing: list[list[Routing]] = []
        self._end = 0
        self.contexts: list[ContextMeta] = []
        self.claimed: set[int] = set()

    def context(self, label: str, path: Sequence[Node]) -> None:
        offset = self._end
        spans: list[Span] = []
        flagged: list[Flag] = []
        everywhere = self._flags.context(path)
        versions: list[npt.NDArray[np.int32]] = []
        routing: list[Routing] = []
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
                routing.append(turn.routing)
            flags = FLAG_SAMPLED | (FLAG_LOSS if owns else 0) | rules << RULE_BITS
            self._append(turn.ids, node.role, flags, turn.logprobs, turn.versions)
            if node is not path[-1]:
                self._plain(turn.tail, TEMPLATE)
        self._routing.append(routing)
        self.contexts.append(
            ContextMeta(
                label=label,
                offset=offset,
                tokens=self._end - offset,
                generated=sum(map(len, versions)),
                loss_spans=tuple(spans),
                min_version=min(int(each.min()) for each in versions),
                max_version=max(int(each.max()) for each in versions),
                flags=tuple(flagged),
                images=image_items(path),
            )
        )

    def _plain(self, ids: Ids, role: int) -> None:
        zeros = np.zeros(len(ids), np.int32)
        self._append(ids, role, 0, zeros.view(np.float32), zeros)

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

    def pieces(self) -> dict[str, list[Column]]:
        columns: dict[str, list[Column]] = {
            "tokens": _joined(self._tokens or [np.empty(0, np.int32)]),
            "loss_mask": _joined(self._mask or [np.empty(0, np.uint8)]),
            "logprobs": _joined(self._logprobs or [np.empty(0, np.float32)]),
            "policy_version": _joined(self._versions or [np.empty(0, np.int32)]),
            "segments": [np.asarray(self._segments, np.int32).reshape(-1, 5)],
        }
        if any(self._candidates):
            sizes = [len(ids) for ids in self._candidates]
            columns["candidates.offsets"] = [np.cumsum([0, *sizes], dtype=np.int64)]
            ids = chain.from_iterable(self._candidates)
            columns["candidates.ids"] = [np.fromiter(ids, np.int32, sum(sizes))]
        tokens = (context.tokens for context in self.contexts)
        if routed := routed_rows(zip(tokens, self._routing, strict=True)):
            columns[whole_name(routed)] = routed
        return columns


def _joined(pieces: list[Column]) -> list[Column]:
    """One piece, where they are so small that each costs more than its bytes: a column of narrow rows over thousands of turns."""
    small = sum(piece.nbytes for piece in pieces) < _SMALL * len(pieces)
    return [np.concatenate(pieces)] if small else pieces


def _flag(flagged: list[Flag], span: Span, rules: int) -> None:
    """Adds a flagged span; one that goes on where the last ended, by the same rules, is a part of that."""
    if flagged and (flagged[-1].end, flagged[-1].rules) == (span.start, rules):
        flagged[-1] = Flag(start=flagged[-1].start, end=span.end, rules=rules)
    else:
        flagged.append(Flag(start=span.start, end=span.end, rules=rules))
