"""`packtrain dlq`: dead letters, and what a person does about them."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.options import Json, RunArgument, note, one_line
from services.cli.where import Where, reading

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
@reading()
def list_(
    where: Where,
    named: RunArgument = None,
    all_: Annotated[bool, typer.Option("--all", help="Also those that were retried or dropped.")] = False,
    json_: Json = False,
) -> None:
    """Print the open dead letters, one a line."""
    with one_line():
        from services.cli import dlq

        dlq.show_all(where.of(named), all_, json_, typer.echo, note)


@app.command()
@reading()
def show(
    where: Where,
    letter: Annotated[
        str, typer.Argument(metavar="LETTER", help="READER/SEQ, or SEQ where that is one letter.")
    ],
) -> None:
    """Print a dead letter: reason, headers and body."""
    with one_line():
        from services.cli import dlq

        dlq.show_one(where, letter, typer.echo)


@app.command()
@reading()
def retry(
    where: Where,
    letters: Letters = None,
    all_of: AllOf = None,
) -> None:
    """Give the original messages to their readers again, as if for the first time."""
    with one_line():
        from services.cli import dlq

        dlq.change(where, letters or [], all_of, "retry", typer.echo)


@app.command()
@reading()
def drop(
    where: Where,
    letters: Letters = None,
    all_of: AllOf = None,
) -> None:
    """Mark dead letters as seen: they are no longer listed, and stay in the log."""
    with one_line():
        from services.cli import dlq

        dlq.change(where, letters or [], all_of, "drop", typer.echo)
