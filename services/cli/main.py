"""The `packtrain` command line.

Promises:
- what goes wrong with input, files or servers is one line on stderr and an exit status that is not 0; a traceback is a
  bug of ours;
- a command imports what it needs when it runs, so that help and control services start fast.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import (
    broker_commands,
    dlq_commands,
    gc_commands,
    replay_commands,
    runs_commands,
    scaffolds,
    schema_commands,
    secrets_commands,
    store_commands,
)
from services.cli.options import (
    ConfigArgument,
    Directory,
    Fresh,
    GroupsFrom,
    Id,
    Json,
    Nats,
    NatsTokenFile,
    Plain,
    Policy,
    RunArgument,
    RunName,
    Source,
    Steps,
    Store,
    StoreCredentials,
    StoreEndpoint,
    Type,
    console,
    note,
    one_line,
)
from services.cli.where import Where, reading

if TYPE_CHECKING:
    from pipeline.config import Override

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Event-sourced rollouts for agentic RL.",
)
config_app = typer.Typer(no_args_is_help=True, help="Check, show and describe configurations.")
events_app = typer.Typer(no_args_is_help=True, help="Read a run's event log.")
payload_app = typer.Typer(no_args_is_help=True, help="Read payload objects.")
app.add_typer(config_app, name="config")
app.add_typer(events_app, name="events")
app.add_typer(payload_app, name="payload")
app.add_typer(schema_commands.app, name="schema")
app.add_typer(runs_commands.app, name="runs")
app.add_typer(runs_commands.archive_app)
app.add_typer(replay_commands.app)
app.add_typer(dlq_commands.app, name="dlq")
app.add_typer(gc_commands.app)
app.add_typer(store_commands.app, name="store")
app.add_typer(broker_commands.app, name="broker")
app.add_typer(scaffolds.app, name="scaffolds")
app.add_typer(secrets_commands.app)


@app.command()
def demo(
    steps: Steps = None,
    policy: Policy = None,
    run_name: RunName = None,
    directory: Directory = None,
    nats: Nats = None,
    nats_token_file: NatsTokenFile = None,
    store: Store = None,
    store_endpoint: StoreEndpoint = None,
    store_credentials: StoreCredentials = None,
    fresh: Fresh = False,
    plain: Plain = False,
) -> None:
    """Run the whole pipeline here: two sources, real tasks, a small model, five steps."""
    name = "smollm2.toml" if policy == "smollm2" else "demo.toml"
    given = (
        steps,
        policy,
        run_name,
        directory,
        nats,
        nats_token_file,
        store,
        store_endpoint,
        store_credentials,
    )
    _launch(Path(__file__).with_name(name), given, fresh, plain)


@app.command(
    "up", help="As `run`: with --ray the rollout hosts are on a Ray cluster, all else on this machine."
)
@app.command()
def run(
    file: ConfigArgument,
    ray: Annotated[
        str,
        typer.Option(
            help="A running Ray cluster: auto, host:port or ray://host:port. Rollout hosts are its actors."
        ),
    ] = "",
    groups_from: GroupsFrom = "",
    steps: Steps = None,
    policy: Policy = None,
    run_name: RunName = None,
    directory: Directory = None,
    nats: Nats = None,
    nats_token_file: NatsTokenFile = None,
    store: Store = None,
    store_endpoint: StoreEndpoint = None,
    store_credentials: StoreCredentials = None,
    fresh: Fresh = False,
    plain: Plain = False,
) -> None:
    """Run a configuration, all processes on this machine."""
    given = (
        steps,
        policy,
        run_name,
        directory,
        nats,
        nats_token_file,
        store,
        store_endpoint,
        store_credentials,
    )
    _launch(file, given, fresh, plain, ray, groups_from)


_OPTIONS = (
    ("--steps", "steps"),
    ("--policy", "engine.policy"),
    ("--run", "run"),
    ("--directory", "directory"),
    ("--nats", "broker.url"),
    ("--nats-token-file", "broker.token_file"),
    ("--store", "store.url"),
    ("--store-endpoint", "store.endpoint"),
    ("--store-credentials", "store.credentials_file"),
)


def overrides(values: tuple[Any, ...], options: tuple[tuple[str, str], ...] = _OPTIONS) -> list[Override]:
    """The given options as overrides of the configuration, in the order of `options`."""
    from pipeline.config import Override

    return [
        Override(option, tuple(path.split(".")), str(value) if isinstance(value, Path) else value)
        for (option, path), value in zip(options, values, strict=True)
        if value is not None
    ]


def _launch(
    file: Path, given: tuple[Any, ...], fresh: bool, plain: bool, ray: str = "", groups_from: str = ""
) -> None:
    with one_line():
        from services.cli import launch
        from services.cli.check import load_checked

        config = load_checked(file, overrides(given))
        options = launch.Options(fresh=fresh, plain=plain, ray=ray, groups_from=groups_from)
        status = launch.run(config, options, console())
    raise typer.Exit(status)


@app.command()
@reading()
def status(
    where: Where,
    named: RunArgument = None,
    json_: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every other second, until Ctrl-C.")] = False,
) -> None:
    """Print the hosts of a run that goes on: tenants, lag, what they wait for, which are silent, and what binds."""
    with one_line():
        from services.cli import status as statuses

        statuses.show(where.of(named), json_, watch, console(), typer.echo)


@app.command()
def service(
    name: Annotated[
        str,
        typer.Argument(
            help="dispatcher, agent-loop, harness, grader, teacher, sampler, hook, packer, trainer, engine, collector or dashboard."
        ),
    ],
    config: Annotated[Path, typer.Option(help="The run's config.toml.")],
    index: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Which host, packer (cp fastest, then dp, pp) or rank (tp fastest, then cp, dp, pp) this is. Without: a host is "
            "named by its machine, a packer takes the lowest free place in packer.socket_dir or stands by, a trainer is all ranks.",
        ),
    ] = None,
    pool: Annotated[str, typer.Option(help="The harness host's pool.")] = "",
    metrics_bind: Annotated[
        str | None,
        typer.Option(
            help="host:port in place of metrics.bind, where two services have one address, as in a pod."
        ),
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option(help="host:port in place of trainer.rendezvous, for a rank.")
    ] = None,
) -> None:
    """Run one service, as every deployment does."""
    with one_line():
        from services.cli.service import OWN, serve

        serve(name, config, index, pool, overrides((metrics_bind, rendezvous), OWN))


@app.command()
@reading()
def limit(
    where: Where,
    concurrency: Annotated[
        int | None,
        typer.Argument(
            metavar="N", min=0, max=1_000_000, help="How many run at once from now on; 0: no limit."
        ),
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="Of this pool: trials in all its harness hosts together.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Of this source: sequences, in groups; those that run go on.")
    ] = None,
    json_: Json = False,
) -> None:
    """Show how much of each pool and source may run at once, or change it while the run goes on."""
    with one_line():
        from services.cli import limit as limits
        from services.cli.embedded import BadInput

        if concurrency is None and pool is None and source is None:
            limits.show(where, json_, typer.echo)
            return
        name = pool if source is None else source
        if concurrency is None or name is None or (pool is not None and source is not None):
            raise BadInput(
                "give N and one of --pool and --source, as in limit --pool chat 16; or nothing, to look"
            )
        of = "pool" if source is None else "source"
        limits.put(where, of, name, concurrency, typer.echo)


@config_app.command()
def check(file: ConfigArgument) -> None:
    """Say whether a configuration can be run here; every fault at once."""
    with one_line():
        from services.cli.check import load_checked
        from services.cli.live import counted

        config = load_checked(file)
    sources = ", ".join(source.name for source in config.sources)
    typer.echo(f"{file}: run {config.run}, {counted(config.steps, 'step')}, sources {sources}")


@config_app.command("show")
def config_show(file: ConfigArgument) -> None:
    """Print a configuration with every default filled in."""
    with one_line():
        from pipeline.config import dumps, load

        typer.echo(dumps(load(file)), nl=False)


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of a configuration, every field described."""
    with one_line():
        import json

        from schemas.config import RunConfig

        typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


