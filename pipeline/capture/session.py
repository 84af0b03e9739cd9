"""One tenant of the capture proxy: answers model calls from the engine and records what was sampled.

Promises:
- a request that asks for the same gets the recorded answer, also while the first is under way; a failed one is tried anew;
- different requests at once on one session are independent;
- the answer is generated and recorded whether or not the client is still there;
- a session's sampling parameters are its behaviour's, whatever the agent asks for: it may only ask for fewer tokens;
- no more than the behaviour's turns and tokens are sampled, none after the deadline, no context grows over `max_context`,
  and none once a rule has ended the rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.capture.budget import Budget, ContextOverflow, TurnLimit
from pipeline.capture.call import Answer, BadRequest, Call, Reply
from pipeline.capture.dialogue import Dialogue, Step, answer_key_of, steps
from pipeline.capture.export import Export, export
from pipeline.capture.judging import Journal, Judging
from pipeline.capture.messages import Message
from pipeline.capture.reading import Reading, finish
from pipeline.capture.renderers.base import Renderer
from pipeline.capture.rules import Kind, Rules, classify
from pipeline.capture.showing import Rendered, Showing, placed
from pipeline.capture.tree import ContextTree, Ids, Match, SampledTurn
from pipeline.capture.turn import SessionClosed, Turn
from pipeline.engines.base import Engine, EngineUnavailable, Generation
from pipeline.engines.wire import SamplingParams
from pipeline.signal.rules import NO_RULES, Called, Judge
from pipeline.signal.rules import Turn as JudgedTurn
from schemas.config import Behaviour

__all__ = ["ContextOverflow", "Journal", "Session", "SessionClosed", "TurnLimit"]

_MANY_TOKENS = 1024
"""More are parsed on a thread."""
_HASHED, _TOKENIZED = 1 << 17, 1_000
"""Characters that take no longer than a thread takes to be asked: 0.3 ms. The schemas of tools do not count: they are
written in one call that holds the interpreter, wherever it is made."""
_MESSAGE = 1 << 10
"""Characters that take as long as what a message costs whatever is in it."""
_PUT_TOGETHER = 1 << 17
"""Tokens of a known path that are put together meanwhile."""


class Session:
    def __init__(
        self,
        id: str,
        behaviour: Behaviour,
        max_context: int,
        renderer: Renderer,
        engine: Engine,
        key: bytes = b"",
        rules: Rules = Rules(),  # noqa: B008  # frozen
        deadline: float | None = None,
        journal: Journal | None = None,
        judge: Judge = NO_RULES,
        showing: Showing | None = None,
    ) -> None:
        """`key` signs reasoning; `deadline` is a time of the running loop; `max_context` in tokens, prompt and answer; `showing`:
        None for a policy that is trained on no images."""
        self.id = id
        self.behaviour = behaviour
        self.max_context = max_context
        self._renderer = renderer
        self._engine = engine
        self._key = key
        self._rules = rules
        self._budget = Budget(behaviour, deadline)
        self._showing = showing
        self._judge = judge
        self._tree = ContextTree()
        self._judging = Judging(id, self._tree, judge, journal, behaviour.exclude)
        self._answers: dict[tuple[str, str], Turn] = {}
        self._tasks: set[asyncio.Task[Answer] | None] = set()
        self._requests = itertools.count(1)
        self._last: Answer | None = None
        self._trouble = False
        self._left = False
        self.refused = ""
        """The `code` of the limit that refused the turn that ended last; empty: none did."""
        self.away_s = 0.0
        """Seconds of its turns in which the engine was away."""
        self.closed = False

    @property
    def turns(self) -> int:
        """Turns sampled, or being sampled."""
        return self._budget.turns

    @property
    def owed(self) -> bool:
        """Whether the engine owes an answer: a model call is under way, the last to end met the engine's trouble, or the
        client of the newest call went before it had its answer, whether or not that was sampled since."""
        return self._trouble or self._left or bool(self._tasks)

    @property
    def stopped(self) -> str:
        """The name of the rule that has ended the rollout; empty: none has."""
        return self._judging.stopped

    @property
    def broken(self) -> str:
        """Why a rule could not judge a turn, so that nobody knows its flags; empty: all could."""
        return self._judging.broken

    @property
    def last(self) -> Answer | None:
        """The main agent's turn that was recorded last, auxiliary ones aside."""
        return self._last

    def reply(self, created: int) -> Reply:
        """`created` in Unix seconds."""
        return Reply(self.id, created, self._key)

    def answer(self, call: Call, headers: Mapping[str, str]) -> Turn:
        """The turn that answers a call; `headers` have lower-case names. Raises SessionClosed and TurnLimit.

        The turn raises TurnLimit, ContextOverflow, SessionClosed, BadRequest, EngineUnavailable and EngineRefused.
        """
        if self.closed:
            raise SessionClosed(f"session {self.id} is closed")
        self._budget.take_request()
        self._left = False
        kind = classify(self._rules, call, headers)
        # Two agents may ask the very same.
        key = (call.digest, kind.agent)
        turn = self._answers.get(key)
        if turn is None:
            turn = self._answers[key] = Turn(self.id, self._was_left)
            task = asyncio.create_task(self._run(key, turn, call, kind))
            self._tasks.add(task)
            turn.run(task)
        return turn

    async def count(self, dialogue: Dialogue) -> int:
        """Tokens of the prompt that a call with this dialogue would make. Raises BadRequest."""
        _, match, rendered = await self._prepare(dialogue)
        lead, _ = self._renderer.lead(Call("", dialogue, "").tool_choice)
        return match.node.tokens + sum(map(len, rendered.ids)) + len(lead)

    async def close(self) -> None:
        """Ends what is under way; what was recorded stays."""
        self.closed = True
        pending = [task for task in self._tasks if task is not None]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def export(self) -> Export:
        """See `pipeline.capture.export`."""
        return export(self._tree, self.behaviour.exclude, self._judge)

    def _was_left(self) -> None:
        self._left = not self.closed

    async def _run(self, key: tuple[str, str], turn: Turn, call: Call, kind: Kind) -> Answer:
        """Leaves the session as it is to be before whoever waits learns of the end."""
        counted = 0
        try:
            self._judging.check()
            # Counted before the first await, so that requests at once cannot pass the limit together.
            self._budget.take_turn()
            counted = 1
            answer = await self._sample(turn, call, kind)
        except BaseException as error:
            self._budget.turns -= counted
            self._trouble = isinstance(error, EngineUnavailable)
            self.refused = error.code if isinstance(error, TurnLimit | ContextOverflow) else ""
            # One that failed may be asked for anew.
            self._answers.pop(key, None)
            raise
        else:
            self._trouble = False
            self.refused = ""
            return answer
        finally:
            self._tasks.discard(asyncio.current_task())

    async def _prepare(self, dialogue: Dialogue) -> tuple[list[Step], Match, Rendered]:
        """The dialogue's steps, the longest known path, and the rest of them."""
        if not self._renderer.images and any(message.images for message in dialogue.messages):
            raise BadRequest(
                f"the request has an image, and the policy's family {self._renderer.family} takes none; leave images out",
                "messages",
                "unsupported_image",
            )

        # What takes longer than a thread takes to be asked is done on one: whatever an agent sends, in texts, tools or
        # arguments, is not tokenized in other tenants' time.
        if _characters(dialogue.messages) + _MESSAGE * len(dialogue.messages) <= _HASHED:
            asked, match = self._known(dialogue)
        else:
            asked, match = await asyncio.to_thread(self._known, dialogue)
        new = [message for step in asked[match.steps :] for message in step.messages]
        # Of the first step, the tools are a part.
        if match.steps and _characters(new) <= _TOKENIZED:
            return asked, match, self._render(dialogue, asked, match)
        return asked, match, await asyncio.to_thread(self._render, dialogue, asked, match)

    def _known(self, dialogue: Dialogue) -> tuple[list[Step], Match]:
        asked = steps(dialogue)
        return asked, self._tree.match(asked)

    def _render(self, dialogue: Dialogue, asked: Sequence[Step], match: Match) -> Rendered:
        try:
            found = self._renderer.steps(dialogue, match.steps)
        except ValueError as error:
            raise BadRequest(f"the dialogue cannot be rendered: {error}", "messages") from None
        if self._showing is None:
            return Rendered([_ids(step) for step in found])
        return self._showing.expanded(found, asked[match.steps :])

    async def _sample(self, turn: Turn, call: Call, kind: Kind) -> Answer:
        asked, match, rendered = await self._prepare(call.dialogue)
        if self._showing is not None:
            self._showing.see(asked)
        await self._judging.results(asked, match)
        try:
            prompt_lead, opening = self._renderer.lead(call.tool_choice)
        except ValueError as error:
            raise BadRequest(f"the choice cannot be forced: {error}", "tool_choice") from None
        lead = [*prompt_lead, *opening]
        if match.node.tokens <= _PUT_TOGETHER:
            prompt = self._tree.prompt(match, rendered.ids, lead)
        else:
            prompt = await asyncio.to_thread(self._tree.prompt, match, rendered.ids, lead)
        room = self.max_context - len(prompt)
        if room < 1:
            raise ContextOverflow(len(prompt), self.max_context)
        limits = [self.behaviour.max_tokens, room, *([] if call.max_tokens is None else [call.max_tokens])]
        # Before it may wait for other calls: so clients get their pings meanwhile.
        turn.start(len(prompt))
        async with self._budget.tokens(min(limits)) as granted:
            # A call that it waited for may have ended the rollout.
            self._judging.check()
            given = _Prompt(asked, match, rendered, lead, opening, prompt)
            return await self._generate(turn, call, kind, given, granted)

    async def _generate(self, turn: Turn, call: Call, kind: Kind, given: _Prompt, granted: int) -> Answer:
        match, opening, prompt = given.match, given.opening, given.ids
        number = next(self._requests)
        parser = self._renderer.parser(opening, call.stop, call.parallel, call.dialogue.tools)
        reading = Reading(turn, parser, f"{self.id}/{number}", call.tool_choice.mode != "none")
        watched = call.stream or bool(call.stop) or not call.parallel
        generation = await self._engine.generate(
            prompt,
            self._params(call, granted),
            f"{self.id}-r{number}",
            self.id,
            watch=reading.watch if watched else None,
            images=placed(self._showing, call.dialogue, match.node, given.rendered, prompt),
            routed_from=match.node.routed,
            within=self._budget.left_s(),
        )
        self.away_s += generation.away_s
        sampled = self._turn(given.lead, opening, generation)
        if not watched:
            if len(sampled.ids) > _MANY_TOKENS:
                await asyncio.to_thread(reading.watch, generation.token_ids)
            else:
                reading.watch(generation.token_ids)
        parsed = reading.finish()
        ended = finish(generation, parser, parsed)
        flags = await self._judging.turn(
            JudgedTurn(
                parsed.content,
                sampled.ids,
                parsed.reasoning,
                tuple(Called(each.name, each.arguments) for each in parsed.tool_calls),
                parsed.malformed,
                frozenset(tool.name for tool in call.dialogue.tools),
                ended,
            ),
            kind,
        )
        known = len(self._tree.nodes)
        node = self._tree.add(
            match,
            given.asked,
            given.rendered.ids,
            sampled,
            answer_key_of(parsed.content, parsed.tool_calls),
            kind,
            given.rendered.images,
        )
        self._budget.spend(len(sampled.ids))
        answer = Answer(
            number=node.number,
            content=parsed.content,
            tool_calls=parsed.tool_calls,
            finish=ended,
            malformed=parsed.malformed,
            prompt_tokens=len(prompt),
            completion_tokens=len(sampled.ids),
            reasoning=parsed.reasoning,
            stop_sequence=parser.stopped_by,
            cached_tokens=match.node.tokens,
            reasoning_tokens=parser.reasoning_tokens,
        )
        if kind == Kind():
            self._last = answer
        self._judging.record(self._tree.nodes[known:], answer, flags)
        return answer

    def _own_seed(self, seed: int) -> int:
        """A scaffold may send the same seed always: the group's sequences are samples all the same, each its own."""
        made = hashlib.blake2b(f"{self.id}/{seed}".encode(), digest_size=8).digest()
        return int.from_bytes(made, "big") >> 1

    def _params(self, call: Call, most: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=most,
            temperature=self.behaviour.temperature,
            top_p=self.behaviour.top_p,
            seed=None if call.seed is None else self._own_seed(call.seed),
            stop_token_ids=self._renderer.stop_token_ids,
            logprobs=0,
        )

    def _turn(self, lead: Sequence[int], opening: Sequence[int], generation: Generation) -> SampledTurn:
        ids = np.asarray(generation.token_ids, np.int32)
        logprobs = np.asarray(generation.logprobs, np.float32)
        if not (
            len(ids) and len(ids) == len(logprobs) == len(generation.versions) and np.isfinite(logprobs).all()
        ):
            raise EngineUnavailable(
                f"the engine returned {len(ids)} tokens, {len(logprobs)} log-probabilities (all finite: "
                f"{bool(np.isfinite(logprobs).all())}) and {len(generation.versions)} versions; such a turn cannot be trained"
            )
        return SampledTurn(
            lead=_ids(lead),
            ids=ids,
            logprobs=logprobs,
            versions=np.asarray(generation.versions, np.int32),
            tail=_ids(self._renderer.tail([*opening, *generation.token_ids])),
            candidates=generation.candidates if any(generation.candidates) else (),
            routing=generation.routing,
        )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What a turn is sampled from: the request's steps, the known path, the tokens of the rest, what is put before the turn
    (`lead`; `opening` is the end of it that is parsed with the turn), and all token ids."""

    asked: list[Step]
    match: Match
    rendered: Rendered
    lead: Sequence[int]
    opening: Sequence[int]
    ids: Ids


def _characters(messages: Sequence[Message]) -> int:
    return sum(
        len(message.text) + sum(len(call.arguments) for call in message.tool_calls) for message in messages
    )


def _ids(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, np.int32)
