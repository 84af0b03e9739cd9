"""A session as a tree: nodes are segments, paths are contexts. Pure: no I/O, no clock, no tokenizer.

Promises (tested over random agents):
- a sampled turn keeps its sampled tokens, log-probabilities and versions; nothing re-tokenized stands in for it;
- the tokens before a sampled turn in its exported context are exactly those it was sampled from;
- every sampled token has loss in exactly one exported context, and no other token ever has;
- forks share the nodes of their common prefix; nodes are only added and never change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.capture.dialogue import Key, Step
from schemas.payload import ROLES, ContextMeta, Span

Ids = npt.NDArray[np.int32]
FLAG_SAMPLED, FLAG_LOSS = 1, 2
"""Bits of a segment's flags: the policy sampled it; this context trains it."""
TEMPLATE = ROLES.index("template")


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """What the engine sampled, between what the template puts before (`lead`) and after (`tail`) it. `ids`, `logprobs`
    (nats) and `versions` are of one length, at least 1."""

    lead: Ids
    ids: Ids
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    tail: Ids

    def __post_init__(self) -> None:
        counts = {len(self.ids), len(self.logprobs), len(self.versions)}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                f"a sampled turn has {len(self.ids)} ids, {len(self.logprobs)} logprobs and {len(self.versions)} versions"
            )


@dataclass(eq=False, slots=True)
class Node:
    """One turn. A prompt node has `ids` alone; a sampled one has `turn`, whose ids these are."""

    number: int
    parent: Node | None
    role: int
    ids: Ids
    turn: SampledTurn | None = None
    prompts: dict[Key, Node] = field(default_factory=dict[Key, "Node"])
    answers: dict[Key, list[Node]] = field(default_factory=dict[Key, "list[Node]"])

    def path(self) -> list[Node]:
        """From the root's child down to this node."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known path of a request: its end, and how many of the request's steps it covers."""

    node: Node
    steps: int


@dataclass(frozen=True, slots=True)
class Export:
    """The payload's columns (dtypes of `schemas.payload.COLUMNS`) and one ContextMeta a context, main first."""

    columns: dict[str, npt.NDArray[np.generic]]
    contexts: tuple[ContextMeta, ...]


class ContextTree:
    def __init__(self) -> None:
        self._root = Node(0, None, TEMPLATE, np.empty(0, np.int32))
        self._nodes: list[Node] = [self._root]

    @property
    def next_number(self) -> int:
        """The number of the next node."""
        return len(self._nodes)

    def match(self, steps: Sequence[Step]) -> Match:
        """The longest known path. Of several as long, the one with most sampled turns, then the newest."""
        frontier = [self._root]
        covered = 0
        for step in steps:
            following: list[Node] = []
            for node in frontier:
                if step.answer_key is not None:
                    following += node.answers.get(step.answer_key, ())
                if (prompt := node.prompts.get(step.prompt_key)) is not None:
                    following.append(prompt)
            if not following:
                break
            frontier = following
            covered += 1
        return Match(max(frontier, key=lambda node: (_sampled_turns(node), node.number)), covered)

    def prompt(self, match: Match, rendered: Sequence[Sequence[int]], lead: Sequence[int]) -> list[int]:
        """Token ids that the next turn is sampled from: the path, the rendered rest of the request, the lead."""
        ids: list[int] = []
        for node in match.node.path():
            ids += _whole(node).tolist()
        for part in rendered:
            ids += part
        ids += lead
        return ids

    def add(
        self,
        match: Match,
        steps: Sequence[Step],
        rendered: Sequence[Sequence[int]],
        turn: SampledTurn,
        answer: Key,
    ) -> Node:
        """Puts the rest of the request (`steps[match.steps:]`, with their ids) and the sampled turn into the tree.

        A prompt turn that another request has put there meanwhile is shared.
        """
        rest = steps[match.steps :]
        if len(rest) != len(rendered):
            raise ValueError(f"{len(rest)} steps are unmatched and {len(rendered)} are rendered")
        node = match.node
        for step, ids in zip(rest, rendered, strict=True):
            child = node.prompts.get(step.prompt_key)
            if child is None:
                role = step.message.role if step.message is not None else "system"
                child = self._node(node, ROLES.index(role), np.asarray(ids, np.int32), None)
                node.prompts[step.prompt_key] = child
            node = child
        sampled = self._node(node, ROLES.index("assistant"), turn.ids, turn)
        node.answers.setdefault(answer, []).append(sampled)
        return sampled

    def _node(self, parent: Node, role: int, ids: Ids, turn: SampledTurn | None) -> Node:
        node = Node(len(self._nodes), parent, role, ids, turn)
        self._nodes.append(node)
        return node

    def export(self) -> Export:
        """Every context that ends in a sampled turn that no later sampled turn continues.

        The main context is the one with most sampled turns, then the oldest; it comes first and so owns the turns that
        it shares. Another is a `fork` if it shares a turn with it, else `other`. What the template adds after
        a context's last turn is left out.
        """
        sampled = [node for node in self._nodes if node.turn is not None]
        continued = {id(node) for leaf in sampled for node in leaf.path()[:-1]}
        leaves = [node for node in sampled if id(node) not in continued]
        leaves.sort(key=lambda node: (-_sampled_turns(node), node.number))
        rows = _Rows()
        main = {id(node) for node in leaves[0].path()[1:]} if leaves else set[int]()
        for i, leaf in enumerate(leaves):
            shares = any(id(node) in main for node in leaf.path()[1:])
            rows.context("main" if i == 0 else "fork" if shares else "other", leaf.path())
        return rows.export()


class _Rows:
    """Gathers the rows of contexts; claims each sampled turn for the first context that holds it."""

    def __init__(self) -> None:
        self._tokens: list[Ids] = []
        self._mask: list[npt.NDArray[np.uint8]] = []
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._versions: list[npt.NDArray[np.int32]] = []
        self._segments: list[tuple[int, int, int, int, int]] = []
        self._contexts: list[ContextMeta] = []
        self._claimed: set[int] = set()
        self._end = 0

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
            owns = node.number not in self._claimed
            if owns:
                self._claimed.add(node.number)
                spans.append(Span(start=self._end - offset, end=self._end - offset + len(turn.ids)))
                versions.append(turn.versions)
            flags = FLAG_SAMPLED | (FLAG_LOSS if owns else 0)
            self._append(turn.ids, node.role, flags, turn.logprobs, turn.versions)
            if node is not path[-1]:
                self._plain(turn.tail, TEMPLATE)
        trained = np.concatenate(versions)
        self._contexts.append(
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
        self._segments.append((self._end, self._end + len(ids), role, flags, len(self._contexts)))
        self._end += len(ids)

    def export(self) -> Export:
        columns: dict[str, npt.NDArray[np.generic]] = {
            "tokens": np.concatenate([np.empty(0, np.int32), *self._tokens]),
            "loss_mask": np.concatenate([np.empty(0, np.uint8), *self._mask]),
            "logprobs": np.concatenate([np.empty(0, np.float32), *self._logprobs]),
            "policy_version": np.concatenate([np.empty(0, np.int32), *self._versions]),
            "segments": np.asarray(self._segments, np.int32).reshape(-1, 5),
        }
        return Export(columns, tuple(self._contexts))


def _whole(node: Node) -> Ids:
    turn = node.turn
    return node.ids if turn is None else np.concatenate([turn.lead, turn.ids, turn.tail])


def _sampled_turns(node: Node) -> int:
    return sum(step.turn is not None for step in node.path())
