"""What each user of the store may do in the bucket, as AWS policy documents: the least that its work needs. Pure.

Promises:
- a service that writes may not remove, but for the collector, which may write nothing; none may touch another run's objects, but
  for the launcher, which copies the groups that a run begins with;
- who may look for an object may list the run's prefix: else S3 says of one that is missing that access is denied, and a service
  would wait for what never comes;
- `create_only` has the server refuse to write over an object too, where it knows the condition key `s3:if-none-match` (Amazon S3
  does; SeaweedFS 4.48 refuses every PUT under it). Without it, that an object is written once is what our clients ask for.

Object keys are those of `schemas.keys`. A conditional PUT whose answer was lost is read back, so who writes may read that too.
"""

from __future__ import annotations

import re
from typing import Any

from schemas.keys import run_prefix

EVERY_RUN = "*"
_VERSION = "2012-10-17"
_KINDS = ("payloads", "inherited", "artefacts", "grading", "plans", "weights", "optimizer", "images")
_PAYLOADS = ("payloads/*.safetensors", "inherited/*.safetensors")
_TRAINER = ("weights/*", "optimizer/*")
_CREATED = {"Null": {"s3:if-none-match": "false"}}
_BUCKET, _PREFIX = re.compile(r"[A-Za-z0-9._-]+"), re.compile(r"[A-Za-z0-9._/-]*")

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
    "dashboard": ((), ()),
    "reader": (("*",), ()),
}
KINDS = (*_NEEDS, "collector", "launcher", "admin")
"""reader: commands that only read, as `packtrain payload show`. launcher: `packtrain runs begin`. admin: a person's commands that
remove a run or bring one in, `packtrain runs rm` and `import`; no service is to have it."""


def policy_for(
    kind: str, run: str, bucket: str, prefix: str = "", *, create_only: bool = False
) -> dict[str, Any]:
    """The policy document; `run`: a name or `EVERY_RUN` of the bucket; `prefix`: of the store in its bucket, without slashes at its
    ends. One without statements allows nothing. Raises ValueError on a kind that has none and on a bucket or prefix that is not plain,
    BadName on a run that is no name."""
    if kind not in KINDS:
        raise ValueError(f"no user {kind!r} has a policy; users: {', '.join(KINDS)}")
    for what, name, plain in (("bucket", bucket, _BUCKET), ("prefix", prefix, _PREFIX)):
        if not plain.fullmatch(name):
            # `*`, `?` and `${...}` would stand for other buckets and prefixes in the policy.
            raise ValueError(
                f"{what} {name[:80]!r} is not plain: a policy is for one of A-Z a-z 0-9 . _ -; name another store.url"
            )
    root = f"{prefix}/" if prefix else ""
    # S3's wildcard passes slashes, so that of every run is `runs/*` as a whole.
    below = f"{root}{'runs/*' if run == EVERY_RUN else run_prefix(run)}"
    listed = f"{root}runs" if run == EVERY_RUN else below
    condition = _CREATED if create_only else {}

    def objects(sid: str, actions: list[str], keys: tuple[str, ...], under: str = below) -> dict[str, Any]:
        resources = [f"arn:aws:s3:::{bucket}/{under}/{key}" for key in keys]
        return {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": resources}

    def written(sid: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
        if not condition:
            return [objects(sid, ["s3:GetObject", "s3:PutObject"], keys)]
        create = {**objects(f"{sid}Once", ["s3:PutObject"], keys), "Condition": condition}
        return [objects(sid, ["s3:GetObject"], keys), create]

    everything = _bucket(
        "Bucket", ["s3:CreateBucket", "s3:GetLifecycleConfiguration", "s3:PutLifecycleConfiguration"], bucket
    )
    match kind:
        case "collector":
            statements = [
                objects("Remove", ["s3:DeleteObject"], tuple(f"{each}/*" for each in _KINDS)),
                objects("Claim", ["s3:GetObject"], ("run.json",)),
                _listing(bucket, listed),
            ]
        case "launcher":
            # Copies are made by the server, which no condition can be put to everywhere.
            statements = [
                *written("Begin", ("run.json", "inherited/*.json")),
                objects("Copied", ["s3:GetObject", "s3:PutObject"], ("inherited/*.safetensors", "images/*")),
                objects("Inherit", ["s3:GetObject"], (*_PAYLOADS, "images/*"), under=f"{root}runs/*"),
                everything,
                _listing(bucket, f"{root}runs"),
            ]
        case "admin":
            statements = [
                objects("Objects", ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"], ("*",)),
                everything,
                _listing(bucket, listed),
            ]
        case _:
            reads, writes = _NEEDS[kind]
            statements = list[dict[str, Any]]()
            if reads:
                statements.append(objects("Read", ["s3:GetObject"], reads))
            if writes:
                statements += written("Write", writes)
            if statements:
                statements.append(_listing(bucket, listed))
    return {"Version": _VERSION, "Statement": statements}


def _bucket(sid: str, actions: list[str], bucket: str) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": [f"arn:aws:s3:::{bucket}"]}


def _listing(bucket: str, below: str) -> dict[str, Any]:
    found = _bucket("List", ["s3:ListBucket"], bucket)
    return {**found, "Condition": {"StringLike": {"s3:prefix": [f"{below}/*"]}}}
