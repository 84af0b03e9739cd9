"""What a trial leaves to be looked at, in the object store.

Promises:
- an artefact is written once, under its attempt's key: what is there already is never overwritten;
- the session's secret is in none of them, and none is over `MAX_BYTES`: what was cut is said in its first line;
- a trial does not fail, nor wait long, for an artefact that cannot be kept: it is left out, and logged.
"""

from __future__ import annotations

import asyncio
import logging

from pipeline.capture.secret import without_secrets
from pipeline.store import ObjectStore, StoreError
from schemas.facts import Artefact
from schemas.keys import artefact_key

MAX_BYTES = 1 << 20
MAX_ARTEFACTS = 64
"""Of one attempt; `sequence.verified` holds no more."""
_PATIENCE_S = 5.0


class Stored:
    """The artefacts of one attempt. `kept` are those that the store has, in order."""

    def __init__(
        self, store: ObjectStore, run: str, attempt: str, run_key: bytes, session: str, logger: logging.Logger
    ) -> None:
        self._store = store
        self._run = run
        self._attempt = attempt
        self._run_key = run_key
        self._session = session
        self._logger = logger
        self.kept: list[Artefact] = []

    async def save(self, name: str, data: bytes) -> None:
        """Raises BadName."""
        key = artefact_key(self._run, self._attempt, name)
        if len(self.kept) >= MAX_ARTEFACTS:
            self._left_out(name, f"the attempt has {MAX_ARTEFACTS} already")
            return
        # Latin-1 has a character for every byte: text and bytes are the same here.
        text = without_secrets(data.decode("latin-1"), self._run_key, self._session)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                ref = await self._store.create(key, cut(text.encode("latin-1")))
        except (StoreError, TimeoutError) as error:
            self._left_out(name, str(error) or type(error).__name__)
        else:
            self.kept.append(Artefact(name=name, ref=ref))

    def _left_out(self, name: str, why: str) -> None:
        extra = {"sequence": self._attempt.rpartition("-a")[0]}
        self._logger.warning(
            "artefact %s of attempt %s is left out: %s", name, self._attempt, why, extra=extra
        )


def cut(data: bytes) -> bytes:
    """The end of `data`, `MAX_BYTES` with the line that says what is missing; `data` itself when it is no longer."""
    if len(data) <= MAX_BYTES:
        return data
    line = b"[%d bytes before this were left out]\n"
    # The line's own length is not known before the number of what it stands for: room for a long one.
    kept = MAX_BYTES - len(line) - 20
    return line % (len(data) - kept) + data[-kept:]
