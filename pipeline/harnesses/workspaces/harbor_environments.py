"""Workspaces that are one of Harbor's environments: a container of Docker or Podman, a sandbox of Daytona, E2B, Modal, ...

Promises, beside those of `workspaces.base`:
- `network: closed`, the default, is kept or refused. A container of Docker or Podman has no network at all; `reach` names
  a port of its loopback on which this process listens. Elsewhere the provider lets `Spec.peer` through and nothing else;
  one that cannot do that is refused. `network: open` is the provider's own network, with all that can be reached there:
  the other ports of the host, the engine's other containers, the internet;
- memory, cores and processes are limited by Docker and Podman, what a container writes to its disk is not. Elsewhere
  limits are what the provider makes of Harbor's request;
- Harbor blocks its event loop now and then, so it has one of its own, on a thread;
- no value of `Spec.env` is on a command line of this machine.

Harbor needs Python 3.12 or newer. packtrain does not: a pool whose hosts have another interpreter names it in `python`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.harnesses.blocking import on_thread
from pipeline.harnesses.workspaces.base import Spec, Workspace, WorkspaceFailed
from pipeline.harnesses.workspaces.engine import Engine
from pipeline.harnesses.workspaces.harbor_sandbox import GRACE_S, Loop, Sandbox, line, whole
from pipeline.harnesses.workspaces.inside import listen_inside
from pipeline.harnesses.workspaces.owners import orphaned, owned
from pipeline.harnesses.workspaces.relay import Relay

ENGINES = ("docker", "podman")
"""The environments that are containers of an engine on this machine."""
_logger = logging.getLogger("packtrain.workspaces")


class Options(BaseModel):
    """Options of `harbor:NAME` workspaces."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    network: Literal["closed", "open"] = "closed"
    session_host: str = Field(
        default="",
        description="host by which a sandbox reaches the agent-loop host, where that is not the session's own",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="the environment's own, as in Harbor's --environment-kwarg"
    )


