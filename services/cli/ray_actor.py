"""A rollout host as a Ray actor: the service that `packtrain service` runs, in the actor's process. Imports no Ray.

Promises:
- one actor is one host, with an event loop of its own; tenants are no actors;
- a secret is never written to a disk of the node: it is in the memory of the actor's process alone, and gone with it,
  however that ends;
- journals outlive the process, so that the host that takes its place on the node has its work; `clean` removes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.hosts.machine import ANY_ADDRESS
from pipeline.secret_file import read_secret
from schemas.config import RunConfig
from services.cli.service import check_place, label, loop_of
from services.process import SERVICES, run_service

SECRETS = (
    ("broker", "token_file"),
    ("broker", "credentials_file"),
    ("broker", "ca_file"),
    ("broker", "cert_file"),
    ("broker", "key_file"),
    ("store", "credentials_file"),
    ("engine", "token_file"),
    ("agent_loop", "run_key_file"),
)
"""The keys of a configuration that name a file with a secret, or one that goes with it: an actor's node has neither."""


class HostFailed(RuntimeError):
    """How a host's service ended: its error in one line. Other people's exceptions need not exist where it is read."""


@dataclass(frozen=True)
class HostTask:
    """What an actor is to run. `config`: the run's configuration as JSON; `secrets`: contents of files, by `section.key`."""

    config: str
    secrets: Mapping[str, str] = field(repr=False)
    service: str
    index: int
    pool: str
    journal: str
    version: str = field(default_factory=lambda: version("packtrain"))


def host_task(config: RunConfig, service: str, index: int, pool: str, journal: str) -> HostTask:
    """Of a run's whole configuration. Raises SecretUnreadable.

    journal: name of the hosts' journals on a node; empty: where the configuration says.
    """
    named = {f"{section}.{key}": getattr(getattr(config, section), key) for section, key in SECRETS}
    secrets = {key: read_secret(path, key) for key, path in named.items() if path}
    return HostTask(config.model_dump_json(), secrets, service, index, pool, journal)


class RolloutHost:
    """The actor. `run` serves once in a process; the other methods are called while it does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = self._stopping = False
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def where(self) -> tuple[str, int]:
        """(the node's address, the process)."""
        return node_address(), os.getpid()

    def run(self, task: HostTask) -> None:
        """Until the service has ended. Raises HostFailed."""
        with self._lock:
            again, self._begun = self._begun, True
        if again:
            # Its launcher could not reach it for a while, and takes it for a new process: two hosts would have one name.
            raise HostFailed("it has run in this process before; Ray is asked for a new one")
        here = version("packtrain")
        if here != task.version:
            raise HostFailed(
                f"packtrain {here} is installed on this node, the launcher has {task.version}; install the same"
            )
        try:
            config = placed(RunConfig.model_validate_json(task.config), task, node_address())
            check_place(config, task.service, task.index, task.pool)
            with asyncio.Runner(loop_factory=loop_of(task.service)) as runner:
                runner.run(_serve(config, task, self._began))
        except (Exception, SystemExit) as error:
            logging.getLogger("packtrain").exception("failed")
            raise HostFailed(f"{type(error).__name__}: {error}") from None

    def stop(self) -> None:
        """Asks the service to end, as SIGTERM does a process."""
        with self._lock:
            self._stopping = True
            if self._running is not None:
                loop, event = self._running
                with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
                    loop.call_soon_threadsafe(event.set)

    def clean(self, journal: str) -> None:
        """Removes the run's journals from this node: the run is over."""
        if journal:
            shutil.rmtree(journal_directory(journal), ignore_errors=True)

    def _began(self, stop: asyncio.Event) -> None:
        with self._lock:
            self._running = asyncio.get_running_loop(), stop
            if self._stopping:
                stop.set()


async def _serve(config: RunConfig, task: HostTask, began: Callable[[asyncio.Event], None]) -> None:
    # No method of the actor's: Ray would run all of them on an event loop of its own.
    serve = importlib.import_module(SERVICES[task.service]).serve
    stop = asyncio.Event()
    began(stop)
    await run_service(serve, config, label(task.service, task.index, task.pool), task.index, task.pool, stop)


def placed(config: RunConfig, task: HostTask, address: str) -> RunConfig:
    """The configuration as this process can use it: secrets, journals, and the node's own address to be reached at."""
    sections: dict[str, dict[str, Any]] = {}
    for name, secret in task.secrets.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = _in_memory(name, secret)
    if task.journal:
        sections.setdefault("agent_loop", {})["journal_dir"] = str(journal_directory(task.journal))
    if config.agent_loop.bind in ANY_ADDRESS and not config.agent_loop.advertise:
        sections.setdefault("agent_loop", {})["advertise"] = address
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    )


def journal_directory(name: str) -> Path:
    """The run's journals on this node, ours alone. Raises OSError when they are somebody else's."""
    directory = Path(tempfile.gettempdir()) / f"packtrain-{name}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or directory.is_symlink():
        raise PermissionError(
            f"{directory} is not a directory of this user alone; remove it, or set agent_loop.journal_dir"
        )
    return directory


def _in_memory(name: str, secret: str) -> str:
    """A path under which this process, and no child that it executes, reads the secret."""
    handle = os.memfd_create(name)
    with os.fdopen(os.dup(handle), "w") as file:
        file.write(secret)
    return f"/proc/self/fd/{handle}"


def node_address() -> str:
    import ray.util

    return ray.util.get_node_ip_address()
