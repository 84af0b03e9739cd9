"""`packtrain broker` on the command line: what each user of the broker may do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import one_line

app = typer.Typer(no_args_is_help=True, help="Users of the broker, and what each may do.")
Kind = Annotated[str, typer.Argument(help="A service as `packtrain service` names it, launcher or reader.")]
Runs = Annotated[
    list[str] | None,
    typer.Option("--run", help="A run that it may take part in; again for more. Without: every run."),
]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--work",
        help="Name of a work consumer of the harness or teacher user (harness-<pool>), or of a durable of the reader (sub-<name>); "
        "again for more. Without: any for harness and teacher, none for the reader.",
    ),
]


@app.command()
def permissions(
    kind: Kind,
    run: Runs = None,
    work: Names = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Print the subjects that a user may publish and subscribe to. All else is refused."""
    with one_line():
        import json

        from pipeline.log.permissions import EVERY_RUN, KINDS, permissions_for
        from services.cli.embedded import BadInput

        if kind not in KINDS:
            raise BadInput(f"no user {kind[:80]!r} of the broker; users: {', '.join(KINDS)}")
        found = [permissions_for(kind, each, work) for each in run or (EVERY_RUN,)]
        told = {
            "publish": list(dict.fromkeys(s for each in found for s in each.publish)),
            "subscribe": list(dict.fromkeys(s for each in found for s in each.subscribe)),
        }
        if as_json:
            typer.echo(json.dumps(told, indent=2))
            return
        for what, subjects in told.items():
            typer.echo("\n".join((f"{what}:", *(f"  {subject}" for subject in subjects))))


@app.command()
def table() -> None:
    """Print what each user may do, as a table in Markdown."""
    with one_line():
        from pipeline.log.permissions import table

        typer.echo(table(), nl=False)


@app.command()
def users(
    directory: Annotated[
        Path, typer.Option(help="Where `packtrain secrets` keeps the keys: <directory>/broker/<user>.nk.")
    ] = Path(".secrets"),
    run: Runs = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Of this run's pools and teachers only, in place of any consumer for harness and teacher."
        ),
    ] = None,
    durable: Annotated[
        list[str] | None,
        typer.Option(help="A durable subscription that the reader may have; again for more."),
    ] = None,
) -> None:
    """Print users.conf for the server to include: public keys, and what each user may. Holds no secret."""
    with one_line():
        from pipeline.config import load
        from pipeline.log.permissions import EVERY_RUN, users_conf, work_of
        from pipeline.log.subscription import durable_name
        from services.cli.deploy_secrets import public_keys

        work: dict[str, tuple[str, ...]] = {} if config is None else work_of(load(config))
        work["reader"] = tuple(map(durable_name, durable or ()))
        typer.echo(users_conf(public_keys(directory), run or (EVERY_RUN,), work), nl=False)


@app.command()
def leaf(
    directory: Annotated[
        Path, typer.Option(help="Where `packtrain secrets` keeps the keys: <directory>/broker/<user>.nk.")
    ] = Path(".secrets"),
    run: Runs = None,
    domain: Annotated[str, typer.Option(help="JetStream's domain at the hub, as in its nats.conf.")] = "hub",
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Make the leaf's key anew; its hub takes it from leaf-key.conf.")
    ] = False,
) -> None:
    """Make what a leaf node needs (infra/nats/leaf.conf): <directory>/leaf/users.conf and leaf-seed.conf; and leaf-key.conf for its hub.

    Its users may what `packtrain secrets` was told last; --run names other runs.
    """
    with one_line():
        from services.cli.leaf_secrets import make_leaf

        at = make_leaf(directory, run or (), domain, rotate)
        typer.echo(f"{at}: users.conf and leaf-seed.conf for the leaf node, leaf-key.conf for its hub")
