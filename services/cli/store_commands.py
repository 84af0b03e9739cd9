"""`packtrain store` on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.options import one_line
from services.cli.where import Where, reading

app = typer.Typer(no_args_is_help=True, help="What the object store is to allow.")


@app.callback()
def _group() -> None:
    """Makes `policy` a command of its own group, of which there is one."""


@app.command()
@reading()
def policy(
    where: Where,
    service: Annotated[
        str, typer.Argument(help="A service as `packtrain service` names it, launcher, reader or admin.")
    ],
    every_run: Annotated[
        bool, typer.Option("--every-run", help="Of all runs of the store, not of one.")
    ] = False,
    create_only: Annotated[
        bool,
        typer.Option(
            "--create-only",
            help="Have the server refuse to write over an object. For Amazon S3, and others that know s3:if-none-match.",
        ),
    ] = False,
) -> None:
    """Print the least that a service's S3 user must be allowed, as an AWS policy document (JSON)."""
    with one_line():
        import json
        from urllib.parse import urlsplit

        from pipeline.store.policies import EVERY_RUN, KINDS, policy_for
        from services.cli.embedded import BadInput
        from services.cli.reach import find_run

        found = find_run(where)
        if urlsplit(found.store.url).scheme != "s3":
            raise BadInput(
                f"run {found.run} has its objects in {found.store.url or 'files'}, which has no users: policies are for s3://; name a run that has a "
                "bucket with --config, or the bucket with --store"
            )
        if service not in KINDS:
            raise BadInput(f"no user {service[:80]!r} has a policy; users: {', '.join(KINDS)}")
        run = EVERY_RUN if every_run else found.run
        bucket, _, prefix = found.store.url.removeprefix("s3://").partition("/")
        try:
            document = policy_for(service, run, bucket, prefix.strip("/"), create_only=create_only)
        except ValueError as error:
            raise BadInput(str(error)) from error
        typer.echo(json.dumps(document, indent=2))