class HarborEnvironments:
    """Raises ValueError for a name or settings that Harbor does not know, and where Harbor is not installed."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        try:
            self._options = Options.model_validate(dict(options))
        except ValidationError as error:
            raise ValueError(f"workspaces harbor:{name} refuse their options: {error}") from error
        factory = _harbor("environments.factory").EnvironmentFactory
        known: list[str] = factory.registered_names()
        if name not in known:
            raise ValueError(f"Harbor has no environment {name!r}; it has {', '.join(known)}")
        try:
            self._class: Any = factory.get_environment_class(
                _harbor("models.environment_type").EnvironmentType(name)
            )
            self._class.parse_options(self._options.settings)
        except ImportError as error:
            raise ValueError(f"workspaces harbor:{name}: {error}") from error
        self.name = name
        self._there = Loop()
        self._engine = Engine(self._class) if name in ENGINES else None

    async def sweep(self) -> int:
        """Also refuses, with `WorkspaceFailed`, what cannot work at all: no engine, no credentials."""

        def ready() -> None:
            try:
                self._class.preflight(kwargs=self._options.settings)
            except SystemExit as error:
                # Harbor's way to say so.
                raise WorkspaceFailed(f"harbor:{self.name}: {error}") from error

            _kill_clients(orphaned)
            for left in Path(tempfile.gettempdir()).glob("packtrain-*"):
                if orphaned(left.name):
                    shutil.rmtree(left, ignore_errors=True)

        await on_thread(ready)
        if self._engine is None:
            return 0
        found = [project for project in await self._engine.projects() if orphaned(project)]
        for project in found:
            await self._engine.remove(project)
        return len(found)

    def open(self, spec: Spec) -> AbstractAsyncContextManager[Workspace]:
        return self._open(spec)

    @asynccontextmanager
    async def _open(self, spec: Spec) -> AsyncGenerator[Workspace]:
        session = owned(spec.name)
        async with AsyncExitStack() as stack:
            scratch = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix=f"{session}-", ignore_cleanup_errors=True)
                )
            )
            try:
                async with asyncio.timeout(spec.start_s):
                    environment = await on_thread(self._make, spec, session, scratch)
                    stack.push_async_callback(whole, self._close, environment, session)
                    workspace = await self._start(environment, spec, session, stack)
            except TimeoutError as error:
                raise WorkspaceFailed(f"harbor:{self.name}: not started within {spec.start_s:g} s") from error
            except (WorkspaceFailed, asyncio.CancelledError):
                raise
            except Exception as error:
                # Providers raise what their clients raise.
                raise WorkspaceFailed(f"harbor:{self.name} did not start: {line(error)}") from error
            yield workspace

    def _make(self, spec: Spec, session: str, scratch: Path) -> Any:
        """Harbor's environment of a spec, not started. May block."""
        given = tomllib.loads(_text(spec.definition.parent / "task.toml")).get("environment", {})
        # What the task gives to its programs is in the spec; Harbor would fill it in from this process's environment.
        config = _harbor("models.task.config").EnvironmentConfig.model_validate({**given, "env": {}})
        wanted: dict[str, Any] = {"override_cpus": spec.limits.cpus or None}
        if self._engine is not None:
            if (spec.definition / "docker-compose.yaml").exists() and self._options.network == "closed":
                raise WorkspaceFailed(
                    f"{spec.definition} has services of its own (docker-compose.yaml), which need a network: set the "
                    "workspaces' option network to open"
                )
            overlay = scratch / "compose.json"
            overlay.touch(mode=0o600)
            overlay.write_text(json.dumps(self._engine.overlay(spec, self._options.network == "open")))
            wanted["extra_docker_compose"] = [overlay]
        else:
            wanted["persistent_env"] = dict(spec.env)
            wanted["network_policy"] = self._policy(spec)
            wanted["override_storage_mb"] = spec.limits.disk_bytes >> 20
        return self._class(
            environment_dir=spec.definition.absolute(),
            environment_name=spec.definition.absolute().parent.name,
            session_id=session,
            trial_paths=_harbor("models.trial.paths").TrialPaths(scratch),
            task_env_config=config,
            logger=_logger,
            override_memory_mb=max(1, spec.limits.memory_bytes >> 20),
            **wanted,
            **self._options.settings,
        )

    def _policy(self, spec: Spec) -> Any:
        models = _harbor("models.task.config")
        if self._options.network == "open":
            return models.NetworkPolicy(network_mode=models.NetworkMode.PUBLIC)
        if spec.peer is None:
            return models.NetworkPolicy(network_mode=models.NetworkMode.NO_NETWORK)
        hosts = [self._options.session_host or spec.peer[0]]
        return models.NetworkPolicy(network_mode=models.NetworkMode.ALLOWLIST, allowed_hosts=hosts)

    async def _start(self, environment: Any, spec: Spec, session: str, stack: AsyncExitStack) -> Sandbox:
        await self._there.do(environment.start(force_build=False))
        host, port = self._options.session_host, 0
        if self._engine is not None and self._options.network == "closed":
            host = ""
            if spec.peer is not None:
                listener = await on_thread(listen_inside, *await self._engine.process(session))
                port = listener.getsockname()[1]
                host = "127.0.0.1"
                relay = Relay(spec.peer)
                await relay.start(listener)
                stack.push_async_callback(relay.close)
        elif spec.peer is not None and not host and spec.peer[0] in ("127.0.0.1", "::1", "localhost"):
            raise WorkspaceFailed(
                f"the session is at {spec.peer[0]}, where a sandbox of harbor:{self.name} reaches itself: let "
                "agent_loop.bind and advertise be an address that it reaches, or set the workspaces' option session_host"
            )
        sandbox = Sandbox(self._there, environment, self.name, host, port)
        await sandbox.begin()
        if self._engine is None:
            for mount in spec.mounts:
                await sandbox.put(mount.source, mount.target)
        await self._there.do(environment.run_healthcheck())
        return sandbox

    async def _close(self, environment: Any, session: str) -> None:
        if self._engine is not None:
            await on_thread(_kill_clients, session.__eq__)
        try:
            await asyncio.wait_for(self._there.do(environment.stop(delete=True)), GRACE_S)
        except Exception as error:
            # The trial is over: a sandbox that does not go is told, and no verdict is lost for it.
            _logger.warning("harbor:%s: %s was not stopped: %s", self.name, session, line(error))
        if self._engine is not None:
            await self._engine.remove(session)


def _kill_clients(of: Callable[[str], bool]) -> None:
    """Ends the engine's clients that still work for such sessions: Harbor leaves them running where it is cancelled, and they
    outlive a host that is killed; one that starts a container would do so after it was removed."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if any(map(of, path.read_bytes().decode(errors="replace").split("\0"))):
                os.kill(int(path.parent.name), signal.SIGKILL)


def _harbor(module: str) -> Any:
    os.environ["HARBOR_TELEMETRY"] = "0"
    try:
        return importlib.import_module(f"harbor.{module}")
    except ImportError as error:
        raise ValueError(
            f"Harbor's environments need Harbor, which {sys.executable} cannot import: {error}. Install packtrain[harbor] with "
            "Python 3.12 or newer, and name that interpreter in the pool's `python`"
        ) from error


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
