"""One engine out of one or several replicas: whom to ask, and how a generation goes on when one is lost.

Promises:
- a session stays on its replica, which has its prefix cached, while that is up; else it goes to the one with least in
  flight; a replica that drains is given no session that it has not;
- a generation is continued from its own tokens, whatever interrupted it: a weight update, a connection that broke, a
  replica that died or stopped answering; tokens that came keep their log-probabilities and versions, and a watcher sees
  each once;
- trouble that is not the request's fault is retried, elsewhere at once and here with growing pauses, until the deadline,
  and then is EngineUnavailable with the last reason.

With several replicas answers are streamed, so that what a dying one has sampled is not lost with it.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import OrderedDict
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from pipeline.engines.base import EngineUnavailable, Generation, ImageItem, Watch
from pipeline.engines.progress import Ask, Progress, Prompt
from pipeline.engines.scores import Scores
from pipeline.engines.transport import Broken
from pipeline.engines.wire import PauseMode, SamplingParams

HEALTH_S = 1.0
"""Between two rounds of health checks, where there are several replicas."""
_HEALTH_LIMIT_S = 5.0
_MISSES = 2
"""Health checks that fail in a row until a replica is down."""
PAUSED_S = 60.0
"""How long a replica may be paused, for new weights, while another is not: after that it counts as down."""
_SESSIONS = 65_536
"""Sessions whose replica is remembered; the one that was silent longest is forgotten, and loses its cached prefix."""
_BACKOFF_S = (0.1, 5.0)


class Replica(Protocol):
    """One server. `sample` puts tokens into the progress as they come, and raises Broken when the rest may be had
    elsewhere or later."""

    url: str

    async def sample(
        self, ask: Ask, progress: Progress, watch: Watch | None, deadline: float
    ) -> Literal["stop", "length", "abort"]: ...

    async def score(
        self,
        token_ids: Prompt,
        top_k: int,
        request_id: str,
        session_id: str,
        deadline: float,
    ) -> Scores: ...

    async def version(self) -> int: ...

    async def healthy(self, within: float = 5.0) -> bool: ...

    async def paused(self, within: float = 5.0) -> bool: ...

    async def update(self, directory: str, version: int, mode: PauseMode = "abort") -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class View:
    """What a choice is made on. `sessions`: how many are bound to it."""

    up: bool = True
    draining: bool = False
    in_flight: int = 0
    sessions: int = 0


def choose(views: Sequence[View], bound: int | None, tried: Collection[int] = ()) -> int | None:
    """The replica for a request: the session's own while it is up, else the least loaded of the best that are left.

    bound: the replica that the session is on. tried: those that failed this request just now. None when all did. A
    replica that drains is better than one that is down, and one that is down better than none: it may be up again.
    """
    if bound is not None and bound not in tried and views[bound].up:
        return bound
    left = [i for i in range(len(views)) if i not in tried]
    return min(left, key=lambda i: (*_worth(views[i]), i), default=None)


def _worth(view: View) -> tuple[int, ...]:
    return (not view.up, view.draining, view.in_flight, view.sessions)


@dataclass(slots=True, eq=False)
class _State:
    replica: Replica
    misses: int = 0
    paused_since: float | None = None
    stuck: bool = False
    draining: bool = False
    in_flight: int = 0
    sessions: int = 0
    parts: set[asyncio.Future[Literal["stop", "length", "abort"]]] = field(
        default_factory=set[asyncio.Future[Literal["stop", "length", "abort"]]]
    )

    @property
    def up(self) -> bool:
        return self.misses < _MISSES and not self.stuck


@dataclass(slots=True)
class _Trying:
    """Whom one call has asked in vain: each replica once, then a pause, until the deadline."""

    session_id: str
    deadline: float
    tried: set[int] = field(default_factory=set[int])
    waits: int = 0
    last: str = "nothing was tried"
    after: float = 0.0


class Replicas:
    """`base.Engine` over replicas that serve one policy. Use as an async context manager, or `close` it.

    timeout: seconds that one `generate` may take, retries and continuations included, unless the call gives its own.
    """

    def __init__(self, replicas: Sequence[Replica], timeout: float = 600.0) -> None:
        if not replicas:
            raise ValueError("an engine has at least one replica")
        self._states = [_State(replica) for replica in replicas]
        self._timeout = timeout
        self._bound: OrderedDict[str, int] = OrderedDict()
        self._checking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait([self._checking])
        for state in self._states:
            await state.replica.close()

    async def generate(
        self,
        token_ids: Prompt,
        params: SamplingParams,
        request_id: str,
        session_id: str,
        *,
        watch: Watch | None = None,
        images: Sequence[ImageItem] = (),
        routed_from: int = 0,
        within: float | None = None,
    ) -> Generation:
        """See `base.Engine.generate`. `request_id` is sent with a number behind it when the generation goes on."""
        deadline = time.monotonic() + (self._timeout if within is None else within)
        progress = Progress(token_ids, params, routed_from)
        stream = watch is not None or len(self._states) > 1
        trying = _Trying(session_id, deadline)
        requests = empty = 0
        away, failing_since = 0.0, math.inf
        while True:
            state = await self._next(trying)
            asked_at = time.monotonic()
            name = request_id if requests == 0 else f"{request_id}-r{requests}"
            before, requests = len(progress.token_ids), requests + 1
            ask = progress.ask(name, session_id, images, stream)
            try:
                reason = await self._sample(state, ask, progress, watch, deadline)
            except (Broken, EngineUnavailable) as error:
                self._failed(trying, state, error)
                if len(progress.token_ids) == before:
                    failing_since = min(failing_since, asked_at)
                    continue
                trying.waits, reason = 0, "abort"
            else:
                trying.tried.clear()
            away, failing_since = away + max(0.0, asked_at - failing_since), math.inf
            if reason != "abort":
                return replace(progress.generation(reason), away_s=away)
            if progress.full() or progress.stopped():
                return replace(progress.generation("length" if progress.full() else "stop"), away_s=away)
            progress.resumed += 1
            if len(progress.token_ids) == before:
                # Aborted before its first token: give the engine time to finish its update.
                empty += 1
                await asyncio.sleep(min(0.05 * empty, 1.0))

    async def score(
        self,
        token_ids: Prompt,
        top_k: int,
        request_id: str,
        session_id: str = "",
        within: float | None = None,
    ) -> Scores:
        """Log-probabilities of a sequence, from one replica. Raises EngineRefused, EngineUnavailable. Asked for anew, they have
        a number behind `request_id`: a replica may still be at the first."""
        deadline = time.monotonic() + (self._timeout if within is None else within)
        trying = _Trying(session_id, deadline)
        name, number = request_id, 0
        while True:
            state = await self._next(trying)
            state.in_flight += 1
            try:
                return await state.replica.score(token_ids, top_k, name, session_id, deadline)
            except (Broken, EngineUnavailable) as error:
                self._failed(trying, state, error)
            finally:
                state.in_flight -= 1
            number += 1
            name = f"{request_id}-r{number}"

    async def version(self) -> int:
        """The oldest weight version of the replicas that are up. Raises EngineUnavailable when none says its."""
        up = [state for state in self._states if state.up] or self._states
        found = await asyncio.gather(*(state.replica.version() for state in up), return_exceptions=True)
        versions = [version for version in found if isinstance(version, int)]
        if versions:
            return min(versions)
        for problem in found:
            if isinstance(problem, BaseException):
                raise problem
        raise AssertionError("there is at least one replica")

    async def healthy(self) -> bool:
        """Whether a replica answers its health check."""
        checks = await asyncio.gather(*(state.replica.healthy() for state in self._states))
        return any(checks)

    def drain(self, url: str, draining: bool = True) -> None:
        """Give a replica no session that it has not, or (False) sessions again. Raises KeyError for an unknown url."""
        for state in self._states:
            if state.replica.url == url.rstrip("/"):
                state.draining = draining
                return
        raise KeyError(f"no replica {url!r}; replicas: {[state.replica.url for state in self._states]}")

    def views(self) -> dict[str, View]:
        """The replicas as they stand, by url."""
        return {state.replica.url: _view(state) for state in self._states}

    async def _sample(
        self, state: _State, ask: Ask, progress: Progress, watch: Watch | None, deadline: float
    ) -> Literal["stop", "length", "abort"]:
        state.in_flight += 1
        part = None
        try:
            sampling = state.replica.sample(ask, progress, watch, deadline)
            if len(self._states) == 1:
                return await sampling
            part = asyncio.ensure_future(sampling)
            state.parts.add(part)
            return await part
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if part is not None and part.cancelled() and not (task and task.cancelling()):
                raise Broken("stopped answering its health checks, or stays paused") from None
            raise
        finally:
            state.in_flight -= 1
            if part is not None:
                state.parts.discard(part)

    async def _next(self, trying: _Trying) -> _State:
        """Whom to ask next. Raises EngineUnavailable when a pause would pass the deadline."""
        index = self._choose(trying.session_id, trying.tried)
        if index is None:
            first, most = _BACKOFF_S
            most = min(most, first * 2 ** min(trying.waits, 16))
            pause = trying.after + random.uniform(0, most)  # noqa: S311  # jitter
            if time.monotonic() + pause >= trying.deadline:
                urls = ", ".join(state.replica.url for state in self._states)
                raise EngineUnavailable(f"{urls}: no answer before the deadline; last: {trying.last}")
            await asyncio.sleep(pause)
            trying.tried.clear()
            trying.waits, trying.after = trying.waits + 1, 0.0
            index = self._choose(trying.session_id, ())
            assert index is not None
        return self._states[index]

    def _failed(self, trying: _Trying, state: _State, error: Broken | EngineUnavailable) -> None:
        """Notes a failure. Raises one that blames the deployment when no other replica is left to try: waiting helps it
        nothing."""
        trying.tried.add(self._states.index(state))
        trying.last = f"{state.replica.url}: {error}"
        if isinstance(error, EngineUnavailable):
            if len(trying.tried) == len(self._states):
                raise error
            return
        trying.after = max(trying.after, error.after)
        if error.gone:
            state.misses = max(state.misses, _MISSES)

    def _choose(self, session_id: str, tried: Collection[int]) -> int | None:
        if len(self._states) == 1:
            return None if tried else 0
        if self._checking is None:
            self._checking = asyncio.create_task(self._check(), name="engine-health")
        bound = self._bound.get(session_id)
        index = choose([_view(state) for state in self._states], bound, tried)
        if index is not None:
            if bound != index:
                if bound is not None:
                    self._states[bound].sessions -= 1
                self._states[index].sessions += 1
                self._bound[session_id] = index
            self._bound.move_to_end(session_id)
            if len(self._bound) > _SESSIONS:
                _, silent = self._bound.popitem(last=False)
                self._states[silent].sessions -= 1
        return index

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            replicas = [state.replica for state in self._states]
            healthy = await _each(replica.healthy(_HEALTH_LIMIT_S) for replica in replicas)
            paused = await _each(replica.paused(_HEALTH_LIMIT_S) for replica in replicas)
            # All are paused while all get new weights; one that stays so alone was not able to load them.
            alone = any(good and not still for good, still in zip(healthy, paused, strict=True))
            for state, good, still in zip(self._states, healthy, paused, strict=True):
                state.misses = 0 if good else state.misses + 1
                state.paused_since = (state.paused_since or time.monotonic()) if still else None
                since = state.paused_since
                state.stuck = alone and since is not None and time.monotonic() - since >= PAUSED_S
                if not state.up:
                    # A host that vanished closes no connection: what waits on it goes elsewhere.
                    for part in state.parts:
                        part.cancel()


async def _each(checks: Iterable[Coroutine[Any, Any, bool]]) -> list[bool]:
    """What each says. One that raises says no: whatever it is, it must not end the looking after the others."""
    return [found is True for found in await asyncio.gather(*checks, return_exceptions=True)]


def _view(state: _State) -> View:
    return View(state.up, state.draining, state.in_flight, state.sessions)
