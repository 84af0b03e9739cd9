"""The end of what a program writes to a pipe, read on the event loop."""

from __future__ import annotations

import asyncio
import os

CHUNK = 1 << 16
_PAUSE_S = 0.02
"""Between two chunks of what nobody wants: a program that writes without end is held back, and the event loop is not."""


class Tail:
    """Keeps the last `most` bytes; takes the descriptor over."""

    def __init__(self, fd: int, most: int) -> None:
        self._fd = fd
        self._most = most
        self._stopped = False
        self._pause: asyncio.TimerHandle | None = None
        self.closed = False
        self.kept = bytearray()
        os.set_blocking(fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        """Takes one chunk; whether there may be more at once."""
        try:
            chunk = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.close()
            return False
        if self._stopped:
            self._loop.remove_reader(self._fd)
            self._pause = self._loop.call_later(_PAUSE_S, self._loop.add_reader, self._fd, self._read)
            return True
        self.kept += chunk
        if len(self.kept) > 2 * self._most + CHUNK:
            self._cut()
        return True

    def _cut(self) -> None:
        del self.kept[: max(0, len(self.kept) - self._most)]

    def stop(self) -> None:
        """Takes what is there now, which is all that a program wrote that has ended; what comes later is discarded."""
        # Bounded, since what lives on may write without end.
        for _ in range(64):
            if self.closed or not self._read():
                break
        self._stopped = True
        self._cut()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self._pause is not None:
                self._pause.cancel()
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
