"""`packtrain store` on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.options import DEFAULT_DIRECTORY, ConfigFile, RunName, Runs, one_line

app = typer.Typer(no_args_is_help=True, help="What the object store is to allow.")


@app.callback()
def _group() -> None:
    """Makes `policy` a command of its own group, of which there is one."""


@app.command()
def policy(
    service: Annotated[
        str, typer.Argument(help="A service as `packtrain service` names it, launcher or reader.")
    ],
    config: ConfigFile = None,
    directory: Runs = DEFAULT_DIRECTORY,
    run_name: RunName = None,
) -> None:
    """Print the least that a service's S3 user must be allowed, as an AWS policy document (JSON)."""
    with one_line():
        import json
        from urllib.parse import urlsplit

        from pipeline.store.policies import SERVICES, policy_for
        from services.cli.embedded import BadInput
        from services.cli.reach import find_run

        found = find_run(config, directory, run_name)
        url = urlsplit(found.store.url)
        if url.scheme != "s3":
            raise BadInput(
                f"run {found.run} has its objects in {found.store.url}, which has no users: policies are for s3://"
            )
        if service not in SERVICES:
            raise BadInput(f"no service {service[:80]!r} has a policy; services: {', '.join(SERVICES)}")
        typer.echo(json.dumps(policy_for(service, found.run, url.netloc, url.path.strip("/")), indent=2))
