"""A fixed number of seats by shares: the largest remainder method (Hare quota).

Promises, of n seats for m names with positive shares, n >= m:
- the seats add up to n, and every name has at least one: a name gets that one where its quota is less;
- a name's seats are otherwise its quota of what those leave, rounded down or up;
- of two names the one with the larger share never has fewer; ties go to the name that is given first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction


def largest_remainder(seats: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Seats of each name, in the order given. Raises ValueError on fewer seats than names, or on a share that is not positive.

    Hare quotas, then largest remainders; exact in the shares as they are written in decimals.
    """
    if seats < len(shares):
        raise ValueError(f"{seats} seats for {len(shares)} names: each needs one")
    wrong = [name for name, share in shares.items() if not 0 < share < math.inf]
    if wrong:
        raise ValueError(f"the share of {wrong[0]!r} is {shares[wrong[0]]}, and must be a number above 0")
    exact = {name: Fraction(str(share)) for name, share in shares.items()}
    small: dict[str, int] = {}
    while True:
        rest = {name: share for name, share in exact.items() if name not in small}
        left, whole = seats - len(small), sum(rest.values())
        under = [name for name, share in rest.items() if left * share < whole]
        if not under:
            break
        small.update(dict.fromkeys(under, 1))
    quotas = {name: left * share / whole for name, share in rest.items()}
    given = {name: int(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: given[name] - quotas[name])
    for name in by_remainder[: left - sum(given.values())]:
        given[name] += 1
    return {name: small.get(name) or given[name] for name in shares}
