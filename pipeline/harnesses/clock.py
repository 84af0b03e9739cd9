"""How long each phase of a trial may take, as a function of what is left of it, and how long it took."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator, MutableMapping
from dataclasses import dataclass

from pipeline.harnesses.base import Phases
from pipeline.harnesses.environments.folders import FolderTask
from pipeline.hosts.waits import waiting

START_S = 60.0
VERIFY_SHARE = 0.2
"""Of what is left, kept for the verifier where neither the source nor the task says how long it may take."""
_VERIFY_MOST = 0.5
"""Of what is left: a task's limit for its verifier may be longer than the whole trial."""
_CLOSE_SHARE, _CLOSE_MOST_S = 0.05, 2.0
_SLACK_SHARE, _SLACK_MOST_S = 0.1, 6.0


@dataclass(frozen=True, slots=True)
class Clock:
    """The limits of a trial's phases. Each is a function of the seconds that are left when the phase begins, until the trial
    is to be over. Pure.

    A phase's limit is the source's, else the task's, else what is left. The source's is the run's owner's word, so it may
    be longer than the task's; nothing is longer than what is left.
    """

    phases: Phases
    task: FolderTask

    def start_s(self, left: float) -> float:
        limit = _first(self.phases.start_s, self.task.start_s, START_S)
        return max(0.0, min(limit, left - self.reserve_s(left)))

    def reserve_s(self, left: float) -> float:
        """What is kept for the verification: one run's limit, at most half of what is left; and for the end of the workspace."""
        limit = _first(self.phases.verify_s, self.task.verify_s, VERIFY_SHARE * left)
        return min(limit, _VERIFY_MOST * left) + close_s(left)

    def slack_s(self, left: float) -> float:
        """What is kept for the agent's end: it saves its log, and is stopped, and what it left running is ended."""
        return min(_SLACK_MOST_S, _SLACK_SHARE * (left - self.reserve_s(left)))

    def agent_s(self, left: float) -> float:
        """The agent's seconds; slack and reserve are outside them."""
        limit = _first(self.phases.agent_s, self.task.agent_s, math.inf)
        return max(0.0, min(limit, left - self.reserve_s(left) - self.slack_s(left)))

    def verify_s(self, left: float) -> float:
        """One run's."""
        return max(0.0, min(_first(self.phases.verify_s, self.task.verify_s, math.inf), left))


def close_s(left: float) -> float:
    """Seconds that the end of a workspace has."""
    return min(_CLOSE_MOST_S, _CLOSE_SHARE * left)


def _first(source: float, task: float, default: float) -> float:
    if source < math.inf:
        return source
    return task if task > 0 else default


@contextlib.contextmanager
def clocked(took: MutableMapping[str, float], phase: str) -> Generator[None]:
    """Notes the phase's seconds, however it ends; those of the start are what the host's tenants wait for sandboxes."""
    began = time.monotonic()
    try:
        with waiting("sandbox") if phase == "start" else contextlib.nullcontext():
            yield
    finally:
        took[phase] = took.get(phase, 0.0) + time.monotonic() - began
