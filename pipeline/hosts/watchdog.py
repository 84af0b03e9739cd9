"""How late an event loop is, always; and who holds it up, while he does.

Promises:
- `lag_s` has the loop's lateness at twenty moments a second, of the last minute: what any callback waited;
- a tenant that keeps the loop from running for over `limit_s` is logged once, while it blocks, with its name and Python
  stack, and once more with the whole time when it is over; both from a thread, which needs the loop for nothing;
- it works on asyncio's loop and on uvloop's, and costs a callback and a thread's wake-up every 50 ms.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import Counter, deque
from types import FrameType

from pipeline.hosts import tenant

_LOG = logging.getLogger("packtrain.host")
BEAT_S = 0.05
LIMIT_S = 0.25
_KEPT = 1200
_FRAMES = 12
UNKNOWN = "none"
"""What a block is counted under that no tenant's task is at work in."""


class Watchdog:
    """Of the running loop; see the module. `blocks` counts by tenant kind, `late_s` is the sum of all lateness."""

    def __init__(self, limit_s: float = LIMIT_S, logger: logging.Logger = _LOG) -> None:
        self.limit_s = limit_s
        self.blocks: Counter[str] = Counter()
        self.late_s = 0.0
        self.lags: deque[float] = deque(maxlen=_KEPT)
        self._logger = logger
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._stop = threading.Event()
        self._due = self._held_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Called on the loop, as `stop` is."""
        self._due = time.monotonic() + BEAT_S
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread.is_alive():
            self._thread.join()

    def lag_s(self, q: float) -> float:
        """The q-quantile of the last minute's lateness, seconds; the open block, if there is one, is among it."""
        known = sorted([*self.lags, *_moments(max(0.0, time.monotonic() - self._due))][-_KEPT:])
        return known[min(len(known) - 1, int(q * len(known)))]

    def _beat(self) -> None:
        now = time.monotonic()
        late = max(0.0, now - self._due)
        self.lags.extend(_moments(late))
        self.late_s += late
        if late > self.limit_s:
            self._held_s = late
        self._due = now + BEAT_S
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        told: float | None = None
        who = UNKNOWN
        while not self._stop.wait(min(BEAT_S, self.limit_s / 4)):
            due = self._due
            if told is not None and due != told:
                self._logger.warning(
                    "the event loop runs again, %s had held it for %.2f s", who, self._held_s
                )
                told = None
            if told is None and time.monotonic() - due > self.limit_s:
                told, who = due, self._tell(time.monotonic() - due)

    def _tell(self, late_s: float) -> str:
        at_work = tenant.of_task(asyncio.current_task(self._loop))
        frame = sys._current_frames().get(self._thread_id)  # pyright: ignore[reportPrivateUsage]  # no other way
        kind, who = (at_work.kind, at_work.name) if at_work else (UNKNOWN, "no tenant")
        self.blocks[kind] += 1
        self._logger.warning(
            "the event loop is blocked for %.2f s by %s, in\n%s",
            late_s,
            who,
            _stack(frame),
            extra={"tenant": who},
        )
        return who


def _moments(late_s: float) -> list[float]:
    """The lateness at each beat of a block: of a long one all of them count, and not its end alone."""
    return [late_s - BEAT_S * number for number in range(min(_KEPT, 1 + int(late_s / BEAT_S)))]


def _stack(frame: FrameType | None) -> str:
    """The innermost frames, as a traceback shows them."""
    return "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip() if frame is not None else "(no frame)"
