"""The `packtrain` command line.

Promises:
- what goes wrong with input, files or servers is one line on stderr and an exit status that is not 0; a traceback is a
  bug of ours;
- a command imports what it needs when it runs, so that help and control services start fast.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.config import Override

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Event-sourced rollouts for agentic RL.",
)
config_app = typer.Typer(no_args_is_help=True, help="Check, show and describe configurations.")
events_app = typer.Typer(no_args_is_help=True, help="Read a run's event log.")
payload_app = typer.Typer(no_args_is_help=True, help="Read payload objects.")
app.add_typer(config_app, name="config")
app.add_typer(events_app, name="events")
app.add_typer(payload_app, name="payload")

DEFAULT_DIRECTORY = Path(".packtrain")
FAILED = 1
BAD_INPUT = 2
_PIPED_WIDTH = 140

Steps = Annotated[int | None, typer.Option(help="Optimizer steps.")]
Policy = Annotated[str | None, typer.Option(help="tiny, smollm2, or a policy directory.")]
RunName = Annotated[str | None, typer.Option("--run", help="Name of the run.")]
Directory = Annotated[
    Path | None,
    typer.Option(help="Where broker, objects, logs and sockets are kept; .packtrain unless the file says."),
]
Nats = Annotated[
    str | None,
    typer.Option(help="A NATS server with JetStream, nats://host:port, instead of an embedded one."),
]
NatsTokenFile = Annotated[Path | None, typer.Option(help="File with the token of --nats.")]
Store = Annotated[
    str | None,
    typer.Option(
        help="An object store, s3://bucket/prefix, instead of files; the bucket is made if need be."
    ),
]
StoreEndpoint = Annotated[str | None, typer.Option(help="S3 endpoint of --store, http(s)://host:port.")]
StoreCredentials = Annotated[
    Path | None, typer.Option(help="JSON file with access_key and secret_key of --store.")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Leave an unfinished run where it is and start the next one.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")]

ConfigArgument = Annotated[Path, typer.Argument(help="Configuration of a run, TOML.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A run's config.toml.")]
Runs = Annotated[
    Path, typer.Option("--directory", help="The launcher's directory; its newest run unless --run is given.")
]
Type = Annotated[str | None, typer.Option("--type", help="Only this event type, as sequence.finished.")]
Source = Annotated[
    str | None, typer.Option(help="Only this source, pool or host; hosts are named as in sequence.opened.")
]
Id = Annotated[
    str | None, typer.Option("--id", help="Only events of this sample, sequence, attempt or step.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line: envelope and body.")]


def console() -> Console:
    """Where results go: as wide as the terminal, or wide enough for the tables when there is none."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)


@contextmanager
def one_line() -> Iterator[None]:
    """Ends the command with one line a fault for every error that is not a bug."""
    # What the library warns about while it retries is for a service's log; a command tells how it ended.
    logging.getLogger("packtrain").addHandler(logging.NullHandler())
    try:
        yield
    except Exception as error:
        status = _status(error)
        if status is None:
            raise
        for line in str(error).splitlines():
            typer.echo(f"packtrain: {line}", err=True)
        raise typer.Exit(status) from None


def _status(error: Exception) -> int | None:
    """The exit status of an expected error, None for a bug. Imports only modules that raised it or may have."""
    from pipeline.config import ConfigError
    from pipeline.log import BrokerUnavailable
    from pipeline.store import BadStore, StoreError
    from schemas.names import BadName
    from services.cli.embedded import BadInput, LaunchError
    from services.cli.supervise import GaveUp

    if isinstance(error, ConfigError | BadInput | BadName | BadStore):
        return BAD_INPUT
    return FAILED if isinstance(error, LaunchError | GaveUp | BrokerUnavailable | StoreError) else None


@app.command()
def demo(
    steps: Steps = None,
    policy: Policy = None,
    run_name: RunName = None,
    directory: Directory = None,
    nats: Nats = None,
    nats_token_file: NatsTokenFile = None,
    store: Store = None,
    store_endpoint: StoreEndpoint = None,
    store_credentials: StoreCredentials = None,
    fresh: Fresh = False,
    plain: Plain = False,
) -> None:
    """Run the whole pipeline here: two sources, real tasks, a small model, five steps."""
    name = "smollm2.toml" if policy == "smollm2" else "demo.toml"
    given = (
        steps,
        policy,
        run_name,
        directory,
        nats,
        nats_token_file,
        store,
        store_endpoint,
        store_credentials,
    )
    _launch(Path(__file__).with_name(name), given, fresh, plain)


