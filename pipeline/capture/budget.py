"""What a session may ask and sample still: requests, turns, tokens, time.

Promises: calls at once do not pass a limit together; none is cut short for tokens that another might have sampled and did
not: where what is left does not cover all that is under way, they go one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from schemas.config import Behaviour

REQUESTS_A_TURN, MORE_REQUESTS = 20, 100
"""Of a session, repetitions of recorded and failed calls among them: an agent that asks the same for ever has an end."""


class ContextOverflow(Exception):
    """The dialogue leaves no room for a sampled token."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            f"the dialogue has {prompt_tokens} tokens, the context holds {limit} with at least one to sample"
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class TurnLimit(Exception):
    """The session's budget is spent; `code` says which part of it: max_requests, max_turns, max_sampled_tokens,
    max_wall_time; early_stop and rule_failed: `pipeline.capture.judging`."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Budget:
    def __init__(self, behaviour: Behaviour, deadline: float | None) -> None:
        """`deadline` is a time of the running loop."""
        self._max_turns = behaviour.max_turns
        self._max_tokens = behaviour.max_session_tokens
        self._deadline = deadline
        self._sampled = 0
        self._promised = 0
        self._freed = asyncio.Event()
        self._requests = 0
        self.turns = 0

    def take_request(self) -> None:
        """Counts a request, also one whose answer is recorded. Raises TurnLimit."""
        most = REQUESTS_A_TURN * self._max_turns + MORE_REQUESTS
        if self._requests >= most:
            raise TurnLimit(
                f"{self._requests} requests came, the limit with {self._max_turns} turns is {most}",
                "max_requests",
            )
        self._check_time()
        self._requests += 1

    def take_turn(self) -> None:
        """Counts a turn; one that comes to nothing is given back to `turns`. Raises TurnLimit."""
        if self.turns >= self._max_turns:
            raise TurnLimit(f"{self.turns} turns were sampled, the limit is {self._max_turns}", "max_turns")
        self._check()
        self.turns += 1

    def left_s(self) -> float | None:
        """Seconds; None without a deadline."""
        return None if self._deadline is None else self._deadline - asyncio.get_running_loop().time()

    @contextlib.asynccontextmanager
    async def tokens(self, asked: int) -> AsyncGenerator[int, None]:
        """How many of `asked` tokens a call may sample, while it samples them. Raises TurnLimit."""
        if not self._max_tokens:
            yield asked
            return
        while self._promised and min(asked, self._max_tokens - self._sampled) > self._free():
            # Each of those that are under way ends within its own time.
            await self._freed.wait()
        self._check()
        granted = min(asked, self._free())
        self._promised += granted
        try:
            yield granted
        finally:
            self._promised -= granted
            self._freed.set()
            self._freed = asyncio.Event()

    def spend(self, tokens: int) -> None:
        """Counts sampled tokens; inside `tokens`."""
        self._sampled += tokens

    def _free(self) -> int:
        return self._max_tokens - self._sampled - self._promised

    def _check(self) -> None:
        if 0 < self._max_tokens <= self._sampled:
            raise TurnLimit(
                f"{self._sampled} tokens were sampled, the limit is {self._max_tokens}", "max_sampled_tokens"
            )
        self._check_time()

    def _check_time(self) -> None:
        if (left := self.left_s()) is not None and left <= 0:
            raise TurnLimit("the session's time is over", "max_wall_time")
