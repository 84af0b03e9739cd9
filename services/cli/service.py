"""`packtrain service NAME`: one service in this process, the same for the launcher, a container and a cluster."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.config import Override, load
from pipeline.hosts.machine import claim_name
from schemas.config import RunConfig
from services.cli.embedded import BadInput, host_and_port
from services.cli.options import FAILED, status_of
from services.process import SERVICES, run_service

_LOG = logging.getLogger("packtrain.service")
OWN = (("--metrics-bind", "metrics.bind"), ("--rendezvous", "trainer.rendezvous"))
"""Options of one process's own addresses, and the keys that they stand over."""


def serve(name: str, file: Path, index: int | None, pool: str, overrides: Sequence[Override] = ()) -> None:
    """Runs the service until it ends or is told to stop; without an index it finds its own place. What it ends of is its last
    line of log.

    Raises BadInput on a service that the run does not have.
    """
    if name not in SERVICES:
        raise BadInput(f"no service {name!r}; services: {', '.join(SERVICES)}")
    config = load(file, overrides)
    check_place(config, name, index, pool)
    if name == "trainer" and index is None:
        from services.cli.gang import gang, serve_gang

        serving = serve_gang(gang(config, file), config.run)
    else:
        module = importlib.import_module(SERVICES[name])
        # The name is held as long as the process is there.
        called, _held = own_label(name, pool) if index is None else (label(name, index, pool), None)
        serving = run_service(module.serve, config, called, index, pool)
    # Like all else that a service says.
    logging.captureWarnings(True)
    status = 0
    try:
        with asyncio.Runner(loop_factory=loop_of(name)) as runner:
            runner.run(serving)
    except Exception as error:
        status = _last_words(error)
    # Taking down an interpreter that holds torch costs seconds of CPU, and joins a model step that nobody waits for.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _last_words(error: Exception) -> int:
    """Says in the log what the service ended of, with a traceback when it is a bug; its exit status."""
    status = status_of(error)
    if status is None:
        _LOG.error("%s: %s", type(error).__name__, error, exc_info=error)
        return FAILED
    _LOG.error("%s", error)
    return status


def loop_of(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if name != "agent-loop":
        return None
    # Every model call of every agent goes through it: a third less time a call than with asyncio's own.
    import uvloop

    return uvloop.new_event_loop


def label(name: str, index: int, pool: str) -> str:
    """The process's name in logs and events: `sampler`, `packer-1`, `harness-tool-0`."""
    if name == "harness":
        return f"harness-{pool}-{index}"
    return f"{name}-{index}" if name in ("agent-loop", "packer", "trainer") else name


def own_label(name: str, pool: str) -> tuple[str, socket.socket | None]:
    """The name of a process without a number, and what holds it: `agent-loop-<machine>`, `harness-<pool>-<machine>`."""
    if name not in ("agent-loop", "harness", "packer"):
        return name, None
    return claim_name(f"harness-{pool}" if pool else name)


def check_place(config: RunConfig, name: str, index: int | None, pool: str) -> None:
    """Refuses an index or a pool that the configuration does not have; raises BadInput. Of hosts without an index there may be
    more than the configuration has."""
    count, key = 1, "there is one"
    if name == "harness":
        found = [p for p in config.pools if p.name == pool]
        if not found:
            raise BadInput(
                f"service harness needs --pool, one of {[p.name for p in config.pools]}; given {pool!r}"
            )
        count = config.pool_hosts()[pool]
        key = f"pool {pool} has hosts = {count}"
    elif pool:
        raise BadInput(f"--pool {pool} is for service harness only, not for {name}")
    elif name == "agent-loop":
        count, key = config.agent_loop.hosts, f"agent_loop.hosts = {config.agent_loop.hosts}"
    elif name == "trainer" and config.trainer.kind == "external":
        raise BadInput(
            "trainer.kind is external: the run's trainer is yours, and takes its windows from the packers"
        )
    elif name in ("packer", "trainer"):
        sizes = config.batch.sizes
        count = sizes.packers if name == "packer" else sizes.ranks
        over = ("dp", "cp", "pp") if name == "packer" else ("dp", "cp", "tp", "pp")
        key = f"batch.{' * '.join(over)} = {count}"
    if index is not None and index >= count:
        raise BadInput(f"service {name} --index {index} is out of range: {key}; use 0 to {count - 1}")
    if name == "trainer" and config.trainer.rendezvous:
        host_and_port(config.trainer.rendezvous, "trainer.rendezvous")
    elif name == "trainer" and index is not None:
        raise BadInput(
            "trainer.rendezvous is empty: name host:port of rank 0, where the other ranks find it, or leave --index out for all "
            "ranks on this machine"
        )
