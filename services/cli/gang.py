"""`packtrain service trainer` without an index: every rank of the run, on this machine, as one.

Promises:
- when a rank dies the others are killed and all start again, from the newest checkpoint; ranks that keep dying are given up, so
  that whoever started us sees it;
- it ends well when all ranks have, as they do when the run is over;
- told to stop, it tells the ranks, and none outlives it, however it ends;
- what ranks write goes to its own stdout and stderr.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from schemas.config import RunConfig
from services.cli.embedded import LOOPBACK, BadInput, free_port, host_and_port
from services.cli.supervise import Member, Supervisor, Unit
from services.process import log_to_stderr

_NAME = "trainer"
_LAST_PORT = 65_535


async def serve_gang(unit: Unit, run: str) -> None:
    """Until the run is over or it is told to stop; told twice, it kills. Raises GaveUp."""
    logger = log_to_stderr(_NAME, run)
    told = 0

    def changed() -> None:
        nonlocal told
        if supervisor.restarts[_NAME] > told:
            told = supervisor.restarts[_NAME]
            logger.warning("%s; all %d ranks start again", supervisor.causes[_NAME], len(unit.members))

    supervisor = Supervisor(changed)
    stop = asyncio.Event()

    def asked() -> None:
        if stop.is_set():
            supervisor.kill()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked)
    keeper = supervisor.keep(unit)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([keeper, stopping], return_when=asyncio.FIRST_COMPLETED)
        if supervisor.gave_up.done():
            supervisor.gave_up.result()
    finally:
        stopping.cancel()
        await supervisor.stop()
    logger.info("stopped")


def gang(config: RunConfig, file: Path) -> Unit:
    """The ranks as members. Raises BadInput when there are not as many ports."""
    rendezvous = config.trainer.rendezvous or f"{LOOPBACK}:{free_port()}"
    # -P: a directory named `services` where the user stands is not ours.
    command = (sys.executable, "-P", "-m", "services.cli.main", "service", _NAME, "--config", str(file))
    return Unit(
        _NAME,
        tuple(
            Member(
                f"rank {rank}",
                (*command, "--index", str(rank), "--rendezvous", rendezvous)
                + (("--metrics-bind", bind) if (bind := own_bind(config.metrics.bind, rank)) else ()),
            )
            for rank in range(config.batch.sizes.ranks)
        ),
        ends=True,
    )


def own_bind(bind: str, rank: int) -> str:
    """Where a rank of a gang serves its metrics: at `metrics.bind`'s port + rank. Raises BadInput when there is no such port."""
    if not bind:
        return bind
    port = host_and_port(bind, "metrics.bind")[1]
    if not port:
        return bind
    if port + rank > _LAST_PORT:
        raise BadInput(
            f"metrics.bind {bind}: rank {rank} would serve on port {port + rank}, and ports end at {_LAST_PORT}; give a lower one"
        )
    return f"{bind.rpartition(':')[0]}:{port + rank}"