@events_app.command("list")
@reading()
def events_list(
    where: Where,
    named: RunArgument = None,
    type_: Type = None,
    source: Source = None,
    id_: Id = None,
    json_: Json = False,
) -> None:
    """Print the events that are in the log."""
    _events(where.of(named), (type_, source, id_), json_, follow=False)


@events_app.command("tail")
@reading()
def events_tail(
    where: Where,
    named: RunArgument = None,
    type_: Type = None,
    source: Source = None,
    id_: Id = None,
    json_: Json = False,
) -> None:
    """Print events as they come, until the run stops or Ctrl-C."""
    _events(where.of(named), (type_, source, id_), json_, follow=True)


def _events(
    where: Where,
    filters: tuple[str | None, str | None, str | None],
    as_json: bool,
    follow: bool,
) -> None:
    with one_line():
        from services.cli import events

        chosen = events.Filter(*filters)
        events.show(where, chosen, as_json, follow, typer.echo, note)


@payload_app.command("show")
@reading()
def payload_show(
    where: Where,
    what: Annotated[
        str,
        typer.Argument(
            metavar="SEQUENCE|KEY",
            help="A finished sequence, as calculator-000022-7, or the key of an object.",
        ),
    ],
) -> None:
    """Print a payload's columns and its text, with the tokens that carry loss highlighted."""
    with one_line():
        from services.cli import payload

        payload.show(what, where, console())


def main() -> None:
    """The command line as a process."""
    status: object = 0
    try:
        app(prog_name="packtrain")
    except SystemExit as ended:
        status = ended.code
    if "obstore" not in sys.modules:
        raise SystemExit(status)
    # The object store's client has threads of its own. One that still lets go of a Python object while the interpreter is
    # taken down aborts the process, after all is done and said.
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    main()
