"""What a host waits for, in seconds, and which resource binds. No I/O.

The measures of a window of `wall_s` seconds, in which tenants lived `tenant_s` seconds together:

| resource | seconds of |
|---|---|
| slots | the host being full while work was pending |
| engine | calls until their first token, or their answer where it comes whole |
| sandbox | sandboxes being started |
| threads | blocking calls until a thread took them |
| cpu | the event loop being late: its core was taken, by others or by tenants that compute or block |
| memory | tasks of the cgroup (or machine) stalled for memory |
| store | requests to the object store, with their tries |
| broker | publishes until they are stored |

The `share` of a resource is its seconds divided by `tenant_s`, which is the part of a tenant's life that it costs; of `slots`,
`cpu` and `memory`, which all tenants wait for at once, divided by `wall_s` of the hosts. Shares are in [0, 1] but where a tenant
waits for several at once.

`binding`: of all but slots the resource with the largest share, if that is at least `BINDS`; else slots, if theirs is: a host
is also full because its tenants wait for something else, and then more slots help nobody; else nothing binds, and work comes
slower than it is done.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

SLOTS = "slots"
OF_HOST = (SLOTS, "cpu", "memory")
RESOURCES = (*OF_HOST, "engine", "sandbox", "threads", "store", "broker")
BINDS = 0.2
WINDOW_S = 30.0


class Waits:
    """Seconds waited since the start, by resource; waits that are not over count with what they have taken so far.

    May be added to from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
        self._begun: dict[str, float] = dict.fromkeys(RESOURCES, 0.0)
        self._seconds: dict[str, float] = dict.fromkeys(RESOURCES, 0.0)

    def add(self, resource: str, seconds: float) -> None:
        """A wait that is over."""
        with self._lock:
            self._done[resource] += 1
            self._seconds[resource] += seconds

    def begin(self, resource: str) -> float:
        """Gives what `end` wants."""
        now = time.monotonic()
        with self._lock:
            self._open[resource] += 1
            self._begun[resource] += now
        return now

    def end(self, resource: str, begun: float) -> None:
        now = time.monotonic()
        with self._lock:
            self._open[resource] -= 1
            self._begun[resource] -= begun
            self._done[resource] += 1
            self._seconds[resource] += now - begun

    @contextmanager
    def waiting(self, resource: str) -> Generator[None]:
        begun = self.begin(resource)
        try:
            yield
        finally:
            self.end(resource, begun)

    def totals(self, now: float | None = None) -> dict[str, float]:
        """Seconds, by resource."""
        now = time.monotonic() if now is None else now
        with self._lock:
            return {
                r: max(0.0, self._seconds[r] + self._open[r] * now - self._begun[r]) if self._open[r] else self._seconds[r]
                for r in RESOURCES
            }  # fmt: skip

    def counts(self) -> dict[str, int]:
        """Waits that are over, by resource."""
        with self._lock:
            return {r: self._done[r] for r in RESOURCES}


OF_TENANT: ContextVar[Waits | None] = ContextVar("waits", default=None)
"""Of the host whose tenant the caller is."""


@contextmanager
def waiting(resource: str) -> Generator[None]:
    """`Waits.waiting` of the host whose tenant the caller is; counts nowhere for others."""
    waits = OF_TENANT.get()
    if waits is None:
        yield
        return
    with waits.waiting(resource):
        yield


@dataclass(frozen=True, slots=True)
class Window:
    """What was waited within the last `wall_s` seconds, by resource; `tenant_s`: seconds that tenants lived in it."""

    wall_s: float
    tenant_s: float
    seconds: Mapping[str, float]

    def __add__(self, other: Window) -> Window:
        """Of two hosts together."""
        seconds = {r: self.seconds.get(r, 0.0) + other.seconds.get(r, 0.0) for r in RESOURCES}
        return Window(self.wall_s + other.wall_s, self.tenant_s + other.tenant_s, seconds)

    def shares(self) -> dict[str, float]:
        """See the module."""
        out: dict[str, float] = {}
        for resource in RESOURCES:
            whole = self.wall_s if resource in OF_HOST else self.tenant_s
            out[resource] = self.seconds.get(resource, 0.0) / whole if whole > 0 else 0.0
        return out


@dataclass
class Recent:
    """The last `length_s` seconds of growing totals."""

    length_s: float = WINDOW_S
    _marks: deque[tuple[float, float, dict[str, float]]] = field(
        default_factory=deque[tuple[float, float, dict[str, float]]]
    )

    def mark(self, now: float, tenant_s: float, totals: Mapping[str, float]) -> Window:
        """The window that ends now; of the first mark an empty one."""
        self._marks.append((now, tenant_s, dict(totals)))
        while len(self._marks) > 2 and now - self._marks[1][0] >= self.length_s:
            self._marks.popleft()
        then, before, seconds = self._marks[0]
        return Window(now - then, tenant_s - before, {r: totals[r] - seconds.get(r, 0.0) for r in totals})


@dataclass(frozen=True, slots=True)
class Binding:
    """`resource` is empty when nothing binds; `where` names the hosts, and is empty when none serves; `share` as in the module."""

    resource: str
    where: str
    share: float

    def why(self) -> str:
        """One line for people."""
        if not self.resource:
            if not self.where:
                return "not known: no host serves"
            return "nothing: the hosts have free slots, and tenants wait for no resource of ours"
        percent = f"{100 * self.share:.0f} %"
        what = {
            "slots": f"{percent} of the time all slots were taken while work was pending: more tenants or hosts",
            "cpu": f"{percent} of the time the event loop was late: more hosts, or cores; logs name who blocks it",
            "memory": f"{percent} of the time something was stalled for memory: fewer tenants, or more memory",
            "engine": f"tenants spend {percent} of their time on calls before the first token: more replicas",
            "sandbox": f"tenants spend {percent} of their time on sandboxes that start",
            "threads": f"tenants spend {percent} of their time on blocking calls without a thread: raise threads",
            "store": f"tenants spend {percent} of their time on the object store",
            "broker": f"tenants spend {percent} of their time on publishes",
        }[self.resource]
        return f"{self.resource} ({self.where}): {what}"


def binding(windows: Mapping[str, Window]) -> Binding:
    """Which resource binds, over hosts of several kinds; see the module. `windows`: of each kind, by what it is called."""
    found = [(share, r, where) for where, w in windows.items() for r, share in w.shares().items()]
    others = [f for f in found if f[1] != SLOTS]
    slots = [f for f in found if f[1] == SLOTS]
    for of in (others, slots):
        share, resource, where = max(of, default=(0.0, "", ""))
        if share >= BINDS:
            return Binding(resource, where, share)
    return Binding("", ", ".join(windows), 0.0)
