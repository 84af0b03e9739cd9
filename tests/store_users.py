"""What each user of the store may do, said a second time, by hand: policies, servers and docs are compared with it."""

from __future__ import annotations

from schemas.keys import (
    artefact_key,
    claim_key,
    grading_key,
    image_key,
    optimizer_key,
    payload_key,
    plan_key,
    sidecar_key,
    weights_key,
)


def keys_of(run: str) -> dict[str, str]:
    """A key of every kind of object that a run has."""
    payload = payload_key(run, "math", "math-000001-0-a1")
    inherited = f"runs/{run}/inherited/math/math-000001-0-a1.safetensors"
    return {
        "payload": payload,
        "advantages": sidecar_key(payload, "advantages.0"),
        "scores": sidecar_key(payload, "teacher.large"),
        "inherited": inherited,
        "inherited advantages": sidecar_key(inherited, "advantages.1"),
        "inherited scores": sidecar_key(inherited, "teacher.large"),
        "inherited facts": f"runs/{run}/inherited/0000002a.json",
        "image": image_key(run, "0" * 64),
        "artefact": artefact_key(run, "math-000001-0-a1", "log"),
        "report": grading_key(run, "math", "math-000001"),
        "plan": plan_key(run, 1, 7),
        "weights": weights_key(run, 1, "n"),
        "optimizer": optimizer_key(run, 1, "n"),
        "claim": claim_key(run),
    }


_OF_PAYLOADS = {"payload", "advantages", "scores"}
_INHERITED = {"inherited", "inherited advantages", "inherited scores"}
_TENSORS = _OF_PAYLOADS | _INHERITED
EVERYTHING = set(keys_of("r"))

READS: dict[str, set[str]] = {
    "dispatcher": set(),
    "agent-loop": _OF_PAYLOADS | {"image"},
    "harness": {"artefact"},
    "grader": _TENSORS | {"artefact", "report"},
    "teacher": _TENSORS,
    "sampler": {"plan"},
    "hook": _TENSORS,
    "packer": _TENSORS | {"image", "plan"},
    "trainer": {"weights", "optimizer"},
    "engine": {"weights"},
    "collector": {"claim"},
    "dashboard": set(),
    "reader": EVERYTHING,
    "launcher": _TENSORS | {"inherited facts", "image", "claim"},
    "admin": EVERYTHING,
}
_NOTHING = {kind: set[str]() for kind in READS}
WRITES: dict[str, set[str]] = {
    **_NOTHING,
    "agent-loop": READS["agent-loop"],
    "harness": {"artefact"},
    "grader": {"report"},
    "teacher": {"scores", "inherited scores"},
    "sampler": {"plan"},
    "hook": {"advantages", "inherited advantages"},
    "trainer": {"weights", "optimizer"},
    "launcher": _INHERITED | {"inherited facts", "image", "claim"},
    "admin": EVERYTHING,
}
REMOVES: dict[str, set[str]] = {
    **_NOTHING,
    "collector": EVERYTHING - {"claim"},
    "admin": EVERYTHING,
}
READS_OF_OTHERS: dict[str, set[str]] = {**_NOTHING, "launcher": _TENSORS | {"image"}}
"""Of another run."""
LISTS = set(READS) - {"dispatcher", "dashboard"}
LISTS_OF_OTHERS = {"launcher"}
CONFIGURES = {"launcher", "admin"}
"""Who may make the bucket, and see and set its lifecycle."""


def rows() -> list[str]:
    """The table of docs/store.md."""
    order = list(keys_of("r"))

    def told(names: set[str]) -> str:
        return "all" if names == EVERYTHING else ", ".join(name for name in order if name in names) or "-"

    def removed(names: set[str]) -> str:
        return f"all but {told(EVERYTHING - names)}" if 1 < len(names) < len(EVERYTHING) else told(names)

    return [
        f"| `{kind}` | {told(READS[kind])} | {told(WRITES[kind])} | {removed(REMOVES[kind])} | {'yes' if kind in LISTS else '-'} |"
        for kind in READS
    ]
