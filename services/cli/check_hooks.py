"""The hooks of a configuration: each must be there and take its options, and those of a source must fit together.

Promises: built-in hooks are made here, other people's are only asked for (`services.cli.plugins`), and so is what can be said
of a chain only with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from pydantic import ValidationError

from pipeline.signal.chain_faults import chain_faults
from pipeline.signal.hooks import BUILT_IN, WEIGHING, BadHook, built_in, resolve
from pipeline.signal.penalties import Weighing
from schemas.config import RunConfig, Source
from services.cli.plugins import Asked, refused

Place = tuple[int | str, ...]


@dataclass
class Told:
    """found: what is wrong. asked: of other people's hooks. fit: of chains with them, which is asked when nothing is wrong."""

    found: list[tuple[Place, str]] = field(default_factory=list[tuple[Place, str]])
    asked: list[tuple[Place, Asked]] = field(default_factory=list[tuple[Place, Asked]])
    fit: list[tuple[Place, Asked]] = field(default_factory=list[tuple[Place, Asked]])


def check_hooks(config: RunConfig) -> Told:
    told = Told()
    for i, source in enumerate(config.sources):
        at: Place = ("sources", i, "hooks")
        wrong = [((*at, j, *place), what) for j, place, what in _made(source)]
        wrong += [((*at[:2], *place), what) for place, what in _weighing(source)]
        told.asked += [
            ((*at, j), Asked("hook", hook.kind, hook.options))
            for j, hook in enumerate(source.hooks)
            if hook.kind not in BUILT_IN
        ]
        if not wrong and built_in(source):
            wrong += [(at, what) for what in chain_faults(config, source)]
        elif not wrong:
            given = {"config": config.model_dump(mode="json")}
            told.fit.append((at, Asked("chain", source.name, given)))
        told.found += wrong
    told.found += _unlike(config)
    return told


def _made(source: Source) -> Iterator[tuple[int, Place, str]]:
    """Built-in hooks that cannot be made: their number, the key in it, and why."""
    for j, hook in enumerate(source.hooks):
        if hook.kind in BUILT_IN:
            try:
                resolve(hook.kind, hook.options)
            except BadHook as error:
                yield j, (), str(error)
            except ValidationError as error:
                yield j, ("options",), refused(f"hook {hook.kind!r}", error)


def _weighing(source: Source) -> Iterator[tuple[Place, str]]:
    """The strategy `weigh` and the hook that it needs."""
    weighs = [i for i, penalty in enumerate(source.penalties) if penalty.strategy == "weigh"]
    hooks = [j for j, hook in enumerate(source.hooks) if hook.kind == WEIGHING]
    if weighs and not hooks:
        yield (
            ("penalties", weighs[0], "strategy"),
            f"strategy 'weigh' needs the hook {WEIGHING!r}: add it to the source's hooks, or use another strategy",
        )
    if hooks and not weighs:
        yield (
            ("hooks", hooks[0]),
            f"hook {WEIGHING!r} weighs what penalties with strategy 'weigh' flag, and the source has none: add one, or leave it out",
        )


def _unlike(config: RunConfig) -> list[tuple[Place, str]]:
    """Its options count for the whole batch."""
    all_ = [
        (("sources", i, "hooks", j), hook.options)
        for i, source in enumerate(config.sources)
        for j, hook in enumerate(source.hooks)
        if hook.kind == WEIGHING
    ]
    made: list[tuple[Place, Weighing]] = []
    for place, options in all_:
        with suppress(ValidationError):
            made.append((place, Weighing.model_validate(options)))
    return [
        (
            (*place, "options"),
            f"hook {WEIGHING!r} has {options!r} here and {made[0][1]!r} in sources.{made[0][0][1]}: its factors are the whole batch's; give all "
            "sources the same options",
        )
        for place, options in made[1:]
        if options != made[0][1]
    ]
