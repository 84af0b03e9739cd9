"""`packtrain runs`, `export` and `import` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import (
    DEFAULT_DIRECTORY,
    ConfigFile,
    Json,
    Nats,
    NatsTokenFile,
    Plain,
    Store,
    StoreCredentials,
    StoreEndpoint,
    console,
    note,
    one_line,
)

if TYPE_CHECKING:
    from schemas.config import Broker

app = typer.Typer(no_args_is_help=True, help="List, stop, resume and remove runs.")
archive_app = typer.Typer()

_Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]
_Directory = Annotated[Path, typer.Option("--directory", help="The launcher's directory.")]


@app.command("list")
def list_(
    directory: _Directory = DEFAULT_DIRECTORY,
    nats: Nats = None,
    nats_token_file: NatsTokenFile = None,
    json_: Json = False,
) -> None:
    """Print the runs of a directory, or of a broker: what became of them, and when they were last heard of."""
    with one_line():
        import asyncio

        from services.cli import run_list

        rows = asyncio.run(run_list.list_runs(directory, _broker(nats, nats_token_file)))
        if json_:
            for row in rows:
                typer.echo(run_list.as_line(row))
        elif rows:
            console().print(run_list.table(rows))
        else:
            note(f"no runs in {nats or directory}")


@app.command()
def stop(
    run: _Run,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="End the run for good, on whatever machines its services are.")
    ] = False,
    directory: _Directory = DEFAULT_DIRECTORY,
    nats: Nats = None,
    nats_token_file: NatsTokenFile = None,
) -> None:
    """Stop the launcher of a run, which stays unfinished; or cancel the run."""
    with one_line():
        from services.cli import run_control
        from services.cli.embedded import BadInput

        broker = _broker(nats, nats_token_file)
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
def rm(
    run: _Run,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    directory: _Directory = DEFAULT_DIRECTORY,
    nats: Nats = None,
    nats_token_file: NatsTokenFile = None,
) -> None:
    """Remove a run for good: its log, snapshots, objects, record and secrets."""
    with one_line():
        import sys

        from services.cli import run_removal
        from services.cli.embedded import LaunchError

        def ask(told: str) -> bool:
            if yes:
                return True
            if not sys.stdin.isatty():
                raise LaunchError(f"{told}; nobody is here to ask: --yes removes it")
            return typer.confirm(f"{told}. Remove all of it?", err=True)

        removed = run_removal.remove(directory, run, _broker(nats, nats_token_file), ask, typer.echo)
    if not removed:
        raise typer.Exit(1)


@archive_app.command()
def export(
    what: Annotated[
        list[str],
        typer.Argument(metavar="[RUN] FILE", help="The run (the newest unless given), and the file."),
    ],
    payloads: Annotated[bool, typer.Option("--payloads", help="With the run's objects.")] = False,
    config: ConfigFile = None,
    directory: _Directory = DEFAULT_DIRECTORY,
) -> None:
    """Write a run into one file: its events, and if wanted its objects."""
    with one_line():
        from services.cli import archive
        from services.cli.embedded import BadInput

        if len(what) > 2:
            raise BadInput(f"export takes [RUN] FILE, {len(what)} arguments were given")
        run = what[0] if len(what) == 2 else None
        archive.export(run, Path(what[-1]), payloads, config, directory, typer.echo)


@archive_app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of `packtrain export`.")],
    directory: _Directory = DEFAULT_DIRECTORY,
    nats: Nats = None,
    nats_token_file: NatsTokenFile = None,
    store: Store = None,
    store_endpoint: StoreEndpoint = None,
    store_credentials: StoreCredentials = None,
) -> None:
    """Bring a run from its file into a directory's own broker and store, or into given ones."""
    with one_line():
        from schemas import config as sections
        from services.cli import archive

        place = sections.Store(
            url=store or "",
            endpoint=store_endpoint or "",
            credentials_file=str(store_credentials.absolute()) if store_credentials else "",
        )
        broker = _broker(nats, nats_token_file) or sections.Broker()
        archive.import_file(file, archive.Target(directory, broker, place), typer.echo)


def _broker(nats: str | None, token_file: Path | None) -> Broker | None:
    """The given broker, as a record names it; raises BadInput on an address that is none."""
    from pipeline.log.connection import BrokerUnavailable, check_address
    from schemas.config import Broker
    from services.cli.embedded import BadInput

    if nats is None:
        if token_file is not None:
            raise BadInput("--nats-token-file is the token of --nats, which is not given")
        return None
    try:
        check_address(nats)
        if "@" in nats:
            raise BadInput(
                "--nats may hold no credentials; put the token in a file and name it with --nats-token-file"
            )
    except BrokerUnavailable as error:
        raise BadInput(str(error)) from error
    return Broker(url=nats, token_file=str(token_file.absolute()) if token_file else "")
