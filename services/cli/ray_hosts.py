"""Rollout hosts as actors on a Ray cluster that runs already. One actor a host, never a tenant.

Promises:
- an actor that dies is restarted by Ray, wherever there is room, and counted as a process that the supervisor restarts;
  one that dies too often is given up in the same way;
- what hosts on other machines could not reach is refused before anything starts, all of it at once;
- actors belong to the launcher: `stop` asks, waits at most its grace, then kills; a launcher that dies takes them along.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.secret_file import SecretUnreadable
from schemas.config import RunConfig
from services.cli.embedded import LaunchError
from services.cli.ray_actor import HostTask, RolloutHost, host_task
from services.cli.ray_reach import out_of_reach
from services.cli.runs import HostPlace
from services.cli.supervise import Deaths, GaveUp, Supervisor

NAMESPACE = "packtrain"
_UNPLACED_S = 10.0
_NAME_FREE_S = 30.0
_CALL_S = 5.0
_AGAIN_S = 0.1


class RayHosts:
    """The hosts of one run on a cluster. Restarts go to the supervisor; `changed` is called on every start and end."""

    def __init__(
        self, supervisor: Supervisor, say: Callable[[str], None], changed: Callable[[], None]
    ) -> None:
        self.places: dict[str, tuple[str, int]] = {}
        """(address of the node, process) of every running host, by its name."""
        self._supervisor = supervisor
        self._say = say
        self._changed = changed
        self._keepers: list[asyncio.Task[None]] = []
        self._actors: dict[str, Any] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._connected = False

    async def connect(self, address: str) -> None:
        """Joins the cluster: auto, host:port or ray://host:port. Raises LaunchError."""
        try:
            await asyncio.to_thread(_init, address)
        except ImportError as error:
            raise LaunchError(
                "Ray is not installed here; pip install 'packtrain[ray]', in the version of the cluster"
            ) from error
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise LaunchError(
                f"no Ray cluster at {address}: {said}; start one with `ray start --head`, or name its address"
            ) from error
        self._connected = True

    async def check(self, config: RunConfig) -> None:
        """Refuses a configuration whose hosts could not work from the cluster's nodes; raises LaunchError."""
        import ray

        nodes = await asyncio.to_thread(ray.nodes)
        places = {(n["NodeManagerAddress"], n["NodeManagerHostname"]) for n in nodes if n["Alive"]}
        if len(places) > 1 or any(name != socket.gethostname() for _, name in places):
            found = out_of_reach(config)
            if found:
                raise LaunchError("\n".join(f"on a cluster of several machines: {fault}" for fault in found))

    def keep(self, config: RunConfig, place: HostPlace, journal: str, log: Path) -> None:
        """Starts a host and keeps it alive; `log` gets where it runs and how it ends. Raises LaunchError when a
        secret cannot be read. `journal`: as in `host_task`."""
        try:
            task = host_task(config, place.service, place.index, place.pool, journal)
        except SecretUnreadable as error:
            raise LaunchError(str(error)) from error
        keeper = self._keep(f"packtrain-{config.run}-{place.name}", place, task, log)
        self._keepers.append(asyncio.create_task(keeper, name=f"keep {place.name}"))

    async def stop(self, grace_s: float, journal: str = "") -> None:
        """Stops all hosts; see the module's promises. `journal`: of a run that is over, to be removed from the nodes."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        running = {name: self._actors[name] for name in self._ends if name in self._actors}
        try:
            calls = [_answer(actor.stop.remote()) for actor in running.values()]
            if calls:
                await asyncio.wait([*calls, *self._ends.values()], timeout=grace_s)
            cleaned = [_answer(actor.clean.remote(journal)) for actor in running.values() if journal]
            if cleaned:
                await asyncio.wait(cleaned, timeout=_CALL_S)
        finally:
            self.kill()
            self._ends.clear()
            self.places.clear()
            if self._connected:
                self._connected = False
                await asyncio.to_thread(_shutdown)
        self._changed()

    def kill(self) -> None:
        """Ends every actor now, for a `stop` that is under way and shall not wait."""
        for name in list(self._actors):
            _kill(self._actors.pop(name))

    async def _keep(self, name: str, place: HostPlace, task: HostTask, log: Path) -> None:
        deaths = Deaths()
        try:
            while True:
                cause, badly = await self._life(name, place, task, log)
                _write(log, cause)
                delay = deaths.died(time.monotonic()) if badly else 0.0
                if delay is None:
                    times = f"{place.name} died {len(deaths.times)} times within {deaths.window_s:.0f} s"
                    raise GaveUp(f"{times}; {cause}; see {log}")
                self._supervisor.restarted(place.name, cause)
                await asyncio.sleep(delay)
        except (GaveUp, LaunchError) as error:
            self._supervisor.give_up(GaveUp(str(error)))

    async def _life(self, name: str, place: HostPlace, task: HostTask, log: Path) -> tuple[str, bool]:
        """One life of a host's process: how it ended, and whether badly. Its successor is on its way when this returns."""
        from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

        actor = self._actors.get(place.name)
        if actor is None:
            actor = self._actors[place.name] = await _create(name, place)
        try:
            node, pid = self.places[place.name] = await self._placed(place, actor)
            _write(
                log,
                f"runs on {node} as process {pid}; its own log: ray logs worker --node-ip {node} --pid {pid}",
            )
            self._changed()
            end = self._ends[place.name] = _answer(actor.run.remote(task))
            await asyncio.shield(end)
            await self._supervisor.ended_well()
            cause, badly, again = f"{place.name} ended by itself", False, _restart
        except RayTaskError as error:
            cause, badly, again = f"{place.name} ended with {error.cause}", True, _restart
        except ActorUnavailableError:
            # Ray is starting it again, and what it is asked until then waits.
            at = self.places[place.name][0] if place.name in self.places else "its node"
            cause, badly, again = f"the process of {place.name} on {at} was lost", True, None
        except RayError as error:
            # Not to be started again by Ray: it could not be made, or somebody ended it for good.
            cause, badly, again = f"{place.name} ended with {_last_line(error)}", True, _kill
        self._ends.pop(place.name, None)
        self.places.pop(place.name, None)
        if again is not None:
            await asyncio.to_thread(again, actor)
        if again is _kill:
            del self._actors[place.name]
        return cause, badly

    async def _placed(self, place: HostPlace, actor: Any) -> tuple[str, int]:
        """Waits until the actor runs somewhere, and says so when that takes long."""
        from ray.exceptions import ActorUnavailableError

        waits = asyncio.get_running_loop().call_later(
            _UNPLACED_S,
            self._say,
            f"{place.name} waits for a node of the Ray cluster with {_amounts(place.resources)} free; add a node, or lower "
            "its resources",
        )
        try:
            while True:
                try:
                    return await actor.where.remote()
                except ActorUnavailableError:  # the process before it is still ending
                    await asyncio.sleep(_AGAIN_S)
        finally:
            waits.cancel()


