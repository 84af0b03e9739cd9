"""A session's tree as a payload's columns. Pure.

Promises: contexts are whole paths, main first; a sampled turn that several share is trained in the first of them; what an
excluded kind of request sampled is left out and counted; what the template adds after a context's last turn is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.capture.tree import TEMPLATE, ContextTree, Ids, Node, leaves
from schemas.payload import ContextMeta, Span

FLAG_SAMPLED, FLAG_LOSS = 1, 2
"""Bits of a segment's flags: the policy sampled it; this context trains it."""
COMPACTING = ("compaction", "summary")
"""Kinds of requests after which an agent may go on in a new dialogue."""


@dataclass(frozen=True, slots=True)
class Export:
    """The payload's columns (dtypes of `schemas.payload.COLUMNS`, and the optional ones where the engine gave them) and one
    ContextMeta a context, main first. `excluded`: sampled tokens left out, by the label of their request."""

    columns: dict[str, npt.NDArray[np.generic]]
    contexts: tuple[ContextMeta, ...]
    excluded: dict[str, int] = field(default_factory=dict[str, int])


def export(tree: ContextTree, exclude: Collection[str] = ()) -> Export:
    """Every context that ends in a sampled turn that no later one continues; `exclude`: labels that are left out.

    The main context is the main agent's with most sampled turns, then the oldest. Another is labelled by its request's
    kind; `subagent` if an agent of its own holds it; `fork` if it shares a sampled turn with the main one; `compacted` if
    it began after a compaction; else `other`.
    """
    own = {node.number for node in tree.nodes if node.turn is not None and _told(node) not in exclude}
    ends = leaves(tree.nodes, own)
    ends.sort(key=lambda node: (_is_main(node), -node.sampled, node.number))
    rows = _Rows(own)
    main = {node.number for node in ends[0].path() if node.turn is not None} if ends else set[int]()
    compacted = [node.number for node in tree.nodes if node.kind.label in COMPACTING]
    for i, leaf in enumerate(ends):
        # An auxiliary dialogue that another one continues is a part of that one's context.
        if leaf.number not in rows.claimed:
            rows.context(_label(leaf, i == 0, main, compacted), leaf.path())
    excluded: dict[str, int] = {}
    for node in tree.nodes:
        if node.turn is not None and node.number not in own and (label := _told(node)) is not None:
            excluded[label] = excluded.get(label, 0) + len(node.ids)
    return Export(rows.columns(), tuple(rows.contexts), excluded)


def _is_main(leaf: Node) -> bool:
    # False sorts first.
    return leaf.kind.label is not None or leaf.kind.agent != ""


def _told(node: Node) -> str | None:
    """The label that a turn's request alone gives it: by that, turns are left out."""
    return node.kind.label or ("subagent" if node.kind.agent else None)


def _label(leaf: Node, first: bool, main: set[int], compacted: list[int]) -> str:
    if (told := _told(leaf)) is not None:
        return told
    if first:
        return "main"
    turns = [node.number for node in leaf.path() if node.turn is not None]
    if main.intersection(turns):
        return "fork"
    return "compacted" if any(number < turns[0] for number in compacted) else "other"


class _Rows:
    """Gathers the rows of contexts; claims each sampled turn that may be trained for the first context that holds it."""

    def __init__(self, own: set[int]) -> None:
        self._own = own
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
        versions: list[npt.NDArray[np.int32]] = []
        for node in path:
            turn = node.turn
            if turn is None:
                self._plain(node.ids, node.role)
                continue
            self._plain(turn.lead, TEMPLATE)
            owns = node.number in self._own and node.number not in self.claimed
            if owns:
                self.claimed.add(node.number)
                spans.append(Span(start=self._end - offset, end=self._end - offset + len(turn.ids)))
                versions.append(turn.versions)
                self._candidates += turn.candidates or [()] * len(turn.ids)
            if turn.routing is not None:
                self._routing.append((offset, node))
            flags = FLAG_SAMPLED | (FLAG_LOSS if owns else 0)
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