@app.command()
def run(
    file: ConfigArgument,
    steps: Steps = None,
    policy: Policy = None,
    run_name: RunName = None,
    directory: Directory = None,
    nats: Nats = None,
    nats_token_file: NatsTokenFile = None,
    store: Store = None,
    store_endpoint: StoreEndpoint = None,
    store_credentials: StoreCredentials = None,
    fresh: Fresh = False,
    plain: Plain = False,
) -> None:
    """Run a configuration, all processes on this machine."""
    given = (
        steps,
        policy,
        run_name,
        directory,
        nats,
        nats_token_file,
        store,
        store_endpoint,
        store_credentials,
    )
    _launch(file, given, fresh, plain)


_OPTIONS = (
    ("--steps", "steps"),
    ("--policy", "engine.policy"),
    ("--run", "run"),
    ("--directory", "directory"),
    ("--nats", "broker.url"),
    ("--nats-token-file", "broker.token_file"),
    ("--store", "store.url"),
    ("--store-endpoint", "store.endpoint"),
    ("--store-credentials", "store.credentials_file"),
)


def overrides(values: tuple[Any, ...]) -> list[Override]:
    """The given options as overrides of the configuration, in the order of `_OPTIONS`."""
    from pipeline.config import Override

    return [
        Override(option, tuple(path.split(".")), str(value) if isinstance(value, Path) else value)
        for (option, path), value in zip(_OPTIONS, values, strict=True)
        if value is not None
    ]


def _launch(file: Path, given: tuple[Any, ...], fresh: bool, plain: bool) -> None:
    with one_line():
        from services.cli import launch
        from services.cli.check import load_checked

        config = load_checked(file, overrides(given))
        status = launch.run(config, launch.Options(fresh=fresh, plain=plain), console())
    raise typer.Exit(status)


@app.command()
def service(
    name: Annotated[
        str,
        typer.Argument(help="dispatcher, agent-loop, harness, grader, sampler, packer, trainer or engine."),
    ],
    config: Annotated[Path, typer.Option(help="The run's config.toml.")],
    index: Annotated[int, typer.Option(min=0, help="Which host, packer or rank this is.")] = 0,
    pool: Annotated[str, typer.Option(help="The harness host's pool.")] = "",
) -> None:
    """Run one service, as every deployment does."""
    with one_line():
        from services.cli.service import serve

        serve(name, config, index, pool)


@config_app.command()
def check(file: ConfigArgument) -> None:
    """Say whether a configuration can be run here; every fault at once."""
    with one_line():
        from services.cli.check import load_checked
        from services.cli.live import counted

        config = load_checked(file)
    sources = ", ".join(source.name for source in config.sources)
    typer.echo(f"{file}: run {config.run}, {counted(config.steps, 'step')}, sources {sources}")


@config_app.command("show")
def config_show(file: ConfigArgument) -> None:
    """Print a configuration with every default filled in."""
    with one_line():
        from pipeline.config import dumps, load

        typer.echo(dumps(load(file)), nl=False)


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of a configuration, every field described."""
    import json

    from schemas.config import RunConfig

    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


@events_app.command("list")
def events_list(
    config: ConfigFile = None,
    directory: Runs = DEFAULT_DIRECTORY,
    run_name: RunName = None,
    type_: Type = None,
    source: Source = None,
    id_: Id = None,
    json_: Json = False,
) -> None:
    """Print the events that are in the log."""
    _events(config, directory, run_name, (type_, source, id_), json_, follow=False)


@events_app.command("tail")
def events_tail(
    config: ConfigFile = None,
    directory: Runs = DEFAULT_DIRECTORY,
    run_name: RunName = None,
    type_: Type = None,
    source: Source = None,
    id_: Id = None,
    json_: Json = False,
) -> None:
    """Print events as they come, until the run stops or Ctrl-C."""
    _events(config, directory, run_name, (type_, source, id_), json_, follow=True)


def _events(
    config: Path | None,
    directory: Path,
    run_name: str | None,
    filters: tuple[str | None, str | None, str | None],
    as_json: bool,
    follow: bool,
) -> None:
    with one_line():
        from services.cli import events

        def note(line: str) -> None:
            typer.echo(f"packtrain: {line}", err=True)

        chosen = events.Filter(*filters)
        events.show(config, directory, run_name, chosen, as_json, follow, typer.echo, note)


@payload_app.command("show")
def payload_show(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SEQUENCE|KEY",
            help="A finished sequence, as calculator-000022-7, or the key of an object.",
        ),
    ],
    config: ConfigFile = None,
    directory: Runs = DEFAULT_DIRECTORY,
    run_name: RunName = None,
) -> None:
    """Print a payload's columns and its text, with the tokens that carry loss highlighted."""
    with one_line():
        from services.cli import payload

        payload.show(what, config, directory, run_name, console())


if __name__ == "__main__":
    app(prog_name="packtrain")
