"""`packtrain schema`: the contract as documents, for consumers that have none of our code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import one_line

app = typer.Typer(no_args_is_help=True, help="Print the contract: JSON Schemas and AsyncAPI.")

Target = Annotated[Path, typer.Argument(metavar="DIR", help="Made if need be.")]


@app.command()
def asyncapi() -> None:
    """Print the AsyncAPI 3.0 document: every event, its subject, headers and body, and the rules of readers."""
    _print("asyncapi.json")


@app.command()
def events() -> None:
    """Print the JSON Schema of all event bodies."""
    _print("events.schema.json")


@app.command()
def plan() -> None:
    """Print the JSON Schema of a batch's plan."""
    _print("plan.schema.json")


@app.command()
def config() -> None:
    """Print the JSON Schema of a run's configuration."""
    _print("config.schema.json")


@app.command()
def write(directory: Target) -> None:
    """Write all of them as files."""
    with one_line():
        from schemas.documents import documents, rendered
        from services.cli.embedded import BadInput

        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, document in documents().items():
                (directory / name).write_text(rendered(document), encoding="utf-8")
                typer.echo(directory / name)
        except OSError as error:
            raise BadInput(
                f"{directory} cannot be written: {error.strerror}; name another directory"
            ) from error


def _print(name: str) -> None:
    from schemas.documents import documents, rendered

    typer.echo(rendered(documents()[name]), nl=False)
