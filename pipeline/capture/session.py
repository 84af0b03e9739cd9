"""One tenant of the capture proxy: answers model calls from the engine and records what was sampled.

Promises:
- a request with the same body gets the recorded answer, also while the first is under way; a failed one is tried anew;
- different requests at once on one session are independent;
- the answer is generated and recorded whether or not the client is still there;
- a session's sampling parameters are its behaviour's, whatever the agent asks for: it may only ask for fewer tokens;
- no more than `behaviour.max_turns` turns are sampled and no context grows over `max_context`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeline.capture.dialogue import Dialogue, answer_key_of, render_steps, steps
from pipeline.capture.messages import ToolCall
from pipeline.capture.renderer import ChatMLRenderer
from pipeline.capture.tree import ContextTree, Export, SampledTurn
from pipeline.engines.client import EngineUnavailable, Generation
from pipeline.engines.wire import SamplingParams
from schemas.config import Behaviour


class TurnLimit(Exception):
    """The agent wants more turns than its behaviour allows."""


class ContextOverflow(Exception):
    """The dialogue leaves no room for a sampled token."""


class SessionClosed(Exception):
    """The session is over."""


class Engine(Protocol):
    """The part of `EngineClient` that a session needs."""

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, session_id: str
    ) -> Generation: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A sampled turn as it is returned. `length` is whether it was cut at a limit; counts are in tokens."""

    number: int
    content: str
    tool_calls: tuple[ToolCall, ...]
    length: bool
    malformed: int
    prompt_tokens: int
    completion_tokens: int


class Session:
    def __init__(
        self, id: str, behaviour: Behaviour, max_context: int, renderer: ChatMLRenderer, engine: Engine
    ) -> None:
        self.id = id
        self.behaviour = behaviour
        self.max_context = max_context
        self._renderer = renderer
        self._engine = engine
        self._tree = ContextTree()
        self._answers: dict[str, asyncio.Task[Answer]] = {}
        self._turns = 0
        self._requests = itertools.count(1)
        self._last: Answer | None = None
        self._trouble = False
        self._left = False
        self.closed = False

    @property
    def turns(self) -> int:
        """Turns sampled, or being sampled."""
        return self._turns

    @property
    def owed(self) -> bool:
        """Whether the engine owes an answer: a model call is under way, the last to end met the engine's trouble, or the
        client of the newest call went before it had its answer, whether or not that was sampled since."""
        return self._trouble or self._left or any(not task.done() for task in self._answers.values())

    @property
    def last(self) -> Answer | None:
        """The turn that was recorded last."""
        return self._last

    async def complete(self, digest: str, dialogue: Dialogue, max_tokens: int | None) -> Answer:
        """Answers one model call; `digest` identifies the request's body.

        Raises TurnLimit, ContextOverflow, SessionClosed, and the engine client's EngineUnavailable and EngineRefused.
        """
        if self.closed:
            raise SessionClosed(f"session {self.id} is closed")
        self._left = False
        task = self._answers.get(digest)
        if task is None:
            task = asyncio.create_task(self._sample(dialogue, max_tokens))
            self._answers[digest] = task
            task.add_done_callback(lambda done: self._settle(digest, done))
        try:
            # A client that goes away cancels its wait, never the work.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self.closed:
                raise SessionClosed(f"session {self.id} is closed") from None
            self._left = True
            raise

    async def close(self) -> None:
        """Ends what is under way; what was recorded stays."""
        self.closed = True
        pending = [task for task in self._answers.values() if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def export(self) -> Export:
        """See `ContextTree.export`."""
        return self._tree.export()

    def _settle(self, digest: str, task: asyncio.Task[Answer]) -> None:
        # Looking at the exception also marks it as seen, when its client has gone.
        error = None if task.cancelled() else task.exception()
        self._trouble = isinstance(error, EngineUnavailable)
        if task.cancelled() or error is not None:
            self._answers.pop(digest, None)

    async def _sample(self, dialogue: Dialogue, max_tokens: int | None) -> Answer:
        if self._turns >= self.behaviour.max_turns:
            raise TurnLimit(f"{self._turns} turns were sampled, the limit is {self.behaviour.max_turns}")
        # Counted before the first await, so that requests at once cannot pass the limit together.
        self._turns += 1
        try:
            return await self._sample_turn(dialogue, max_tokens)
        except BaseException:
            self._turns -= 1
            raise

    async def _sample_turn(self, dialogue: Dialogue, max_tokens: int | None) -> Answer:
        asked = steps(dialogue)
        match = self._tree.match(asked)
        # On a thread: whatever an agent sends, in texts, tools or arguments, is not tokenized in other tenants' time.
        rendered = await asyncio.to_thread(render_steps, self._renderer, dialogue, match.steps)
        lead = self._renderer.generation_prompt()
        prompt = self._tree.prompt(match, rendered, lead)
        room = self.max_context - len(prompt)
        if room < 1:
            raise ContextOverflow(
                f"the dialogue has {len(prompt)} tokens, the context holds {self.max_context} with at least one to sample"
            )
        params = SamplingParams(
            max_tokens=min(self.behaviour.max_tokens, room, max_tokens or room),
            temperature=self.behaviour.temperature,
            top_p=self.behaviour.top_p,
            stop_token_ids=self._renderer.stop_token_ids,
            logprobs=0,
        )
        request_id = f"{self.id}-r{next(self._requests)}"
        generation = await self._engine.generate(prompt, params, request_id, self.id)
        turn = self._turn(lead, generation)
        parsed = self._renderer.parse(generation.token_ids)
        calls = tuple(
            ToolCall(self._call_id(i), call.name, call.arguments) for i, call in enumerate(parsed.tool_calls)
        )
        node = self._tree.add(match, asked, rendered, turn, answer_key_of(parsed.content, calls))
        answer = Answer(
            number=node.number,
            content=parsed.content,
            tool_calls=calls,
            length=generation.finish_reason == "length",
            malformed=parsed.malformed,
            prompt_tokens=len(prompt),
            completion_tokens=len(turn.ids),
        )
        self._last = answer
        return answer

    def _turn(self, lead: Sequence[int], generation: Generation) -> SampledTurn:
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
            lead=np.asarray(lead, np.int32),
            ids=ids,
            logprobs=logprobs,
            versions=np.asarray(generation.versions, np.int32),
            tail=np.asarray(self._renderer.close_turn(generation.token_ids), np.int32),
        )

    def _call_id(self, index: int) -> str:
        """Unique in the run and the same for the same node of the same session."""
        made = hashlib.sha256(f"{self.id}/{self._tree.next_number}/{index}".encode()).hexdigest()
        return f"call_{made[:24]}"
