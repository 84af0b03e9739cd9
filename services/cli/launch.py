"""`packtrain demo` and `packtrain run`: from a configuration to a finished run, all processes on this machine.

Promises:
- what cannot work is told in one line before a service starts: directory, engine, addresses, store, broker; what a
  configuration alone tells was refused before (`services.cli.check`);
- however the launcher ends, no process that it started is left;
- services are started by the command that deployment uses, with a configuration file that holds no secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from pipeline.config import dumps
from pipeline.log import Log
from pipeline.log.tasks import end_tasks
from schemas.config import Broker, Pool, RunConfig
from schemas.facts import ALL, RunStarted
from services.cli import disk, summary
from services.cli.begin import begin
from services.cli.claim import open_place
from services.cli.embedded import (
    LOOPBACK,
    DirectoryLock,
    broker_member,
    check_address,
    free_port,
    make_directory,
    secret_file,
    socket_directory,
)
from services.cli.engine_health import check_engine
from services.cli.live import Screen, counted
from services.cli.policy import resolve_policy
from services.cli.ray_hosts import RayHosts
from services.cli.reach import GIVEN, LAUNCHER, PATHS, RECORD
from services.cli.runs import (
    Choice,
    Known,
    choose,
    host_places,
    interpreter,
    longest_drain,
    resumed,
    store_url,
    unit_arguments,
)
from services.cli.supervise import Member, Supervisor, Unit
from services.cli.teachers import resolved
from services.dashboard import View, fold

INTERRUPTED = 130
JOURNAL = "journal"
"""Directory of the hosts' journals, in the run's."""
_BROKER_S = 5.0
_GRACE_S = 10.0
_DISK_S = 1.0


@dataclass(frozen=True)
class Options:
    """How a run is started and shown; none of it is part of the run."""

    fresh: bool = False
    plain: bool = False
    resume: bool = False
    """Only the run of exactly that name, and only when it is unfinished."""
    groups_from: str = ""
    """The run whose accepted groups that are in no batch it begins with; empty: none, or as it was begun."""
    ray: str = ""
    """Address of the Ray cluster that rollout hosts are actors of; empty: they are processes here."""


def run(config: RunConfig, options: Options, console: Console) -> int:
    """Runs to the end; the exit status. Raises LaunchError, GaveUp, BrokerUnavailable or StoreUnavailable: one line each."""
    directory = make_directory(Path(config.directory).absolute())
    with DirectoryLock(directory):
        # What the log client says about a broker that restarts belongs in a file, not across the live view.
        logging.basicConfig(
            filename=directory / "launcher.log", level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
        )
        return asyncio.run(_Launch(config, options, directory, console).run())


class _Launch:
    def __init__(self, config: RunConfig, options: Options, directory: Path, console: Console) -> None:
        self.config = config
        self.options = options
        self.directory = directory
        self.console = console
        self.view = View()
        self.choice: Choice | None = None
        self.log: Log | None = None
        self._scratch = Path(tempfile.gettempdir()) / f"packtrain-{os.getpid()}"

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self.supervisor = Supervisor(self._record_processes)
        self.actors = (
            RayHosts(self.supervisor, self._say, self._record_processes) if self.options.ray else None
        )
        interrupted: asyncio.Future[None] = loop.create_future()

        def interrupt() -> None:
            if interrupted.done():
                self.supervisor.kill()  # a second Ctrl-C does not wait
                if self.actors is not None:
                    self.actors.kill()
            else:
                interrupted.set_result(None)
                self._say("stopping ...")

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        body = asyncio.create_task(self._body())
        try:
            await asyncio.wait(
                [body, interrupted, self.supervisor.gave_up], return_when=asyncio.FIRST_COMPLETED
            )
            self.supervisor.ending.set()
            if body.done():
                await self._end(body.result())
            elif self.supervisor.gave_up.done():
                self.supervisor.gave_up.result()
        finally:
            await end_tasks([body])
            await self._stop_services()
            if self.log is not None:
                await self.log.close()
            await self.supervisor.stop()
            shutil.rmtree(self._scratch, ignore_errors=True)
        stopped = self.view.stopped
        if stopped is not None and self.choice is not None:
            # A run that is over collects nothing from the hosts that it lost.
            shutil.rmtree(self.directory / "runs" / self.choice.run / JOURNAL, ignore_errors=True)
        if stopped is not None:
            if stopped.reason == "completed":
                return 0
            run = self.choice.run if self.choice is not None else ""
            print(
                f"packtrain: run {run} was {stopped.reason} after {counted(stopped.steps, 'step')}",
                file=sys.stderr,
            )
            return 1
        if self.choice is not None:
            self._say(f"stopped; run {self.choice.run} is unfinished, the same command goes on with it")
        return INTERRUPTED

    async def _body(self) -> RunConfig:
        """From the checks to the end of the run; what it was run with."""
        await self._check_given()
        broker = self._broker()
        look = self._looker(broker)
        if self.options.resume:
            self.choice = await resumed(self.config, look, self.directory)
        else:
            self.choice = await choose(self.config, self.options.fresh, look, self.directory)
        if self.choice.note:
            self._say(self.choice.note)
        config = self._resolve(self.choice.run, broker)
        store = await open_place(config, self.choice.resumed)
        self.log = await Log.connect(broker, config.run, LAUNCHER, _BROKER_S, LAUNCHER)
        await begin(self.log, config, store, self.choice.resumed, self.options.groups_from, self._say)
        self._start(config)
        await self._watch(self.log)
        return config

    async def _end(self, config: RunConfig) -> None:
        assert self.log is not None
        resumed = self.choice is not None and self.choice.resumed
        await self._stop_services()
        summary.show(
            self.console, self.view, await self.log.size(), self.supervisor.restarts, config, resumed
        )

    async def _check_given(self) -> None:
        config = self.config
        policy = resolve_policy(config.engine.policy, self.directory)
        self.config = config.model_copy(
            update={
                "engine": config.engine.model_copy(update={"policy": policy}),
                "teachers": resolved(config.teachers, self.directory),
            }
        )
        if config.trainer.rendezvous:
            check_address(config.trainer.rendezvous, "trainer.rendezvous")
        for url in (config.engine.url, *config.engine.replicas):
            if url:
                await asyncio.to_thread(check_engine, url)
        if self.actors is not None:
            await self.actors.connect(self.options.ray)
            await self.actors.check(config)

    def _broker(self) -> Broker:
        if self.config.broker.url:
            return self.config.broker
        member, broker = broker_member(self.directory, free_port())
        self.supervisor.keep(Unit("broker", (member,)))
        return broker

    def _looker(self, broker: Broker):
        async def look(name: str) -> Known | None:
            log = await Log.connect(broker, name, LAUNCHER, _BROKER_S, LAUNCHER)
            try:
                if not await log.exists():
                    return None
                started = await log.last(RunStarted.type, ALL, name)
                stopped = await log.last("run.stopped", ALL, name)
            finally:
                await log.close()
            decisions = started.fact.config if started and isinstance(started.fact, RunStarted) else None
            return Known(decisions, stopped is not None)

        return look

    def _resolve(self, run: str, broker: Broker) -> RunConfig:
        """The configuration with everything filled in that was left open; written to the run's directory."""
        given = self.config
        home = make_directory(self.directory / "runs" / run)
        make_directory(home / "logs")
        update: dict[str, Any] = {
            "run": run,
            "directory": str(self.directory),
            "broker": _absolute(broker, *PATHS["broker"]),
        }
        store = given.store.model_copy(update={"url": store_url(given, self.directory)})
        update["store"] = _absolute(store, "credentials_file")
        engine = _absolute(given.engine, *PATHS["engine"])
        if not given.engine.url:
            token = given.engine.token_file or secret_file(self.directory / "secrets" / f"engine-token-{run}")
            engine = engine.model_copy(
                update={"url": f"http://{LOOPBACK}:{free_port()}", "token_file": str(Path(token).absolute())}
            )
        update["engine"] = engine
        loop = _absolute(given.agent_loop, *PATHS["agent_loop"])
        key = loop.run_key_file or str(secret_file(self.directory / "secrets" / f"run-key-{run}"))
        journal = loop.journal_dir or str(home / JOURNAL)
        update["agent_loop"] = loop.model_copy(update={"run_key_file": key, "journal_dir": journal})
        sockets = given.packer.socket_dir or str(socket_directory(home / "sockets", self._scratch))
        update["pools"] = _pools(given)
        update["packer"] = given.packer.model_copy(update={"socket_dir": sockets})
        if not given.trainer.rendezvous:
            update["trainer"] = given.trainer.model_copy(update={"rendezvous": f"{LOOPBACK}:{free_port()}"})
        config = given.model_copy(update=update)
        (home / GIVEN).write_text(dumps(_anywhere(given, run, self.directory)))
        (home / RECORD).write_text(dumps(config))
        return config

    def _start(self, config: RunConfig) -> None:
        home = self.directory / "runs" / config.run
        # -P: a directory named `services` where the user stands is not ours.
        command, file = ("-P", "-m", "services.cli.main", "service"), str(home / "config.toml")
        units = unit_arguments(config)
        # A given engine is served elsewhere; where we may write, it is brought new weights.
        if not self.config.engine.url or self.config.engine.weights_dir:
            units.insert(0, ("engine", [("engine", ["engine"])]))
        hosts = {place.name: place for place in host_places(config)} if self.actors is not None else {}
        for name, members in units:
            if self.actors is not None and name in hosts:
                self.actors.keep(config, hosts[name], self._journal(), home / "logs" / f"{name}.log")
                continue
            self.supervisor.keep(
                Unit(
                    name,
                    tuple(
                        Member(
                            member,
                            (interpreter(config, arguments), *command, *arguments, "--config", file),
                            home / "logs" / f"{member}.log",
                        )
                        for member, arguments in members
                    ),
                )
            )

    async def _watch(self, log: Log) -> None:
        supervisor = self.supervisor
        with Screen(
            self.console, self.view, supervisor.restarts, supervisor.causes, self.options.plain
        ) as screen:
            tasks = [asyncio.create_task(screen.tick())]
            if not self.config.broker.url:
                tasks.append(asyncio.create_task(self._watch_disk(screen)))
            try:
                async for event in log.subscribe():
                    fold(self.view, event)
                    screen.event(event)
                    if self.view.stopped is not None:
                        return
            finally:
                await end_tasks(tasks)

    async def _watch_disk(self, screen: Screen) -> None:
        watch, broker_log = disk.Watch(str(self.directory)), disk.BrokerLog(self.directory / "nats.log")
        while True:
            told, restart = watch.see(disk.look(self.directory, broker_log))
            for line in told:
                screen.line(line)
            if restart:
                self.supervisor.restart("broker")
            await asyncio.sleep(_DISK_S)

    async def _stop_services(self) -> None:
        over = self.view.stopped is not None
        # Hosts of a run that is over do not wait for their tenants; what others' tenants end with is the engine's work.
        drain_s = 0.0 if over else longest_drain(self.config)
        last = {"broker", "engine"} if drain_s else {"broker"}
        stops = [
            self.supervisor.stop([n for n in self.supervisor.units() if n not in last], _GRACE_S + drain_s)
        ]
        if self.actors is not None:
            stops.append(self.actors.stop(_GRACE_S + drain_s, self._journal() if over else ""))
        await asyncio.gather(*stops)
        await self.supervisor.stop(["engine"], _GRACE_S)

    def _journal(self) -> str:
        """Name of the run's journals on the nodes of a cluster, the same when it is resumed; empty: configured."""
        if self.choice is None or self.config.agent_loop.journal_dir:
            return ""
        place = f"{socket.gethostname()}:{self.directory}".encode()
        return f"{self.choice.run}-{hashlib.sha256(place).hexdigest()[:12]}"

    def _record_processes(self) -> None:
        """Keeps runs/<run>/processes.json: who runs, for people and tests; also how often each unit was restarted."""
        if self.choice is None:
            return
        path = self.directory / "runs" / self.choice.run / "processes.json"
        if path.parent.is_dir():
            draft = path.with_suffix(".new")
            record = {
                "launcher": os.getpid(),
                "pids": self.supervisor.pids(),
                "restarts": dict(self.supervisor.restarts),
                "actors": self.actors.places if self.actors is not None else {},
            }
            try:
                draft.write_bytes(orjson.dumps(record))
                draft.replace(path)
            except OSError as error:
                # A full disk stops no run; the record is behind until the next start or death.
                logging.getLogger("packtrain.launcher").warning("%s not written: %s", path, error)

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _absolute(section: Any, *keys: str) -> Any:
    """The section with these paths made absolute: services may be started from anywhere."""
    given = {key: getattr(section, key) for key in keys}
    return section.model_copy(update={key: str(Path(path).absolute()) for key, path in given.items() if path})


def _anywhere(given: RunConfig, run: str, directory: Path) -> RunConfig:
    """What the run was started with, so that it means the same in whatever directory it is read."""
    sections = {name: _absolute(getattr(given, name), *keys) for name, keys in PATHS.items()}
    return given.model_copy(
        update={"run": run, "directory": str(directory), "pools": _pools(given), **sections}
    )


def _pools(given: RunConfig) -> tuple[Pool, ...]:
    """The pools, with their paths made absolute; a bare name of an interpreter is looked for on PATH where it is started."""
    found: list[Pool] = []
    for pool in given.pools:
        pool = _absolute(pool, "python") if "/" in pool.python else pool
        if pool.harness == "harbor":
            # With its HTTP client, it takes half a second of the launcher's start.
            from pipeline.harnesses import harbor

            pool = pool.model_copy(update={"options": harbor.absolute(pool.options)})
        found.append(pool)
    return tuple(found)
