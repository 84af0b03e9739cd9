"""`packtrain replay` and `packtrain trace` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import RunArgument, note, one_line
from services.cli.where import Where, reading

app = typer.Typer()

_File = Annotated[
    Path | None, typer.Option("--file", help="A file of `packtrain export`, instead of a directory.")
]
_Json = Annotated[bool, typer.Option("--json", help="All of it as one JSON object.")]


@app.command()
@reading(without="config")
def replay(
    where: Where,
    named: RunArgument = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="SEQ|TIME", help="Up to this message, or this time (ISO 8601 with zone)."),
    ] = None,
    service: Annotated[
        str | None, typer.Option(help="sampler, mixer or yield; sampler and mixer unless given.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Change a value, as sources.arithmetic.accept.max=0.9; repeatable.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A changed configuration: its steps, batch, mixer and sources instead of the recorded. It does not name the run."
        ),
    ] = None,
    file: _File = None,
    json_: _Json = False,
) -> None:
    """Make a run's decisions again from its log, and compare; or say what other values would have changed.

    Offline and read-only. Exit status: 0 no decision diverged, 1 one did (or the log could not be reached), 2 bad input.
    """
    with one_line():
        from services.cli import replay as replaying

        request = replaying.Request(where.of(named), file, until, service, tuple(settings or ()), config)
        status = replaying.show(request, json_, typer.echo, note)
    raise typer.Exit(status)


@app.command()
@reading()
def trace(
    where: Where,
    id_: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="A sample, sequence or batch: calculator-000022, calculator-000022-7, 000004."
        ),
    ],
    file: _File = None,
    json_: _Json = False,
) -> None:
    """Print the causal life of a sample, sequence or batch, with durations."""
    with one_line():
        import asyncio

        from services.cli import trace as tracing

        asyncio.run(tracing.show(id_, where, file, json_, typer.echo, note))
