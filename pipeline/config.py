"""Run configuration as TOML: read, checked, and written back.

Promises:
- every fault of a file is told at once, each with file, path of the key, value, what is wrong, and the remedy; with its
  line, but for what concerns several sections and names them;
- `loads(dumps(config)) == config`.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from schemas.config import RunConfig

Path_ = tuple[int | str, ...]
_VALUE_CHARS = 80


class ConfigError(ValueError):
    """A configuration that cannot be used. `faults` has one line each."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))


@dataclass(frozen=True, slots=True)
class Override:
    """A value that a command-line option puts in place of the file's."""

    option: str
    path: tuple[str, ...]
    value: Any


def load(path: Path, overrides: Sequence[Override] = ()) -> RunConfig:
    """The configuration in a file; raises ConfigError, also for a file that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}; name a TOML file of a run"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"{path}: is not UTF-8 text (byte {error.start}); name a TOML file of a run"]
        ) from error
    return loads(text, str(path), overrides)


def loads(text: str, name: str, overrides: Sequence[Override] = ()) -> RunConfig:
    """The configuration in a text; `name` stands for it in errors. Raises ConfigError."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{name}: is not TOML: {error}"]) from error
    options: dict[tuple[str, ...], str] = {}
    for override in overrides:
        _put(given, override)
        options[override.path] = override.option
    try:
        # Strict, or `steps = true` would be one step and `steps = "8"` eight; by way of JSON, since strict Python input
        # has no tuples in it.
        return RunConfig.model_validate_json(json.dumps(given, default=str), strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        raise ConfigError(
            [_fault(d, name, text, options) for d in details if not _follows(d, details)]
        ) from error


def dumps(config: RunConfig) -> str:
    """The whole configuration as TOML, defaults included."""
    return tomli_w.dumps(config.model_dump(mode="json"))


def place(file: Path, path: Path_, overrides: Sequence[Override] = ()) -> str:
    """Where a value comes from, for a fault that is found later: the option that gave it, or `run.toml:12`, or the file.

    Raises OSError when the file is gone.
    """
    options = {override.path: override.option for override in overrides}
    return _place(path, str(file), file.read_text(encoding="utf-8"), options)


def shown(path: Path_) -> str:
    """`("sources", 0, "groups")` as `sources[0].groups`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else (f".{part}" if out else part)
    return out


def line_of(text: str, path: Path_) -> int | None:
    """The 1-based line of a key, or of the nearest table around it; None when neither has a line of its own.

    The TOML parser gives no positions. This reads the plain form that people write (headers, and one key a line); what
    it does not find costs the line number, never the message.
    """
    place: Path_ = ()
    arrays: dict[Path_, int] = {}
    best: tuple[int, int] | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*(\[\[?)\s*([\w.\-\" ]+?)\s*\]\]?\s*(#.*)?$", raw)
        key = re.match(r"\s*([\w\-]+(?:\.[\w\-]+)*)\s*=", raw)
        if header:
            place = _header(tuple(header[2].replace('"', "").split(".")), header[1] == "[[", arrays)
            found = place
        elif key:
            found = place + tuple(key[1].split("."))
        else:
            continue
        if found and path[: len(found)] == found and (best is None or len(found) > best[0]):
            best = (len(found), number)
    return best[1] if best else None


def _header(names: tuple[str, ...], array: bool, arrays: dict[Path_, int]) -> Path_:
    """The path that a table header stands for; `arrays` counts the elements of each array of tables so far."""
    path: Path_ = ()
    for i, name in enumerate(names):
        path = (*path, name.strip())
        if array and i == len(names) - 1:
            arrays[path] = arrays.get(path, -1) + 1
        if path in arrays:
            path = (*path, arrays[path])
    return path


def _put(given: dict[str, Any], override: Override) -> None:
    place = given
    for part in override.path[:-1]:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            return  # the file's own fault there is told by the validation
        place = cast("dict[str, Any]", inner)
    place[override.path[-1]] = override.value


def _follows(detail: ErrorDetails, details: Sequence[ErrorDetails]) -> bool:
    """Whether a list is called too short only because its elements are at fault."""
    path = detail["loc"]
    return detail["type"] == "too_short" and any(
        d["loc"][: len(path)] == path and d is not detail for d in details
    )


def _place(path: Path_, name: str, text: str, options: Mapping[tuple[str, ...], str]) -> str:
    line = line_of(text, path)
    return options.get(tuple(str(part) for part in path)) or (f"{name}:{line}" if line else name)


def _fault(detail: ErrorDetails, name: str, text: str, options: Mapping[tuple[str, ...], str]) -> str:
    path: Path_ = detail["loc"]
    where = _place(path, name, text, options)
    kind = detail["type"]
    if kind == "extra_forbidden":
        return f"{where}: unknown key {shown(path)}; {_nearest(path)}"
    if kind == "missing":
        return f"{where}: {shown(path)} is missing; give {_described(path) or 'it'}"
    what = detail["msg"].removeprefix("Value error, ")
    if kind == "value_error":  # our own validators name the thing, the value and the remedy
        return f"{where}: {shown(path)}: {what}" if path else f"{where}: {what}"
    value = repr(cast(object, detail["input"]))
    value = value if len(value) <= _VALUE_CHARS else value[:_VALUE_CHARS] + "..."
    described = _described(path)
    return f"{where}: {shown(path)} = {value}: {what[:1].lower()}{what[1:]}" + (
        f" ({described})" if described else ""
    )


def _nearest(path: Path_) -> str:
    section = _section(path[:-1])
    known = sorted(section.model_fields) if section else []
    near = difflib.get_close_matches(str(path[-1]), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known) or 'none'}"


def _described(path: Path_) -> str:
    section = _section(path[:-1])
    field = section.model_fields.get(str(path[-1])) if section else None
    return (field.description or "") if field else ""


def _section(path: Path_) -> type[BaseModel] | None:
    """The model that a path into the configuration leads to."""
    model: type[BaseModel] = RunConfig
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = field.annotation if field else None
        candidates: tuple[object, ...] = (inner, *get_args(inner))
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return None
        model = models[0]
    return model
