"""What a process asks of its object store, by operation. No I/O.

Promises: a retry is no request of its own; an operation is counted once, when it is over, whatever comes of it; the seconds are
those that the caller waited, for a slot and with all tries.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipeline.hosts.histogram import Histogram

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class Requests:
    """Since the start, by operation: get, put, head, list, copy or delete. Belongs to one event loop."""

    seconds: dict[str, Histogram] = field(default_factory=dict[str, Histogram])
    bytes: Counter[str] = field(default_factory=Counter[str])
    retries: Counter[str] = field(default_factory=Counter[str])
    errors: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """By operation, and by what was raised."""

    @contextmanager
    def during(self, operation: str) -> Generator[None]:
        """Counts the operation that it encloses."""
        begun = time.monotonic()
        try:
            yield
        except Exception as error:
            self.errors[operation, type(error).__name__] += 1
            raise
        finally:
            self.seconds.setdefault(operation, Histogram(BUCKETS_S)).observe(time.monotonic() - begun)
