"""What each service's S3 user may do: enough for its work, and no more."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest

from pipeline.store.policies import SERVICES as POLICIES
from pipeline.store.policies import policy_for
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
from services.process import SERVICES

PAYLOAD = payload_key("demo", "math", "math-000001-0-a1")
INHERITED = "runs/demo/inherited/math/math-000001-0-a1.safetensors"
KEYS = {
    "payload": PAYLOAD,
    "advantages": sidecar_key(PAYLOAD, "advantages.0"),
    "scores": sidecar_key(PAYLOAD, "teacher.large"),
    "inherited": INHERITED,
    "inherited advantages": sidecar_key(INHERITED, "advantages.1"),
    "image": image_key("demo", "0" * 64),
    "artefact": artefact_key("demo", "math-000001-0-a1", "log"),
    "report": grading_key("demo", "math", "math-000001"),
    "plan": plan_key("demo", 1, 7),
    "weights": weights_key("demo", 1, "n"),
    "optimizer": optimizer_key("demo", 1, "n"),
    "claim": claim_key("demo"),
    "other run": payload_key("demo-2", "math", "math-000001-0-a1"),
    "other prefix": "../elsewhere",
}


def allowed(policy: dict[str, Any], action: str, resource: str) -> bool:
    """Whether a policy of allowances has one for the action; `*` in one stands for anything, slashes too."""
    return any(
        action in statement["Action"]
        and any(fnmatch.fnmatchcase(resource, each) for each in statement["Resource"])
        for statement in policy["Statement"]
    )


def may(service: str, action: str) -> set[str]:
    policy = policy_for(service, "demo", "bucket", "some/prefix")
    return {
        name
        for name, key in KEYS.items()
        if allowed(policy, f"s3:{action}Object", f"arn:aws:s3:::bucket/some/prefix/{key}")
    }


@pytest.mark.parametrize(
    ("service", "reads", "writes"),
    [
        ("dispatcher", "", ""),
        ("agent-loop", "payload image advantages scores", "payload image advantages scores"),
        ("harness", "artefact", "artefact"),
        ("grader", "payload advantages scores inherited artefact report inherited_advantages", "report"),
        ("teacher", "payload advantages scores inherited inherited_advantages", "scores"),
        ("sampler", "plan", "plan"),
        (
            "hook",
            "payload advantages scores inherited inherited_advantages",
            "advantages inherited_advantages",
        ),
        ("packer", "payload advantages scores inherited inherited_advantages image plan", ""),
        ("trainer", "weights optimizer", "weights optimizer"),
        ("engine", "weights", ""),
        ("collector", "claim", ""),
    ],
)
def test_a_service_may_read_and_write_what_its_work_needs(service: str, reads: str, writes: str) -> None:
    assert may(service, "Get") == {name.replace("_", " ") for name in reads.split()}
    assert may(service, "Put") == {name.replace("_", " ") for name in writes.split()}


def test_every_service_has_a_policy_and_only_the_collector_removes() -> None:
    assert set(SERVICES) <= set(POLICIES)
    assert {service for service in POLICIES if may(service, "Delete")} == {"collector"}
    assert may("collector", "Delete") == set(KEYS) - {"claim", "other run", "other prefix"}
    # But for the launcher, which copies the groups that a run begins with.
    assert {service for service in POLICIES if "other run" in may(service, "Get")} == {"launcher"}
    assert not [service for service in POLICIES if "other run" in may(service, "Put")]
    with pytest.raises(ValueError, match="no service 'nobody' has a policy"):
        policy_for("nobody", "demo", "bucket")


@pytest.mark.parametrize(("prefix", "below"), [("", "runs/demo"), ("some/prefix", "some/prefix/runs/demo")])
def test_who_may_look_for_an_object_may_list_the_runs_prefix_and_no_other(prefix: str, below: str) -> None:
    for service in set(POLICIES) - {"dispatcher", "launcher"}:
        statements = policy_for(service, "demo", "bucket", prefix)["Statement"]
        (listing,) = [each for each in statements if each["Action"] == ["s3:ListBucket"]]
        assert listing["Resource"] == ["arn:aws:s3:::bucket"]
        assert listing["Condition"] == {"StringLike": {"s3:prefix": [below, f"{below}/*"]}}
    assert policy_for("dispatcher", "demo", "bucket", prefix)["Statement"] == []
