"""`packtrain runs`, `export` and `import` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import (
    DEFAULT_DIRECTORY,
    GroupsFrom,
    Json,
    Plain,
    Store,
    StoreCredentials,
    StoreEndpoint,
    console,
    note,
    one_line,
)
from services.cli.where import BrokerOptions, Where, brokered, reading

if TYPE_CHECKING:
    from schemas import config as sections

app = typer.Typer(no_args_is_help=True, help="Begin, list, stop, resume and remove runs.")
archive_app = typer.Typer()

_Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]
_Directory = Annotated[Path, typer.Option("--directory", help="The launcher's directory.")]


@app.command("list")
@brokered
def list_(
    broker: BrokerOptions,
    directory: _Directory = DEFAULT_DIRECTORY,
    json_: Json = False,
) -> None:
    """Print the runs of a directory, or of a broker: what became of them, and when they were last heard of."""
    with one_line():
        import asyncio

        from services.cli import run_list
        from services.cli.reach import broker_given

        rows = asyncio.run(run_list.list_runs(directory, broker_given(broker)))
        if json_:
            for row in rows:
                typer.echo(run_list.as_line(row))
        elif rows:
            console().print(run_list.table(rows))
        else:
            note(f"no runs in {broker.nats or directory}")


@app.command()
def begin(
    config: Annotated[
        Path, typer.Option("--config", help="The configuration that all services of the run are given.")
    ],
    groups_from: GroupsFrom = "",
    wait_s: Annotated[
        float, typer.Option(min=0, help="Seconds that the broker and the store may take to answer.")
    ] = 60.0,
) -> None:
    """Begin a run whose services others start: make its bucket, stream and first fact, unless they are there."""
    with one_line():
        from services.cli import begin_run

        begin_run.begin_run(begin_run.load_deployed(config), groups_from, wait_s, typer.echo)


@app.command()
@brokered
def stop(
    options: BrokerOptions,
    run: _Run,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="End the run for good, on whatever machines its services are.")
    ] = False,
    directory: _Directory = DEFAULT_DIRECTORY,
) -> None:
    """Stop the launcher of a run, which stays unfinished; or cancel the run."""
    with one_line():
        from services.cli import run_control
        from services.cli.embedded import BadInput
        from services.cli.reach import broker_given

        broker = broker_given(options)
        if cancel:
            run_control.cancel(directory, run, broker, typer.echo)
        elif broker is not None:
            raise BadInput("--nats is for --cancel: without it, a launcher of this machine is stopped")
        else:
            run_control.stop(directory, run, typer.echo)


@app.command()
def resume(run: _Run, plain: Plain = False, directory: _Directory = DEFAULT_DIRECTORY) -> None:
    """Go on with an unfinished run, as the command that started it would."""
    with one_line():
        from services.cli import run_control

        status = run_control.resume(directory, run, plain, console())
    raise typer.Exit(status)


@app.command()
@brokered
def rm(
    broker: BrokerOptions,
    run: _Run,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    directory: _Directory = DEFAULT_DIRECTORY,
    store: Annotated[
        str | None,
        typer.Option(
            help="Where the run's objects are, s3://bucket/prefix or file:///path; a record here says it by itself."
        ),
    ] = None,
    store_endpoint: StoreEndpoint = None,
    store_credentials: StoreCredentials = None,
) -> None:
    """Remove a run for good: its log, snapshots, objects, record and secrets."""
    with one_line():
        import sys

        from services.cli import run_removal
        from services.cli.embedded import LaunchError
        from services.cli.reach import broker_given, check_store

        def ask(told: str) -> bool:
            if yes:
                return True
            if not sys.stdin.isatty():
                raise LaunchError(f"{told}; nobody is here to ask: --yes removes it")
            return typer.confirm(f"{told}. Remove all of it?", err=True)

        named = _named(store, store_endpoint, store_credentials)
        check_store(named.url)
        removed = run_removal.remove(
            directory, run, broker_given(broker), ask, typer.echo, named if named.url else None
        )
    if not removed:
        raise typer.Exit(1)


@archive_app.command()
@reading()
def export(
    where: Where,
    what: Annotated[
        list[str],
        typer.Argument(metavar="[RUN] FILE", help="The run (the newest unless given), and the file."),
    ],
    payloads: Annotated[bool, typer.Option("--payloads", help="With the run's objects.")] = False,
) -> None:
    """Write a run into one file: its events, and if wanted its objects."""
    with one_line():
        from services.cli import archive
        from services.cli.embedded import BadInput

        if len(what) > 2:
            raise BadInput(f"export takes [RUN] FILE, {len(what)} arguments were given")
        run = what[0] if len(what) == 2 else None
        archive.export(where.of(run), Path(what[-1]), payloads, typer.echo)


@archive_app.command("import")
@brokered
def import_(
    options: BrokerOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of `packtrain export`.")],
    directory: _Directory = DEFAULT_DIRECTORY,
    store: Store = None,
    store_endpoint: StoreEndpoint = None,
    store_credentials: StoreCredentials = None,
) -> None:
    """Bring a run from its file into a directory's own broker and store, or into given ones."""
    with one_line():
        from schemas import config as sections
        from services.cli import archive
        from services.cli.reach import broker_given

        place = _named(store, store_endpoint, store_credentials)
        broker = broker_given(options) or sections.Broker()
        archive.import_file(file, archive.Target(directory, broker, place), typer.echo)


def _named(url: str | None, endpoint: str | None, credentials: Path | None) -> sections.Store:
    """The store that options name; one without an address: they name none. Raises BadInput on options of a store that is not named."""
    from schemas.config import Store as Section
    from services.cli.embedded import BadInput

    if url is None and (endpoint or credentials):
        raise BadInput("--store-endpoint and --store-credentials say how --store is reached; name it too")
    return Section(
        url=url or "",
        endpoint=endpoint or "",
        credentials_file=str(credentials.absolute()) if credentials else "",
    )