def actor_options(place: HostPlace) -> dict[str, Any]:
    """What Ray is asked for one host: the resources to reserve, one CPU where nothing is said, and the interpreter."""
    given = dict(place.resources) or {"CPU": 1.0}
    options: dict[str, Any] = {"num_cpus": given.pop("CPU", 0.0), "num_gpus": given.pop("GPU", 0.0)}
    if "memory" in given:
        options["memory"] = int(given.pop("memory"))
    if place.python:
        options["runtime_env"] = {"py_executable": place.python}
    return {**options, "resources": given}


async def _create(name: str, place: HostPlace) -> Any:
    """A new actor. Raises LaunchError when its name stays taken, or Ray knows no such resources."""
    import ray
    from ray.exceptions import ActorAlreadyExistsError

    made = ray.remote(RolloutHost).options(
        name=name,
        namespace=NAMESPACE,
        max_restarts=-1,
        max_concurrency=3,
        scheduling_strategy="SPREAD",
        **actor_options(place),
    )
    deadline = time.monotonic() + _NAME_FREE_S
    while True:
        try:
            return await asyncio.to_thread(made.remote)
        except ActorAlreadyExistsError as error:
            # Those of a launcher that was killed just now are being ended.
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the Ray cluster has an actor {name}: another launcher runs this run; take another name with --run"
                ) from error
            await asyncio.sleep(0.5)
        except ValueError as error:
            raise LaunchError(f"Ray refuses {_amounts(place.resources)} for {place.name}: {error}") from error


def _init(address: str) -> None:
    # Told to stop, a driver would print its stack.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    import ray

    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        # Ray tries for a minute and more, and may end the process.
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CALL_S).close()

    # What it says belongs in the launcher's log, not across the live view.
    logger = logging.getLogger("ray")
    logger.handlers, logger.propagate = [], True
    # Ray would put the working directory before what is installed on every node: a package `services` there is not ours.
    with contextlib.chdir("/"):
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
        )


def _shutdown() -> None:
    import ray

    ray.shutdown()


def _kill(actor: Any) -> None:
    _end(actor, no_restart=True)


def _restart(actor: Any) -> None:
    """Ends an actor's process; Ray starts another."""
    _end(actor, no_restart=False)


def _end(actor: Any, no_restart: bool) -> None:
    import ray
    from ray.exceptions import RayError

    with contextlib.suppress(RayError, ValueError):
        ray.kill(actor, no_restart=no_restart)


def _answer(reference: Any) -> asyncio.Future[Any]:
    """What a call of an actor comes to. Nobody need ask: an end that is awaited no more is no complaint."""

    async def answer() -> Any:
        return await reference

    task = asyncio.ensure_future(answer())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in (resources or {"CPU": 1.0}).items())


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _write(log: Path, line: str) -> None:
    try:
        with log.open("a") as file:
            file.write(f"{line}\n")
    except OSError as error:
        logging.getLogger("packtrain.launcher").warning("%s not written: %s", log, error)
