"""Whether a process serves: what `/livez` and `/readyz` answer.

Promises:
- a process is ready when its service said so, and no check that it was given finds fault: not merely when it was started;
- what keeps it from being ready is said in words, of the first fault found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Check = Callable[[], str]
"""What is wrong at the moment, in words; empty: nothing. It answers at once: no I/O."""


@dataclass
class Health:
    """Of one process; it begins as not ready. `checks`: of what it needs all the time, as the connection to the broker."""

    waiting: str = "starting"
    checks: list[Check] = field(default_factory=list[Check])

    def ready(self) -> None:
        """The service does its work from now on, or stands by to."""
        self.waiting = ""

    def not_ready(self, reason: str) -> None:
        self.waiting = reason

    def fault(self) -> str:
        """Why the process is not ready; empty: it is."""
        return self.waiting or next((said for check in self.checks if (said := check())), "")
