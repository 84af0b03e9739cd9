"""`packtrain dlq`: dead letters, and what a person does about them."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.options import DEFAULT_DIRECTORY, ConfigFile, Json, RunName, Runs, note, one_line

app = typer.Typer(no_args_is_help=True, help="Messages that nobody could handle: see, retry or drop them.")

Letters = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LETTER...", help="As in `dlq list`: READER/SEQ, or SEQ where that is one letter."
    ),
]
AllOf = Annotated[
    str | None, typer.Option("--all-of", metavar="READER", help="Every open letter of a reader.")
]


@app.command("list")
def list_(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="The newest run unless given.")] = None,
    config: ConfigFile = None,
    directory: Runs = DEFAULT_DIRECTORY,
    run_name: RunName = None,
    all_: Annotated[bool, typer.Option("--all", help="Also those that were retried or dropped.")] = False,
    json_: Json = False,
) -> None:
    """Print the open dead letters, one a line."""
    with one_line():
        from services.cli import dlq

        dlq.show_all(dlq.Where(config, directory, run or run_name), all_, json_, typer.echo, note)


@app.command()
def show(
    letter: Annotated[
        str, typer.Argument(metavar="LETTER", help="READER/SEQ, or SEQ where that is one letter.")
    ],
    config: ConfigFile = None,
    directory: Runs = DEFAULT_DIRECTORY,
    run_name: RunName = None,
) -> None:
    """Print a dead letter: reason, headers and body."""
    with one_line():
        from services.cli import dlq

        dlq.show_one(dlq.Where(config, directory, run_name), letter, typer.echo)


@app.command()
def retry(
    letters: Letters = None,
    all_of: AllOf = None,
    config: ConfigFile = None,
    directory: Runs = DEFAULT_DIRECTORY,
    run_name: RunName = None,
) -> None:
    """Give the original messages to their readers again, as if for the first time."""
    with one_line():
        from services.cli import dlq

        dlq.change(dlq.Where(config, directory, run_name), letters or [], all_of, "retry", typer.echo)


@app.command()
def drop(
    letters: Letters = None,
    all_of: AllOf = None,
    config: ConfigFile = None,
    directory: Runs = DEFAULT_DIRECTORY,
    run_name: RunName = None,
) -> None:
    """Mark dead letters as seen: they are no longer listed, and stay in the log."""
    with one_line():
        from services.cli import dlq

        dlq.change(dlq.Where(config, directory, run_name), letters or [], all_of, "drop", typer.echo)
