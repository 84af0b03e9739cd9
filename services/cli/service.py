"""`packtrain service NAME`: one service in this process, the same for the launcher, a container and a cluster."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pipeline.config import load
from schemas.config import RunConfig
from services.cli.embedded import BadInput
from services.process import SERVICES, run_service


def serve(name: str, file: Path, index: int, pool: str) -> None:
    """Runs the service until it ends or is told to stop; raises BadInput on a service that the run does not have."""
    if name not in SERVICES:
        raise BadInput(f"no service {name!r}; services: {', '.join(SERVICES)}")
    config = load(file)
    check_place(config, name, index, pool)
    module = importlib.import_module(SERVICES[name])
    with asyncio.Runner(loop_factory=loop_of(name)) as runner:
        runner.run(run_service(module.serve, config, label(name, index, pool), index, pool))
    # Taking down an interpreter that holds torch costs seconds of CPU, and joins a model step that nobody waits for.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


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


def check_place(config: RunConfig, name: str, index: int, pool: str) -> None:
    """Refuses an index or a pool that the configuration does not have; raises BadInput."""
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
    if index >= count:
        raise BadInput(f"service {name} --index {index} is out of range: {key}; use 0 to {count - 1}")
