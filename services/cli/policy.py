"""Which policy a run starts from. Imports torch only when a policy is made from a package."""

from __future__ import annotations

from pathlib import Path

from pipeline.engines.policies import TINY, PolicyMissing, policy_dir
from services.cli.embedded import LaunchError

SMOLLM2 = "smollm2"


def policy_directory(policy: str) -> Path:
    """The directory of `tiny` or of a path, with all files in it; raises LaunchError that names what is missing."""
    try:
        return policy_dir(policy).absolute()
    except PolicyMissing as error:
        raise LaunchError(str(error)) from error


def resolve_policy(policy: str, directory: Path) -> str:
    """What `engine.policy` is in a run's own configuration: `tiny`, or an absolute directory.

    `smollm2` is made from its package under `directory` once, before any process reads it. Raises LaunchError.
    """
    if policy == SMOLLM2:
        from pipeline.engines.tiny.smollm2 import PackageMissing, smollm2_policy

        try:
            return str(smollm2_policy(directory / "policies" / SMOLLM2))
        except (PackageMissing, ValueError) as error:
            raise LaunchError(f"policy smollm2: {error}") from error
    found = policy_directory(policy)
    return policy if policy == TINY else str(found)
