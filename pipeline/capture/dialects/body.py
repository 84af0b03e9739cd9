"""A request's body, whatever its protocol: JSON text to a checked model, its digest, and what of it had no effect.

Promises: equal digests for bodies that are equal as JSON, whatever the order of their keys; half a surrogate pair, which
clients write when they cut a text in the middle of a character, becomes U+FFFD, a number beyond a double's range null,
and the body is counted as repaired; every other text that is not JSON, and every value that does not fit, is a
`BadRequest` that says where.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from typing import Any, TypeVar, cast

import orjson
from pydantic import BaseModel, ValidationError

from pipeline.capture.call import BadRequest
from pipeline.capture.messages import Message

M = TypeVar("M", bound=BaseModel)
REPAIRED = "(repaired)"
"""What a repaired body counts as in `Call.ignored`."""

_SHOWN = 60
_SURROGATES = re.compile("[\ud800-\udfff]")


def load(body: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The object, and what of it was ignored: ("(repaired)",) or (). Raises BadRequest."""
    try:
        given, whole = read_json(body)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadRequest("the body is not a JSON object")
    return cast("dict[str, Any]", given), () if whole else (REPAIRED,)


def read_json(text: bytes | str) -> tuple[Any, bool]:
    """The value, and whether it is as it was written: False when it had to be repaired. Raises ValueError."""
    try:
        return orjson.loads(text), True
    except orjson.JSONDecodeError as error:
        try:
            return repaired(json.loads(text, parse_constant=_refuse_constant)), False
        except (ValueError, RecursionError):
            raise error from None


def repaired(value: Any) -> Any:
    """The JSON value with U+FFFD for each half of a surrogate pair and null for a number beyond a double's range: what
    orjson reads and writes. Raises RecursionError for a value that nests too deep."""
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, list):
        return [repaired(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {_SURROGATES.sub("\ufffd", key): repaired(item) for key, item in members.items()}
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return repaired(_as_float(value))
    return value


def digest_of(given: dict[str, Any], without: Collection[str]) -> str:
    """SHA-256, hexadecimal, of the object without those members. Raises BadRequest for one that nests too deep."""
    kept = {key: value for key, value in given.items() if key not in without}
    try:
        return hashlib.sha256(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)).hexdigest()
    except orjson.JSONEncodeError as error:
        raise BadRequest(f"the body nests too deep: {error}; keep it under 250 levels") from None


def checked(model: type[M], given: Any, where: str = "") -> M:
    """`given` as the model; `where` is its place in the body. Raises BadRequest."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(part for part in (where, *map(str, first["loc"])) if part)
        raise BadRequest(f"{at}: {first['msg']}", at) from None


def shown(value: object) -> str:
    """A value from the body as a refusal quotes it: its first characters."""
    text = str(value)
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def one_preamble(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, the leading system ones as one: most templates know a single preamble."""
    leading = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    if leading < 2:
        return tuple(messages)
    joined = "\n".join(message.text for message in messages[:leading])
    return (Message("system", joined), *messages[leading:])


def event(kind: str, data: dict[str, Any]) -> bytes:
    """One server-sent event; `data` gets `kind` as its `type`."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **data}))


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
