"""New weights for engines that others run: a directory that they read, and the calls that make them read it.

Promises: a directory under its version's name is whole; every replica that answers is brought to the newest version, one
that was away or was started anew as soon as it answers again; a replica that cannot be updated does not keep the others
from it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from pipeline.engines.base import EngineUnavailable
from pipeline.engines.replicas import Replica
from pipeline.engines.wire import PauseMode

WEIGHTS = "model.safetensors"
KEPT = 2
"""Versions whose directories stay: an engine may be reading the one before the newest."""


def write_version(root: Path, version: int, blob: bytes, policy: Path) -> Path:
    """The directory of a version: the policy's own, with these weights. Written aside and renamed; kept if it is there.

    policy: the directory with the policy's configuration and tokenizer, which engines look for beside the weights.
    """
    final = root / f"{version:08d}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    aside = root / f".{final.name}.part"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for file in policy.iterdir():
        if (
            file.is_file()
            and file.suffix != ".safetensors"
            and not file.name.endswith(".safetensors.index.json")
        ):
            shutil.copyfile(file, aside / file.name)
    (aside / WEIGHTS).write_bytes(blob)
    aside.rename(final)
    return final


def remove_old(root: Path) -> None:
    """Removes all but the newest versions."""
    versions = sorted(path for path in root.iterdir() if path.is_dir() and path.name.isdigit())
    for path in versions[:-KEPT]:
        shutil.rmtree(path)


async def bring_up(
    replicas: Sequence[Replica], directory: Path, version: int, mode: PauseMode
) -> dict[str, str | None]:
    """Update each replica that does not say `version`; by url, what kept it from it (None: it has it now).

    mode: what becomes of requests under way, see `VllmReplica.update`.
    """

    async def one(replica: Replica) -> str | None:
        try:
            if await replica.version() != version:
                await replica.update(str(directory), version, mode)
        except EngineUnavailable as error:
            return str(error)
        return None

    found = await asyncio.gather(*map(one, replicas))
    return {replica.url: problem for replica, problem in zip(replicas, found, strict=True)}
