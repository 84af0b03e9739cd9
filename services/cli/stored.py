"""What an object of a run is by its key, where it is no payload, and its text where it is one."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass

from pipeline.store import ObjectStore
from pipeline.store.errors import ObjectMissing

MAX_SHOWN = 1 << 20
"""Bytes of a text that are shown."""


@dataclass(frozen=True)
class Kind:
    """`told`: what it is. `readable`: whether people can read it."""

    told: str
    readable: bool


_KINDS: dict[str, Kind] = {
    r"artefacts/[^/]+/[^/]+": Kind("an artefact, which a trial left to be looked at", True),
    r"grading/[^/]+/[^/]+\.json": Kind("a grader's report on a group (JSON)", True),
    r"inherited/[^/]+\.json": Kind("the facts of another run's groups (JSON)", True),
    r"plans/[^/]+\.json": Kind("the plan of a batch (JSON), which packers read", False),
    r"weights/[^/]+": Kind("the weights after a step (safetensors)", False),
    r"optimizer/[^/]+": Kind("the optimizer's state after a step (safetensors)", False),
    r"images/[^/]+": Kind("an image, which sequences share", False),
    r"run\.json": Kind("the claim: which log the objects beside it are of (JSON)", True),
}
_SIDECAR = re.compile(r"(runs/[^/]+/(?:payloads|inherited)/[^/]+/[^/.]+)\.([^/]+)\.safetensors")


def kind(key: str) -> Kind | None:
    """What stands under a key of a run that is neither a payload's nor a sidecar's; None for theirs, and for any other."""
    return next((kind for form, kind in _KINDS.items() if re.fullmatch(f"runs/[^/]+/{form}", key)), None)


def sidecar(key: str) -> tuple[str, str] | None:
    """(key of the payload, name) of a sidecar's key."""
    found = _SIDECAR.fullmatch(key)
    return (f"{found[1]}.safetensors", found[2]) if found else None


async def read_text(store: ObjectStore, key: str, kind: Kind) -> tuple[int, str]:
    """(size, what is shown of the object): JSON indented, the beginning of what is long, nothing of what nobody can read.

    Raises ObjectMissing, StoreUnavailable.
    """
    size = await store.size(key)
    if size is None:
        raise ObjectMissing(key, store.url)
    if not kind.readable or not size:
        return size, ""
    (body,) = await store.get_ranges(key, [(0, min(size, MAX_SHOWN))], size=size)
    text = bytes(body).decode(errors="replace")
    if size > MAX_SHOWN:
        return size, f"{text}\n[{size - MAX_SHOWN} bytes after this are not shown]"
    if key.endswith(".json"):
        with suppress(ValueError):  # what is no JSON is shown as it is
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    return size, text
