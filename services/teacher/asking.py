"""Asking one teacher: whose fault it is when there is no answer.

Promises:
- a teacher that is away, or set up wrongly, is waited for, for ever; people are told when it goes and when it is back;
- what fails while the teacher scores two tokens, which any can, is the row's fault: at once where it refuses it, after
  `TRIES` tries where it gives no answer;
- no two requests of any process have one name: a server refuses one that it is still at work on, and that is no row's fault.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets

from pipeline.engines.base import EngineRefused, EngineUnavailable
from pipeline.engines.scores import Scores
from schemas.config import Teacher
from services.teacher.engines import Scorer, Tokens

TRIES = 5
LOOK_S = 5.0
"""Between two looks at its health."""
PAUSE_S = 2.0
"""Between two tries of a teacher that answers nobody."""
_SILENT = "it does not answer its health check"


class Unscorable(Exception):
    """The row's fault: asking again cannot help. The message is for people."""


class Asker:
    """One for a teacher, whatever its sources."""

    def __init__(self, teacher: Teacher, scorer: Scorer, logger: logging.Logger) -> None:
        self._teacher, self._scorer, self._logger = teacher, scorer, logger
        self._trouble = ""
        self._names = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count())

    async def ask(self, tokens: Tokens, request_id: str, session_id: str) -> Scores:
        """Scores of the tokens, however long the teacher is away. Raises Unscorable."""
        tries = 0
        while True:
            name = f"{request_id}-{next(self._names)}"
            try:
                scores = await self._scorer.score(tokens, self._teacher.top_k, name, session_id)
            except (EngineRefused, EngineUnavailable) as error:
                if await self._waited():
                    continue
                tries += 1
                if isinstance(error, EngineRefused) or tries == TRIES:
                    raise Unscorable(str(error)) from error
            else:
                self._tell("")
                return scores

    async def watch(self) -> None:
        """Tells when the teacher goes and comes back: whoever waits for an answer may do so for a long time."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not await self._scorer.healthy():
                self._tell(_SILENT)
            elif self._trouble == _SILENT:
                self._tell("")

    async def close(self) -> None:
        await self._scorer.close()

    async def _waited(self) -> bool:
        """Until it scores two tokens; whether it did not at once."""
        waited = False
        while True:
            name = f"probe-{self._teacher.name}-{next(self._names)}"
            try:
                await self._scorer.score((0, 0), self._teacher.top_k, name)
            except (EngineRefused, EngineUnavailable) as error:
                waited = True
                self._tell(str(error))
                await asyncio.sleep(PAUSE_S)
            else:
                self._tell("")
                return waited

    def _tell(self, trouble: str) -> None:
        if bool(trouble) == bool(self._trouble):
            return
        self._trouble = trouble
        if trouble:
            self._logger.warning(
                "teacher %s is away, its sequences wait for it: %s", self._teacher.name, trouble
            )
        else:
            self._logger.info("teacher %s is back", self._teacher.name)
