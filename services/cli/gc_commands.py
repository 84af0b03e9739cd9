"""`packtrain gc` on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.options import RunArgument, console, one_line
from services.cli.where import Where, reading

app = typer.Typer()
_Steps = int | None


@app.command()
@reading()
def gc(
    where: Where,
    named: RunArgument = None,
    apply: Annotated[bool, typer.Option("--apply", help="Remove it; without, it is only shown.")] = False,
    orphans: Annotated[
        bool,
        typer.Option("--orphans", help="Also objects that no event names and that are older than an hour."),
    ] = False,
    rejected_steps: Annotated[
        _Steps, typer.Option(min=0, help="In place of the run's retention.rejected_steps.")
    ] = None,
    consumed_steps: Annotated[
        _Steps, typer.Option(min=0, help="In place of the run's retention.consumed_steps.")
    ] = None,
    checkpoint_steps: Annotated[
        _Steps, typer.Option(min=0, help="In place of the run's retention.checkpoint_steps.")
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON object a line for each object: key, bytes, reason.")
    ] = False,
) -> None:
    """Show what of a run's objects its retention no longer keeps; with --apply, remove it."""
    with one_line():
        from services.cli import gc as collection

        given = {
            "rejected_steps": rejected_steps,
            "consumed_steps": consumed_steps,
            "checkpoint_steps": checkpoint_steps,
        }
        request = collection.Request(
            where.of(named),
            {name: steps for name, steps in given.items() if steps is not None},
            orphans,
            apply,
            json_,
        )
        collection.collect(request, typer.echo, console().print)
