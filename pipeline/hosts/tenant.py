"""Who is at work: the tenant of every task and of every log line, and a border around what its code raises.

Promises:
- `current()` is the tenant in whose context the caller runs, in its tasks and in threads that were given its context;
- `ids()` are those of the fact that the caller's work is on, as its log lines carry them, in the same contexts;
- `of_task` tells it of any task of a loop with `install`, from any thread;
- on such a loop `SystemExit` and `KeyboardInterrupt` of a tenant's task are that task's failure (`TenantExited`): asyncio's own
  would end the loop, and with it every other tenant.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from schemas.facts import Fact

ID_FIELDS = ("sample", "sequence", "attempt", "step")
"""Of facts, and of the log lines of who works on one."""


class TenantExited(Exception):
    """A tenant's code tried to end the process."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """`name` is a sequence or an attempt, `kind` what it is counted under: its source."""

    name: str
    kind: str


_CURRENT: ContextVar[Tenant | None] = ContextVar("tenant", default=None)
_IDS: ContextVar[Mapping[str, str | int] | None] = ContextVar("ids", default=None)
_TASKS: weakref.WeakKeyDictionary[asyncio.Future[Any], Tenant] = weakref.WeakKeyDictionary()
_Factory = Callable[..., "asyncio.Future[Any]"]


def current() -> Tenant | None:
    return _CURRENT.get()


def ids() -> Mapping[str, str | int]:
    return _IDS.get() or {}


def work_on(fact: Fact) -> None:
    """The running task, and all that it starts from now on, works on this fact: its ids, as many as it has of `ID_FIELDS`."""
    _IDS.set({name: value for name in ID_FIELDS if (value := getattr(fact, name, None)) is not None})


def enter(tenant: Tenant) -> None:
    """The running task, and all that it starts from now on, is this tenant's."""
    _CURRENT.set(tenant)
    task = asyncio.current_task()
    if task is not None:
        _TASKS[task] = tenant


def of_task(task: asyncio.Future[Any] | None) -> Tenant | None:
    return None if task is None else _TASKS.get(task)


def install(loop: asyncio.AbstractEventLoop) -> None:
    """Makes the loop's tasks known by their tenants, from now on; does nothing the second time."""
    before: Any = loop.get_task_factory()
    if not (isinstance(before, functools.partial) and before.func is _make):
        factory: Any = functools.partial(_make, before)
        loop.set_task_factory(factory)


def _make(
    before: _Factory | None, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Future[Any]:
    # Python looks into the context that it is given, where it is, and not into the one that runs.
    context = options.get("context")
    tenant = _CURRENT.get() if context is None else context.get(_CURRENT)
    if tenant is not None:
        coro = _Contained(coro, tenant)
    task = asyncio.Task(coro, loop=loop, **options) if before is None else before(loop, coro, **options)
    if tenant is not None:
        _TASKS[task] = tenant
    return task


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine that may not end the loop. No `async def` around it: one that is cancelled before it began would warn that
    what is in it was never awaited."""

    def __init__(self, coro: Coroutine[Any, Any, Any], tenant: Tenant) -> None:
        self._coro = coro
        self._tenant = tenant

    def send(self, value: Any) -> Any:
        try:
            return self._coro.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise self._exited(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._coro.throw(*error)
        except (SystemExit, KeyboardInterrupt) as raised:
            raise self._exited(raised) from raised

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()

    def __getattr__(self, name: str) -> Any:
        # Its frame and its name, for whoever prints the task.
        return getattr(self._coro, name)

    def _exited(self, error: BaseException) -> TenantExited:
        return TenantExited(f"a task of {self._tenant.name} raised {error!r}")
