"""The agent-loop host as a service: the capture proxy, the engine behind it, and the work and verdicts in the log."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket

from aiohttp import web

from pipeline.capture.journal import HostJournal
from pipeline.capture.recovery import Recovery
from pipeline.capture.renderers.choose import load_renderer
from pipeline.capture.rules import load_rules, pool_rules
from pipeline.capture.secret import load_run_key
from pipeline.capture.server import Capture
from pipeline.capture.showing import load_showing
from pipeline.capture.uploads import Uploads
from pipeline.engines.client import open_engine
from pipeline.engines.policies import policy_dir
from pipeline.hosts.engine import MeasuredEngine
from pipeline.hosts.host import Host, Place
from pipeline.hosts.machine import ANY_ADDRESS, towards
from pipeline.log import end_tasks
from pipeline.secret_file import read_secret
from pipeline.signal.rules import judge_of
from schemas.config import RunConfig
from schemas.facts import SequenceDispatched
from services.agent_loop.host import Host as Sequences
from services.agent_loop.host import max_deliver
from services.process import Context

WORK = "agent-loop"
SHUTDOWN_S = 2.0
"""How long requests may take to end once their sessions are closed."""


async def serve(ctx: Context) -> None:
    config = ctx.config
    settings = config.agent_loop
    run_key = load_run_key(settings.run_key_file)
    given = config.engine
    policy = policy_dir(given.policy)
    renderer = load_renderer(policy, given.renderer, given.tool_parser, given.reasoning_parser)
    uploads = Uploads(ctx.store, ctx.run)
    showing = load_showing(policy, renderer, given.vision, uploads.see)
    rules = {pool.name: load_rules(pool_rules(pool)) for pool in config.pools}
    judges = {source.name: judge_of(source.penalties) for source in config.sources}
    # A new one for every process: what a killed one's was is told apart from its successor's.
    name = f"al-{ctx.name.removeprefix('agent-loop-')}-{secrets.token_hex(4)}"
    token_file = config.engine.token_file
    token = read_secret(token_file, "engine.token_file") if token_file else None
    journal = _journal(settings.journal_dir, name)
    # Closed when no session is left, and before all else: whoever gets what was handed back looks for it there.
    held = contextlib.ExitStack()
    if journal is not None:
        held.callback(journal.close)
    recovery = Recovery(settings.journal_dir) if settings.journal_dir else None
    engine = MeasuredEngine(open_engine(config.engine, token, settings.trial_budget_s), ctx.measures.waits)
    capture = Capture(run_key, renderer, engine, config.engine.max_context, showing=showing)
    runner = capture.runner(SHUTDOWN_S)
    tasks: list[asyncio.Task[None]] = []
    try:
        await runner.setup()
        listening = _listen(settings.bind)
        await web.SockSite(runner, listening).start()
        base_url = _base_url(await _reached_at(config), listening)
        sequences = Sequences(ctx, name, base_url, capture, engine, uploads, rules, journal, recovery, judges)
        work = await ctx.log.work(
            WORK,
            SequenceDispatched.type,
            ack_wait_s=settings.ack_wait_s,
            max_deliver=max_deliver(settings),
        )
        ctx.health.ready()
        host = Host(ctx.log, Place(ctx.name, "agent-loop"), settings.tenants, ctx.measures, logger=ctx.logger)
        serving = host.serve(
            work,
            sequences.handle,
            ctx.stop,
            sequences.last_word,
            drain_s=ctx.drain_s,
            hurry=ctx.hurry,
            over=held.close,
        )
        tasks.append(asyncio.create_task(serving))
        tasks.append(asyncio.create_task(sequences.follow_verdicts()))
        if journal is not None:
            tasks.append(asyncio.create_task(journal.commit()))
        # Without its verdicts the host is deaf: its end, by an error, is the service's.
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks(tasks)
        held.close()
        await runner.cleanup()
        await engine.close()
        await uploads.close()


def _journal(directory: str, name: str) -> HostJournal | None:
    if not directory:
        return None
    try:
        return HostJournal(directory, name)
    except OSError as error:
        raise OSError(
            f"agent_loop.journal_dir {directory!r}: {error.strerror or error}; name a local directory that this host may write"
        ) from error


def _listen(address: str) -> socket.socket:
    """A listening socket on a free port of the address; raises OSError that names `agent_loop.bind`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # `::` takes both families.
        both = address == ANY_ADDRESS[1] and socket.has_dualstack_ipv6()
        return socket.create_server((address, 0), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        raise OSError(
            f"agent_loop.bind {address!r}: {error.strerror or error}; use an address of this machine"
        ) from error


async def _reached_at(config: RunConfig) -> str:
    """The address that harness hosts are told. Raises NoAddress."""
    settings = config.agent_loop
    if settings.advertise or settings.bind not in ANY_ADDRESS:
        return settings.advertise or settings.bind
    return await towards(config.broker.url, settings.bind)


def _base_url(address: str, listening: socket.socket) -> str:
    shown = f"[{address}]" if ":" in address else address
    return f"http://{shown}:{listening.getsockname()[1]}"
