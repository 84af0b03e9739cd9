"""`packtrain scaffolds`: the agents of `harbor` pools, installed at the versions that they are described at."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import Json, console, note, one_line

app = typer.Typer(no_args_is_help=True, help="Install and list agent scaffolds, for harbor pools.")

_Folder = Annotated[
    Path, typer.Option("--folder", help="Where they are installed: the pool's option `folder`.")
]
_DEFAULT = Path(".scaffolds")


@app.command()
def install(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Scaffolds; all of them without a name.")
    ] = None,
    folder: _Folder = _DEFAULT,
) -> None:
    """Install scaffolds, each whole or not at all; what is there already costs nothing."""
    failed = False
    with one_line():
        from pipeline.harnesses.scaffolds import NAMES, UnknownScaffold, scaffold
        from pipeline.harnesses.scaffolds.install import Unavailable, at, ensure, megabytes
        from services.cli.embedded import BadInput

        try:
            asked = [scaffold(name) for name in names or NAMES]
        except UnknownScaffold as error:
            raise BadInput(str(error)) from error
        for each in asked:
            began = time.monotonic()
            try:
                _, new = ensure(each.name, folder)
            except Unavailable as error:
                note(f"{each.name}: {error}")
                failed = True
                continue
            where = at(each, folder)
            took = f", {time.monotonic() - began:.0f} s, {megabytes(where):.0f} MB" if new else ""
            typer.echo(f"{each.name} {each.version}: {where}{took}")
    if failed:
        raise typer.Exit(1)


@app.command("list")
def list_(folder: _Folder = _DEFAULT, json_: Json = False) -> None:
    """Print the scaffolds: version, protocols, and where they are installed."""
    with one_line():
        import json

        from pipeline.harnesses.scaffolds import NAMES, scaffold
        from pipeline.harnesses.scaffolds.install import at, installed

        rows = [
            {
                "name": each.name,
                "version": each.version,
                "wires": list(each.wires),
                "installed": str(at(each, folder)) if installed(each, folder) else None,
            }
            for each in map(scaffold, NAMES)
        ]
        if json_:
            for row in rows:
                typer.echo(json.dumps(row))
            return

        from rich.table import Table

        table = Table("scaffold", "version", "protocols", "installed", box=None)
        for row in rows:
            table.add_row(row["name"], row["version"], ", ".join(row["wires"]), row["installed"] or "no")
        console().print(table)
