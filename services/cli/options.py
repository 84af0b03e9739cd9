"""What the commands of `packtrain` share: their options, where results go, and how an error ends a command."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_DIRECTORY = Path(".packtrain")
FAILED = 1
BAD_INPUT = 2
_PIPED_WIDTH = 140

Steps = Annotated[int | None, typer.Option(help="Optimizer steps.")]
Policy = Annotated[str | None, typer.Option(help="tiny, smollm2, or a policy directory.")]
RunArgument = Annotated[
    str | None, typer.Argument(metavar="RUN", help="Name of the run, as --run; the newest unless given.")
]
RunName = Annotated[str | None, typer.Option("--run", help="Name of the run.")]
Directory = Annotated[
    Path | None,
    typer.Option(help="Where broker, objects, logs and sockets are kept; .packtrain unless the file says."),
]
Nats = Annotated[
    str | None,
    typer.Option(help="A NATS server with JetStream, nats://host:port, instead of an embedded one."),
]
NatsTokenFile = Annotated[Path | None, typer.Option(help="File with the token of --nats.")]
Store = Annotated[
    str | None,
    typer.Option(
        help="An object store, s3://bucket/prefix, instead of files; the bucket is made if need be."
    ),
]
StoreEndpoint = Annotated[str | None, typer.Option(help="S3 endpoint of --store, http(s)://host:port.")]
StoreCredentials = Annotated[
    Path | None, typer.Option(help="JSON file with access_key and secret_key of --store.")
]
GroupsFrom = Annotated[
    str,
    typer.Option(
        metavar="RUN",
        help="Begin with the groups that this run, of the same broker and store, had accepted and put into no batch.",
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Leave an unfinished run where it is and start the next one.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")]

ConfigArgument = Annotated[Path, typer.Argument(help="Configuration of a run, TOML.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A run's config.toml.")]
Runs = Annotated[
    Path, typer.Option("--directory", help="The launcher's directory; its newest run unless --run is given.")
]
Type = Annotated[str | None, typer.Option("--type", help="Only this event type, as sequence.finished.")]
Source = Annotated[
    str | None, typer.Option(help="Only this source, pool or host; hosts are named as in sequence.opened.")
]
Id = Annotated[
    str | None, typer.Option("--id", help="Only events of this sample, sequence, attempt or step.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
GIVEN_AS: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("given_as", default=())
"""Keys of a configuration in whose place the command was given options, with the options: what its errors call them."""


def console() -> Console:
    """Where results go: as wide as the terminal, or wide enough for the tables when there is none."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            end_unread()

    return Piped() if sys.stdout.isatty() else Piped(width=_PIPED_WIDTH)


def end_unread() -> NoReturn:
    """Ends the command quietly, as the signal would end it that Python ignores: nobody reads its output any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(128 + signal.SIGPIPE)


def _unread() -> bool:
    """Whether stdout is a pipe that its reader has closed."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except OSError:
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def note(line: str) -> None:
    """Tells a person something that is no part of the result."""
    typer.echo(f"packtrain: {line}", err=True)


@contextmanager
def one_line() -> Iterator[None]:
    """Ends the command with one line a fault for every error that is not a bug."""
    # What the library warns about while it retries is for a service's log; a command tells how it ended.
    logging.getLogger("packtrain").addHandler(logging.NullHandler())
    try:
        yield
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread():
            end_unread()
        status = status_of(error)
        if status is None:
            raise
        for line in _as_given(error).splitlines():
            note(line)
        raise typer.Exit(status) from None


def _as_given(error: Exception) -> str:
    from pipeline.config import ConfigError

    told = str(error)
    if not isinstance(error, ConfigError):  # what is wrong in a file has the file's own names
        for key, option in GIVEN_AS.get():
            told = told.replace(key, option)
    return told


def status_of(error: Exception) -> int | None:
    """The exit status of an expected error, None for a bug. Imports only modules that raised it or may have."""
    from pipeline.config import ConfigError
    from pipeline.log import BrokerUnavailable, LogError
    from pipeline.store import BadStore, StoreError
    from schemas.names import BadName
    from services.cli.embedded import BadInput, LaunchError
    from services.cli.supervise import GaveUp

    if isinstance(error, ConfigError | BadInput | BadName | BadStore):
        return BAD_INPUT
    return (
        FAILED
        if isinstance(error, LaunchError | GaveUp | BrokerUnavailable | LogError | StoreError)
        else None
    )
