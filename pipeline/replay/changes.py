"""The decision part of a run's configuration with some values changed.

Promises:
- only what enters the log in `run.started` can be changed: steps, batch, mixer and sources; a source is addressed by its name;
- what comes out is as valid as what a run could start with, its built-in hooks too; else one `BadChange` names path, value and what is wrong.
"""

from __future__ import annotations

import copy
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import ValidationError

from pipeline.signal.hooks import BadHook, built_in, chain
from schemas.config import Decisions


class BadChange(ValueError):
    """A change that cannot be made; the message names the path, what is wrong and the remedy."""


def read_setting(text: str) -> tuple[str, Any]:
    """`path=value` as (path, value). The value is TOML; one that is not TOML is text."""
    path, sign, value = text.partition("=")
    if not sign or not path.strip():
        raise BadChange(f"{text[:200]!r} is not path=value, as sources.arithmetic.accept.max=0.9")
    try:
        read = tomllib.loads(f"value = {value.strip()}")
    except tomllib.TOMLDecodeError:
        return path.strip(), value.strip()
    return path.strip(), read["value"] if set(read) == {"value"} else value.strip()


def change(recorded: Mapping[str, Any], settings: Sequence[tuple[str, Any]]) -> Decisions:
    """The decisions of `run.started` with each (path, value) put in place; raises BadChange."""
    whole: dict[str, Any] = copy.deepcopy(dict(recorded))
    for path, value in settings:
        _put(whole, path, value)
    try:
        # Strict, or `batch.dp=true` would be one rank; by way of JSON, since strict Python input has no tuples in it.
        decisions = Decisions.model_validate_json(json.dumps(whole, default=str), strict=True)
    except ValidationError as error:
        raise BadChange("\n".join(_fault(d, whole) for d in error.errors(include_url=False))) from error
    if decisions.steps < 1:
        raise BadChange(f"steps = {decisions.steps}: a run has at least 1")
    for source in decisions.sources:
        try:
            # Other people's hooks are not imported here: a replay does not run them.
            if built_in(source):
                chain(source)
        except ValidationError as error:
            faults = (_fault(d, {}) for d in error.errors(include_url=False))
            raise BadChange("\n".join(f"sources.{source.name}.hooks: {fault}" for fault in faults)) from error
        except BadHook as error:
            raise BadChange(f"sources.{source.name}.hooks: {error}") from error
    if not decisions.training():
        raise BadChange("no source has groups > 0: there would be no batch")
    return decisions


def _put(whole: dict[str, Any], path: str, value: Any) -> None:
    place: Any = whole
    parts = path.split(".")
    for depth, part in enumerate(parts):
        shown = ".".join(parts[:depth]) or "the decision part of the configuration"
        if isinstance(place, list):
            if parts[:depth] != ["sources"]:
                raise BadChange(f"{path}: {shown} is a list, which is changed as a whole: {shown}=[...]")
            sources = cast("list[dict[str, Any]]", place)
            names = [source.get("name") for source in sources]
            if part not in names:
                raise BadChange(f"{path}: no source {part!r}; sources: {', '.join(map(str, names))}")
            if depth == len(parts) - 1:
                raise BadChange(f"{path}: a source is changed key by key, as {path}.groups=2")
            place = sources[names.index(part)]
            continue
        if not isinstance(place, dict):
            raise BadChange(f"{path}: {shown} is a value, it has no keys")
        known = cast("dict[str, Any]", place)
        # The options of an environment are its own: any key may stand there.
        if part not in known and parts[depth - 1 : depth] != ["options"]:
            near = difflib.get_close_matches(part, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"keys: {', '.join(sorted(known))}"
            raise BadChange(f"{path}: no key {part!r} in {shown}; {hint}")
        if depth == len(parts) - 1:
            known[part] = value
        else:
            place = known.get(part)


def _fault(detail: Any, whole: Mapping[str, Any]) -> str:
    shown: list[str] = []
    for part in detail["loc"]:
        if isinstance(part, int) and shown == ["sources"]:
            shown.append(str(whole["sources"][part].get("name", part)))
        else:
            shown.append(str(part))
    value = "" if isinstance(detail["input"], dict) else f" = {detail['input']!r}"[:100]
    return f"{'.'.join(shown)}{value}: {str(detail['msg']).removeprefix('Value error, ')}"
