"""A session as a tree: nodes are segments, paths are contexts. Pure: no I/O, no clock, no tokenizer.

Promises (tested over random agents):
- a sampled turn keeps its sampled tokens, log-probabilities and versions; nothing re-tokenized stands in for it;
- the tokens before a sampled turn in its exported context are exactly those it was sampled from;
- every sampled token has loss in exactly one exported context, and no other token ever has;
- forks share the nodes of their common prefix; nodes are only added and never change, so what a turn adds, in memory and
  in work, are its own new tokens. What rules say of sampled turns stands beside the nodes, as some say it later.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.capture.dialogue import Key, Step
from pipeline.capture.rules import Kind
from pipeline.engines.base import Routing
from schemas.payload import ROLES, ImageItem

Ids = npt.NDArray[np.int32]
TEMPLATE = ROLES.index("template")


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """What the engine sampled, between what the template puts before (`lead`) and after (`tail`) it. `ids`, `logprobs`
    (nats) and `versions` are of one length, at least 1; `candidates` (ids per token) too, or (). `routing` has rows of the
    context's own token numbers."""

    lead: Ids
    ids: Ids
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    tail: Ids
    candidates: tuple[tuple[int, ...], ...] = ()
    routing: Routing | None = None

    def __post_init__(self) -> None:
        counts = {len(self.ids), len(self.logprobs), len(self.versions)}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                f"a sampled turn has {len(self.ids)} ids, {len(self.logprobs)} logprobs and {len(self.versions)} versions"
            )
        if self.candidates and len(self.candidates) != len(self.ids):
            raise ValueError(
                f"a sampled turn has {len(self.ids)} ids and {len(self.candidates)} candidate sets"
            )


@dataclass(eq=False, slots=True)
class Node:
    """One turn. A prompt node has `ids` alone; a sampled one has `turn`, whose ids these are, and the `kind` of the request
    that it answered. `tokens`, `sampled` and `routed` are of the whole path: its tokens, its sampled turns, and how many
    of its first tokens' routing is known. `images`: those of a prompt turn that the policy is shown, by their places in `ids`."""

    number: int
    parent: Node | None
    role: int
    ids: Ids
    turn: SampledTurn | None = None
    kind: Kind = field(default=Kind())
    images: tuple[ImageItem, ...] = ()
    tokens: int = 0
    sampled: int = 0
    routed: int = 0
    prompts: dict[Key, list[Node]] = field(default_factory=dict[Key, "list[Node]"])
    answers: dict[Key, list[Node]] = field(default_factory=dict[Key, "list[Node]"])

    def __post_init__(self) -> None:
        above = self.parent
        if above is not None:
            self.tokens = above.tokens + len(self.ids)
            self.sampled, self.routed = above.sampled, above.routed
        if self.turn is not None:
            self.tokens += len(self.turn.lead) + len(self.turn.tail)
            self.sampled += 1
            if self.turn.routing is not None:
                self.routed = self.turn.routing.start + len(self.turn.routing.rows)

    def below(self, parent: Node) -> Node:
        """The same turn under another parent."""
        return Node(self.number, parent, self.role, self.ids, self.turn, self.kind, self.images)

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


class ContextTree:
    def __init__(self) -> None:
        self._root = Node(0, None, TEMPLATE, np.empty(0, np.int32))
        self.nodes: list[Node] = [self._root]
        self.flags: dict[int, int] = {}
        """Of a sampled node, by its number, the bits of the rules that have flagged it; bits are only added."""

    def match(self, steps: Sequence[Step]) -> Match:
        """The longest known path. Of several as long, the one with most sampled turns, then the newest.

        May run beside `add` on another thread: it then sees the tree as of before or after.
        """
        frontier = [self._root]
        covered = 0
        for step in steps:
            following: list[Node] = []
            for node in frontier:
                if step.answer_key is not None:
                    following += node.answers.get(step.answer_key, ())
                following += node.prompts.get(step.prompt_key, ())
            if not following:
                break
            frontier = following
            covered += 1
        return Match(max(frontier, key=lambda node: (node.sampled, node.number)), covered)

    def prompt(self, match: Match, rendered: Sequence[Sequence[int] | Ids], lead: Sequence[int]) -> Ids:
        """Token ids, int32 [T], that the next turn is sampled from: the path, the rendered rest of the request, the lead."""
        parts: list[Ids] = []
        for node in match.node.path():
            parts += whole(node)
        return np.concatenate([*parts, *(np.asarray(ids, np.int32) for ids in (*rendered, lead))])

    def add(
        self,
        match: Match,
        steps: Sequence[Step],
        rendered: Sequence[Sequence[int] | Ids],
        turn: SampledTurn,
        answer: Key,
        kind: Kind = Kind(),  # noqa: B008  # frozen
        images: Sequence[tuple[ImageItem, ...]] = (),
    ) -> Node:
        """Puts the rest of the request (`steps[match.steps:]`, with their ids, and the `images` that each shows, () for none at
        all) and the sampled turn into the tree.

        A prompt turn that another request has put there meanwhile is shared when its tokens are the same.
        """
        rest = steps[match.steps :]
        if len(rest) != len(rendered):
            raise ValueError(f"{len(rest)} steps are unmatched and {len(rendered)} are rendered")
        node = match.node
        for step, given, shown in zip(rest, rendered, images or [()] * len(rest), strict=True):
            ids = np.asarray(given, np.int32)
            known = node.prompts.setdefault(step.prompt_key, [])
            child = next((child for child in known if np.array_equal(child.ids, ids)), None)
            if child is None:
                child = self.append(Node(len(self.nodes), node, ROLES.index(step.role), ids, images=shown))
                known.append(child)
            node = child
        sampled = Node(len(self.nodes), node, ROLES.index("assistant"), turn.ids, turn, kind)
        node.answers.setdefault(answer, []).append(sampled)
        return self.append(sampled)

    def flag(self, number: int, flags: int) -> int:
        """Adds bits to those of a sampled node; which of them are new."""
        known = self.flags.get(number, 0)
        if new := flags & ~known:
            self.flags[number] = known | new
        return new

    def append(self, node: Node) -> Node:
        """Takes a node as it is; its number must be the next one. Raises ValueError."""
        if node.number != len(self.nodes):
            raise ValueError(f"node {node.number} comes where {len(self.nodes)} is next")
        self.nodes.append(node)
        return node


def whole(node: Node) -> list[Ids]:
    """All tokens of the node, in order: with what the template puts around a sampled turn."""
    return [node.ids] if node.turn is None else [node.turn.lead, node.turn.ids, node.turn.tail]


def leaves(nodes: Iterable[Node], own: Container[int]) -> list[Node]:
    """The sampled turns that contexts end in, in order: of those whose number is in `own`, which no later one of the same
    agent continues.

    A request of an auxiliary kind that continues an agent's dialogue (a summary of it) ends in a leaf of its own, and so
    does another agent's; neither takes the dialogue's end away.
    """
    found: list[Node] = []
    below: dict[int, set[Kind]] = {}
    for node in sorted(nodes, key=lambda node: -node.number):
        kinds = below.pop(node.number, set[Kind]())
        if node.number in own:
            if not any(_continues(kind, node.kind) for kind in kinds):
                found.append(node)
            kinds.add(node.kind)
        if node.parent is not None and kinds:
            below.setdefault(node.parent.number, set()).update(kinds)
    return found[::-1]


def _continues(later: Kind, earlier: Kind) -> bool:
    return later.agent == earlier.agent and later.label in (None, earlier.label)
