"""Which run a command means and how its broker and store are reached: the options that commands share, as one value.

A function under `reading` or `brokered` has a first parameter that is no option; its command has the shared options in its place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from services.cli.options import (
    DEFAULT_DIRECTORY,
    GIVEN_AS,
    ConfigFile,
    NatsTokenFile,
    RunName,
    Runs,
    StoreCredentials,
    StoreEndpoint,
)

NatsCredentials = Annotated[
    Path | None,
    typer.Option(
        help="File with the nkey seed of --nats's user: of `packtrain secrets` reader.nk to look, launcher.nk to change."
    ),
]
NatsCa = Annotated[
    Path | None, typer.Option(help="PEM file of the authority that signed --nats's certificate.")
]
_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class BrokerOptions:
    """How a broker is reached; None: as the run's own configuration says."""

    nats: Annotated[
        str | None,
        typer.Option(help="A NATS server with JetStream, nats://host:port or tls://host:port."),
    ] = None
    nats_token_file: NatsTokenFile = None
    nats_credentials: NatsCredentials = None
    nats_ca: NatsCa = None


@dataclass(frozen=True)
class Where(BrokerOptions):
    """A run: of a configuration, of a broker by its name, or of a launcher's directory, whose newest it is without a name."""

    config: ConfigFile = None
    directory: Runs = DEFAULT_DIRECTORY
    run: RunName = None
    store: Annotated[
        str | None, typer.Option(help="The run's object store, s3://bucket/prefix or file:///path.")
    ] = None
    store_endpoint: StoreEndpoint = None
    store_credentials: StoreCredentials = None

    def of(self, run: str | None) -> Where:
        """The same, of a run that was named by an argument."""
        return self if run is None else replace(self, run=run)


_KEYS = {
    "nats": "broker.url",
    "nats_token_file": "broker.token_file",
    "nats_credentials": "broker.credentials_file",
    "nats_ca": "broker.ca_file",
    "store": "store.url",
    "store_endpoint": "store.endpoint",
    "store_credentials": "store.credentials_file",
}
"""The keys of a configuration in whose place options stand. An address comes with all that is needed to reach it."""


def _given_as(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    whole = tuple(section for section in ("nats", "store") if values.get(section) is not None)
    return tuple(
        (key, f"--{name.replace('_', '-')}")
        for name, key in _KEYS.items()
        if values.get(name) is not None or name.startswith(whole)
    )


def reading(*, without: str = "") -> Callable[[_Command], _Command]:
    """Gives a command the options of `Where`, but for one that it has itself."""
    return _given(Where, without)


def brokered(command: _Command) -> _Command:
    """Gives a command the options of `BrokerOptions`."""
    return _given(BrokerOptions, "")(command)


def _given(what: type[BrokerOptions], without: str) -> Callable[[Any], Any]:
    hints: Mapping[str, Any] = get_type_hints(what, include_extras=True)
    shared = {field.name: field for field in fields(what) if field.name != without}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = get_type_hints(command, include_extras=True)
        first, *others = inspect.signature(command).parameters.values()

        @functools.wraps(command)
        def called(**values: Any) -> Any:
            given = _given_as(values)
            place = what(**{name: values.pop(name) for name in shared})
            before = GIVEN_AS.set(given)
            try:
                return command(**{first.name: place}, **values)
            finally:
                GIVEN_AS.reset(before)

        parameters = [
            parameter.replace(annotation=own[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in others
        ] + [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[name]
            )
            for name, field in shared.items()
        ]
        # What Typer reads; `wraps` left it the signature of the function within.
        called.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        del called.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
        return called

    return decorate
