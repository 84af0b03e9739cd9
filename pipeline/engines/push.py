"""New weights for engines that others run: a directory that they read, and the calls that make them read it.

Promises: a directory under its version's name is whole, also after the machine fell; an engine that was left paused, by
whoever died in an update, samples again once it has the newest weights.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

from pipeline.engines.replicas import Replica
from pipeline.engines.wire import PauseMode

WEIGHTS = "model.safetensors"
KEPT = 2
"""Versions whose directories stay: an engine may be reading the one before the newest."""
_PART = ".part"


def write_version(root: Path, version: int, blob: bytes, policy: Path) -> Path:
    """The directory of a version: the policy's own, with these weights. Written aside and renamed; kept if it is there.

    policy: the directory with the policy's configuration and tokenizer, which engines look for beside the weights.
    """
    final = root / f"{version:08d}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    # A name of its own: two that wrote into one would rename what the other has not finished.
    aside = root / f".{final.name}.{secrets.token_hex(4)}{_PART}"
    aside.mkdir()
    for file in policy.iterdir():
        if (
            file.is_file()
            and file.suffix != ".safetensors"
            and not file.name.endswith(".safetensors.index.json")
        ):
            shutil.copyfile(file, aside / file.name)
    (aside / WEIGHTS).write_bytes(blob)
    for path in (*aside.iterdir(), aside):
        _commit(path)
    try:
        aside.rename(final)
    except OSError:
        # Another was first.
        if not final.is_dir():
            raise
        shutil.rmtree(aside, ignore_errors=True)
    _commit(root)
    return final


def remove_old(root: Path, reading: Collection[int] = ()) -> None:
    """Removes all but the newest versions and those that engines are `reading`, and what writers of old ones left."""
    versions = sorted(int(path.name) for path in root.iterdir() if path.is_dir() and path.name.isdigit())
    kept = {*versions[-KEPT:], *reading}
    for version in versions:
        if version not in kept:
            shutil.rmtree(root / f"{version:08d}")
    for part in root.glob(f".*{_PART}"):
        if versions and int(part.name.split(".")[1]) <= versions[-1]:
            shutil.rmtree(part, ignore_errors=True)


async def bring_up(
    replica: Replica, directory: Path, version: int, mode: PauseMode, samples: bool = False
) -> None:
    """Update the replica if it does not say `version`. Raises EngineUnavailable.

    mode: what becomes of requests under way, see `VllmReplica.update`. samples: whether it is known to have been resumed
    since; if not it is, in case that an update ended before that.
    """
    if await replica.version() != version:
        await replica.update(str(directory), version, mode)
    elif not samples or await replica.paused():
        await replica.resume()


def _commit(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
