"""`packtrain secrets` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import one_line

app = typer.Typer()
_Several = list[str] | None


@app.command()
def secrets(
    directory: Annotated[Path, typer.Option("--directory", help="Where the keys are kept.")] = Path(
        ".secrets"
    ),
    run: Annotated[
        _Several,
        typer.Option(
            "--run",
            metavar="NAME",
            help="A run that the users may touch, repeatable; '*' for every run, as it is at first.",
        ),
    ] = None,
    host: Annotated[
        _Several,
        typer.Option(
            "--host",
            metavar="NAME",
            help="A name or address that servers are reached at, beside localhost, 127.0.0.1, nats and broker; repeatable.",
        ),
    ] = None,
    bucket: Annotated[
        str | None, typer.Option(help="The store's bucket; packtrain unless it is given once.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="The store's prefix in its bucket.")] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A run whose pools and teachers harness and teacher may work for, and no others; repeatable.",
        ),
    ] = None,
    durable: Annotated[
        _Several,
        typer.Option(metavar="NAME", help="A durable subscription that the reader may have; repeatable."),
    ] = None,
    rotate: Annotated[
        _Several,
        typer.Option(
            metavar="KEY",
            help="Make these keys anew, repeatable: a service's, launcher, reader, admin, run-key, engine-token, grafana-password, server or authority.",
        ),
    ] = None,
) -> None:
    """Make the keys and certificates of a deployment that are not there yet, and `.env`, which says where they are.

    What is not given is as it was the last time.
    """
    with one_line():
        from pipeline.config import load
        from pipeline.log.permissions import work_of
        from pipeline.log.subscription import durable_name
        from services.cli import deploy_secrets

        work: dict[str, list[str]] = {}
        for file in config or ():
            for kind, names in work_of(load(file)).items():
                work.setdefault(kind, []).extend(names)
        if durable:
            work["reader"] = [durable_name(name) for name in durable]
        given = deploy_secrets.Given(run or (), host or (), bucket, prefix, work, rotate or ())
        deploy_secrets.make(directory, given, Path(".env"), typer.echo)
