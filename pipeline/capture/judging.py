"""What rules say of a session's turns, in its tree and in its journal.

Promises:
- a turn is judged before its answer is whole, and what follows it when the request that brings it is let in, before that
  request's own turn is sampled; the journal has both, so a host that is killed loses none;
- a rule of a penalty with `stop` ends the rollout: the turn that it flags is answered, and no other is sampled;
- where a rule fails, nobody knows what the turn's flags are: the session samples no more and leaves the journal, and
  `broken` says why, for its attempt to be tried anew;
- what is left out of training is not judged: a title ends no rollout;
- long texts, and rules that do not ship, are judged on a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Protocol

from pipeline.capture.budget import TurnLimit
from pipeline.capture.call import Answer
from pipeline.capture.dialogue import Step
from pipeline.capture.rules import Kind
from pipeline.capture.tree import ContextTree, Match, Node
from pipeline.signal.rules import Judge, Results, RuleFailed, Turn

EARLY_STOP = "early_stop"
"""Code of the refusal once a rule has ended the rollout."""
_MANY_TOKENS, _MANY_CHARACTERS, _MESSAGE = 1024, 1 << 15, 1 << 8
"""More is judged on a thread; a message costs as much as so many characters, whatever is in it."""


class Journal(Protocol):
    """Keeps recorded turns where a crash of this process does not reach them. Does not block."""

    def record(self, session: str, nodes: Sequence[Node], answer: Answer, flags: int = 0) -> None:
        """`nodes`: what the turn added to the session's tree, the sampled node last, with its flags."""
        ...

    def flag(self, session: str, number: int, flags: int) -> None:
        """Rules have added these flags to a sampled node that was recorded before."""
        ...

    def forget(self, session: str) -> None:
        """The session's turns are needed no more."""
        ...


class Judging:
    def __init__(
        self,
        session: str,
        tree: ContextTree,
        judge: Judge,
        journal: Journal | None,
        exclude: Collection[str] = (),
    ) -> None:
        """`exclude`: labels of requests that are left out of training."""
        self._session = session
        self._tree = tree
        self._judge = judge
        self._journal = journal
        self._exclude = exclude
        self._asks_turns, self._asks_results = judge.asks("turn"), judge.asks("results")
        self.stopped = ""
        """The name of the rule that has ended the rollout; empty: none has."""
        self.broken = ""

    def check(self) -> None:
        """Raises TurnLimit where no further turn is to be sampled."""
        if self.broken:
            raise TurnLimit("a rule could not judge a turn of this session", "rule_failed")
        if self.stopped:
            raise TurnLimit(f"the rule {self.stopped!r} has ended this rollout", EARLY_STOP)

    async def turn(self, seen: Turn, kind: Kind) -> int:
        """The flags of a turn that is to be recorded, as the answer to a request of that kind."""
        if not self._asks_turns or kind.told in self._exclude:
            return 0
        return await self._flags(seen, len(seen.tokens) > _MANY_TOKENS)

    def record(self, nodes: Sequence[Node], answer: Answer, flags: int) -> None:
        """Takes the turn that `nodes` end in, with its flags."""
        self._mark(nodes[-1].number, flags)
        if self._journal is not None and not self.broken:
            self._journal.record(self._session, nodes, answer, flags)

    async def results(self, asked: Sequence[Step], match: Match) -> None:
        """Judges what follows the last sampled turn of the known path, where a request has more of it than is known. Raises
        TurnLimit when that ends the rollout."""
        if not self._asks_results:
            return
        turn, start = match.node, match.steps
        while turn.turn is None:
            if turn.parent is None:
                return
            turn, start = turn.parent, start - 1
        if turn.kind.told in self._exclude:
            return
        followed = list(takewhile(lambda step: step.role != "assistant", asked[start:]))
        if start + len(followed) <= match.steps:
            return
        seen = Results(tuple(message.text for step in followed for message in step.messages))
        size = sum(_MESSAGE + len(text) for text in seen.texts)
        flags = await self._flags(seen, size > _MANY_CHARACTERS)
        new = self._mark(turn.number, flags)
        if new and self._journal is not None and not self.broken:
            self._journal.flag(self._session, turn.number, new)
        self.check()

    async def _flags(self, seen: Turn | Results, long: bool) -> int:
        try:
            if long or self._judge.own:
                return await asyncio.to_thread(self._judge.flags, seen)
            return self._judge.flags(seen)
        except RuleFailed as error:
            self.broken = self.broken or str(error)
            if self._journal is not None:
                self._journal.forget(self._session)
            return 0

    def _mark(self, number: int, flags: int) -> int:
        self.stopped = self.stopped or self._judge.stopped_by(flags)
        return self._tree.flag(number, flags)
