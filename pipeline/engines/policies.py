"""Where a policy's files are: the one that ships, or a directory. Knows no torch, so that rollout hosts may ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TINY = "tiny"
FILES = ("config.json", "model.safetensors", "tokenizer.json")
BESIDE_WEIGHTS = ("config.json", "tokenizer.json")


class PolicyMissing(FileNotFoundError):
    """A policy that is not there, or not whole; the message names what is missing."""


def policy_dir(policy: str, needed: Sequence[str] = FILES) -> Path:
    """The directory of `tiny`, or of a path. needed: files that it must have; engines that others run may have their
    weights in other files. Raises PolicyMissing."""
    directory = Path(__file__).parent / "tiny" / "policy" if policy == TINY else Path(policy)
    if not directory.is_dir():
        raise PolicyMissing(
            f"policy {policy!r} is not a directory; name {TINY}, smollm2 (to the launcher), or a directory with {', '.join(needed)}"
        )
    missing = [name for name in needed if not (directory / name).is_file()]
    if missing:
        raise PolicyMissing(
            f"policy {policy!r}: {directory} has no {' and no '.join(missing)}; a policy has {', '.join(needed)}"
        )
    return directory
