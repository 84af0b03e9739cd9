"""Contexts that no micro-batch holds: what is left of them, by configuration. Pure.

Promises:
- `reject`: all is left of every context; who judges the group rejects it for its longest;
- `drop`: nothing is left of a context that is too long;
- `truncate`: its last `limit` tokens are left, with the loss that they carry, but for the first of them, which nothing
  predicts. Where its spans are not in the event but in the payload, it cannot be said what is left: it is dropped.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from schemas.payload import ContextMeta


class Fit(NamedTuple):
    """limit: tokens of the longest context that a micro-batch holds."""

    limit: int
    overlong: Literal["reject", "drop", "truncate"]

    def skip(self, context: ContextMeta) -> int | None:
        """Tokens at the context's beginning that are left out; None: all of it."""
        over = context.tokens - self.limit
        if over <= 0 or self.overlong == "reject":
            return 0
        return None if self.overlong == "drop" or context.spilled or not self.limit else over


ANY = Fit(2**62, "reject")
"""No context is too long."""
