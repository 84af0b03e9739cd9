"""Where objects lie in the store. Everything of a run is under `runs/<run>/`."""

from __future__ import annotations

from schemas.names import checked_name


def run_prefix(run: str) -> str:
    return f"runs/{checked_name(run, 'run')}"


def claim_key(run: str) -> str:
    """Names the log that the run's objects belong to."""
    return f"{run_prefix(run)}/run.json"


def payload_key(run: str, source: str, attempt: str) -> str:
    """The payload of one attempt of a sequence."""
    return f"{run_prefix(run)}/payloads/{checked_name(source, 'source')}/{checked_name(attempt, 'attempt id')}.safetensors"


def sidecar_key(payload: str, name: str) -> str:
    """What was made of a payload later, beside it: `advantages.0`, `teacher.large`."""
    return f"{payload.removesuffix('.safetensors')}.{name}.safetensors"


def image_key(run: str, digest: str) -> str:
    """An image as it was received, once in a run; `digest`: its SHA-256 in hexadecimal."""
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(f"image digest {digest[:80]!r} is not a SHA-256 in hexadecimal")
    return f"{run_prefix(run)}/images/{digest}"


def grading_key(run: str, source: str, sample: str) -> str:
    """A grader's whole answer on a group, of which there is at most one: as its revision 0, or late as its revision 1."""
    return f"{run_prefix(run)}/grading/{checked_name(source, 'source')}/{checked_name(sample, 'sample')}.json"


def artefact_key(run: str, attempt: str, name: str) -> str:
    """What an attempt's trial left to be looked at."""
    return (
        f"{run_prefix(run)}/artefacts/{checked_name(attempt, 'attempt id')}/{checked_name(name, 'artefact')}"
    )


def plan_key(run: str, step: int, crc32c: int) -> str:
    """The plan of a batch; its checksum is in the key, so that equal decisions are one object."""
    return f"{run_prefix(run)}/plans/{step:06d}-{crc32c:08x}.json"


def optimizer_key(run: str, step: int, nonce: str) -> str:
    """Optimizer state after a step; `step.trained` says which one counts."""
    return f"{run_prefix(run)}/optimizer/{step:06d}-{checked_name(nonce, 'nonce')}.safetensors"


def weights_key(run: str, step: int, nonce: str) -> str:
    """Weights after a step, for trainer and engines; `step.trained` says which ones count."""
    return f"{run_prefix(run)}/weights/{step:06d}-{checked_name(nonce, 'nonce')}.safetensors"
