"""A Python grader: other people's function, which may block, hang, or raise anything.

Promises:
- a plain function runs on a thread of its own, and what it yields is taken there, and blocks nobody; a coroutine function runs on the
  service's loop, and must not block;
- a call that is given up goes on, as a thread cannot be ended: it is counted in `hung`, and from `MOST_HUNG` of them on no other is
  begun before one has returned. The process ends under them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

from pipeline.graders.base import GraderFailed, Material, Need
from pipeline.harnesses.blocking import on_thread
from pipeline.signal.grading import Graded, Unusable, understood

_LOG = logging.getLogger("packtrain.grader")
MOST_HUNG = 64


class Function:
    """Graders of module:function, module:Class and entry points."""

    def __init__(self, kind: str, function: Callable[..., Any]) -> None:
        self._kind = kind
        self._function = function
        # Whoever does not say (a builtin) is given the group alone.
        with_text = len(_positional(function)) > 1
        self.needs: frozenset[Need] = frozenset({"transcripts"}) if with_text else frozenset()
        self._waits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  # not whether it can be called, but what calls it
        )
        self._calls = set[object]()
        self._waited = 0

    @property
    def hung(self) -> int:
        """Calls that go on though nobody waits for them."""
        return len(self._calls) - self._waited

    async def judge(self, group: Material) -> tuple[Graded, float]:
        given = (group.completed, group.transcripts) if self.needs else (group.completed,)
        try:
            if self._waits:
                return understood(group.completed, await self._function(*given)), 0.0
            return await self._threaded(lambda: understood(group.completed, self._function(*given))), 0.0
        except Unusable as error:
            raise GraderFailed(str(error)) from None
        # Whatever a plug-in raises; SystemExit would end the service.
        except (Exception, SystemExit) as error:
            if isinstance(error, GraderFailed):
                raise
            raise GraderFailed(f"{type(error).__name__}: {error}") from error

    async def _threaded(self, grade: Callable[[], Graded]) -> Graded:
        if self.hung >= MOST_HUNG:
            raise GraderFailed(f"{self.hung} calls of {self._kind} hang: give what it waits for a time limit")
        key = object()

        def call() -> Graded:
            try:
                return grade()
            finally:
                self._calls.discard(key)

        self._calls.add(key)
        self._waited += 1
        try:
            return await on_thread(call)
        except asyncio.CancelledError:
            _LOG.warning("a call of %s is given up and goes on, as do %d others", self._kind, self.hung)
            raise
        finally:
            # Returned, it has discarded its key; given up, it is from here on counted as hung.
            self._waited -= 1

    async def close(self) -> None:
        """Hung calls end with the process."""


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
