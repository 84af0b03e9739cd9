"""What each service may do in the bucket, as AWS policy documents: the least that its work needs. Pure.

Promises:
- a service that writes may not remove, but for the collector, which may write nothing; none may touch another run's objects, but
  for the launcher, which copies the groups that a run begins with;
- who may look for an object may list the run's prefix: else S3 says of one that is missing that access is denied, and a service
  would wait for what never comes.

Object keys are those of `schemas.keys`. A conditional PUT whose answer was lost is read back, so who writes may read that too.
"""

from __future__ import annotations

from typing import Any

from schemas.keys import run_prefix

_VERSION = "2012-10-17"
_PAYLOADS = ("payloads/*.safetensors", "inherited/*.safetensors")
_TRAINER = ("weights/*", "optimizer/*")

# By service: what it reads, and what it writes, below the run's prefix.
_NEEDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dispatcher": ((), ()),
    "agent-loop": ((), ("payloads/*.safetensors", "images/*")),
    "harness": ((), ("artefacts/*",)),
    "grader": ((*_PAYLOADS, "artefacts/*"), ("grading/*",)),
    "teacher": (_PAYLOADS, ("payloads/*.teacher.*.safetensors", "inherited/*.teacher.*.safetensors")),
    "sampler": ((), ("plans/*",)),
    "hook": (_PAYLOADS, ("payloads/*.advantages.*.safetensors", "inherited/*.advantages.*.safetensors")),
    "packer": ((*_PAYLOADS, "plans/*", "images/*"), ()),
    "trainer": ((), _TRAINER),
    "engine": (("weights/*",), ()),
    "reader": (("*",), ()),
}
SERVICES = (*_NEEDS, "collector", "launcher")
"""reader: commands that only read, as `packtrain payload show`."""


def policy_for(service: str, run: str, bucket: str, prefix: str = "") -> dict[str, Any]:
    """The policy document; `prefix`: of the store in its bucket, without slashes at its ends. Raises ValueError on a service that
    has none, BadName on a run that is no name."""
    if service not in SERVICES:
        raise ValueError(f"no service {service!r} has a policy; services: {', '.join(SERVICES)}")
    root = f"{prefix}/" if prefix else ""
    below = f"{root}{run_prefix(run)}"
    if service == "collector":
        kinds = ("payloads", "inherited", "artefacts", "grading", "plans", "weights", "optimizer", "images")
        statements = [
            _objects("Remove", ["s3:DeleteObject"], bucket, [f"{below}/{kind}/*" for kind in kinds]),
            _objects("Claim", ["s3:GetObject"], bucket, [f"{below}/run.json"]),
            _listing(bucket, below),
        ]
    elif service == "launcher":
        statements = [
            _objects(
                "Begin",
                ["s3:GetObject", "s3:PutObject"],
                bucket,
                [f"{below}/run.json", f"{below}/inherited/*"],
            ),
            _objects(
                "Inherit",
                ["s3:GetObject"],
                bucket,
                [f"{root}runs/*/{each}" for each in (*_PAYLOADS, "images/*")],
            ),
            _objects("InheritImages", ["s3:GetObject", "s3:PutObject"], bucket, [f"{below}/images/*"]),
            _bucket(
                "Bucket",
                ["s3:CreateBucket", "s3:GetLifecycleConfiguration", "s3:PutLifecycleConfiguration"],
                bucket,
            ),
            _listing(bucket, f"{root}runs"),
        ]
    else:
        reads, writes = _NEEDS[service]
        statements = list[dict[str, Any]]()
        if reads:
            statements.append(
                _objects("Read", ["s3:GetObject"], bucket, [f"{below}/{each}" for each in reads])
            )
        if writes:
            allowed = ["s3:GetObject", "s3:PutObject"]
            statements.append(_objects("Write", allowed, bucket, [f"{below}/{each}" for each in writes]))
        if statements:
            statements.append(_listing(bucket, below))
    return {"Version": _VERSION, "Statement": statements}


def _objects(sid: str, actions: list[str], bucket: str, keys: list[str]) -> dict[str, Any]:
    return {
        "Sid": sid,
        "Effect": "Allow",
        "Action": actions,
        "Resource": [f"arn:aws:s3:::{bucket}/{key}" for key in keys],
    }


def _bucket(sid: str, actions: list[str], bucket: str) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": [f"arn:aws:s3:::{bucket}"]}


def _listing(bucket: str, below: str) -> dict[str, Any]:
    found = _bucket("List", ["s3:ListBucket"], bucket)
    return {**found, "Condition": {"StringLike": {"s3:prefix": [below, f"{below}/*"]}}}
