"""What each S3 user may do by its policy document: enough for its work, and no more."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.identities import identities
from pipeline.store.policies import EVERY_RUN, KINDS, policy_for
from services.process import SERVICES
from tests.store_users import LISTS, READS, READS_OF_OTHERS, REMOVES, WRITES, keys_of, rows

DOCS = Path(__file__).parents[2] / "docs"
MINIO = Path(__file__).parents[2] / "infra" / "store" / "minio-users.sh"
ACTIONS = {"Get": READS, "Put": WRITES, "Delete": REMOVES}


def allowed(policy: dict[str, Any], action: str, key: str) -> bool:
    """Whether a policy of allowances has one for the action; `*` in one stands for anything, slashes too."""
    return any(
        f"s3:{action}Object" in statement["Action"]
        and any(fnmatch.fnmatchcase(f"arn:aws:s3:::bucket/{key}", each) for each in statement["Resource"])
        for statement in policy["Statement"]
    )


def may(policy: dict[str, Any], action: str, run: str = "demo", prefix: str = "some/prefix") -> set[str]:
    return {name for name, key in keys_of(run).items() if allowed(policy, action, f"{prefix}/{key}")}


def test_every_service_has_a_policy_and_only_the_collector_of_them_removes() -> None:
    assert set(SERVICES) <= set(KINDS) == set(READS)
    assert {kind for kind in KINDS if REMOVES[kind]} == {"collector", "admin"}
    assert "admin" not in SERVICES
    with pytest.raises(ValueError, match="no user 'nobody' has a policy"):
        policy_for("nobody", "demo", "bucket")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("create_only", [False, True])
@pytest.mark.parametrize("run", ["demo", EVERY_RUN])
def test_a_user_may_do_what_its_work_needs(kind: str, create_only: bool, run: str) -> None:
    policy = policy_for(kind, run, "bucket", "some/prefix", create_only=create_only)
    for action, wanted in ACTIONS.items():
        assert may(policy, action) == wanted[kind], action
        assert may(policy, action, prefix="elsewhere") == set()
        others = may(policy, action, "demo-2")
        if run == EVERY_RUN:
            assert others == wanted[kind], action
        else:
            assert others == (READS_OF_OTHERS[kind] if action == "Get" else set()), action
    sids = [each["Sid"] for each in policy["Statement"]]
    assert len(sids) == len(set(sids))


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"launcher", "admin"}))
def test_where_the_server_can_no_service_may_write_over_an_object(kind: str) -> None:
    for statement in policy_for(kind, "demo", "bucket", create_only=True)["Statement"]:
        if "s3:PutObject" in statement["Action"]:
            assert statement["Action"] == ["s3:PutObject"]
            assert statement["Condition"] == {"Null": {"s3:if-none-match": "false"}}


@pytest.mark.parametrize(("prefix", "below"), [("", "runs/demo"), ("some/prefix", "some/prefix/runs/demo")])
def test_who_may_look_for_an_object_may_list_the_runs_prefix_and_no_other(prefix: str, below: str) -> None:
    for kind in KINDS:
        statements = policy_for(kind, "demo", "bucket", prefix)["Statement"]
        listings = [each for each in statements if each["Action"] == ["s3:ListBucket"]]
        assert len(listings) == (kind in LISTS)
        for listing in listings if kind != "launcher" else []:
            assert listing["Resource"] == ["arn:aws:s3:::bucket"]
            assert listing["Condition"] == {"StringLike": {"s3:prefix": [f"{below}/*"]}}


@pytest.mark.parametrize(
    ("bucket", "prefix"),
    [
        ("*", ""),
        ("buck?t", ""),
        ("", ""),
        ("bucket", "some/*"),
        ("bucket", "${aws:username}"),
        ("bucket", "some/pre?fix"),
    ],
)
def test_a_policy_is_for_one_bucket_and_one_prefix(bucket: str, prefix: str) -> None:
    with pytest.raises(ValueError, match=r"is not plain.*store\.url"):
        policy_for("reader", "demo", bucket, prefix)


@pytest.mark.parametrize("runs", [["*"], ["demo", "demo2"]])
def test_minios_users_have_the_policies_of_their_runs_and_no_key_is_in_a_command_line(
    tmp_path: Path, runs: list[str]
) -> None:
    """With an `mc` that writes down what it is told, and says that nothing can be attached a second time."""
    secrets, called = tmp_path / "se crets", tmp_path / "called"
    (secrets / "store").mkdir(parents=True)
    called.mkdir()
    keys = {kind: (f"packtrain-{kind}", f"secret-{kind}") for kind in KINDS}
    (secrets / "store" / "s3.json").write_text(json.dumps(identities(keys, "bucket", "p", runs)))
    mc = tmp_path / "mc"
    mc.write_text(
        '#!/bin/sh\necho "$*" >>"$CALLED/all"\ncase "$2 $3" in\n'
        '"user add") cat >>"$CALLED/keys" ;;\n"policy create") cp "$6" "$CALLED/$5" ;;\n'
        '"policy attach") exit 1 ;;\n"user info") echo "AccessKey: $5 $ATTACHED" ;;\nesac\n'
    )
    mc.chmod(0o755)

    def made(attached: str) -> int:
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "CALLED": str(called),
            "ATTACHED": attached,
        }
        command = [str(MINIO), "local", str(secrets)]
        return subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode

    assert made("") != 0, "it is not attached, and nobody was told"
    (called / "keys").unlink()
    assert made(" ".join(f"packtrain-policy-{kind}" for kind in KINDS)) == 0
    assert "secret" not in (called / "all").read_text().replace(str(secrets), "")
    pairs = (called / "keys").read_text().split()
    assert sorted(pairs) == sorted(word for pair in keys.values() for word in pair)
    for kind in KINDS:
        wanted = [each for run in runs for each in policy_for(kind, run, "bucket", "p")["Statement"]]
        file = called / f"packtrain-policy-{kind}"
        found = json.loads(file.read_text())["Statement"] if wanted else []
        assert file.exists() == bool(wanted)
        assert [{**each, "Sid": ""} for each in found] == [{**each, "Sid": ""} for each in wanted]
        assert len({each["Sid"] for each in found}) == len(found)


def test_the_identities_of_seaweedfs_are_the_policies() -> None:
    keys = {kind: (f"key-{kind}", f"secret-{kind}") for kind in KINDS}
    found = identities(keys, "bucket", "p", runs=["a", "b"])
    documents = {each["name"]: json.loads(each["content"]) for each in found["policies"]}
    for user in found["identities"]:
        kind = user["name"]
        assert user["credentials"] == [{"accessKey": f"key-{kind}", "secretKey": f"secret-{kind}"}]
        assert user["actions"] == []
        wanted = [policy_for(kind, run, "bucket", "p") for run in ("a", "b")]
        assert [documents.pop(name) for name in user["policyNames"]] == [w for w in wanted if w["Statement"]]
    assert documents == {}
    assert [user["name"] for user in found["identities"]] == sorted(KINDS)
    with pytest.raises(ValueError, match="one access key"):
        identities({"packer": ("k", "a"), "reader": ("k", "b")}, "bucket")


def test_the_docs_say_what_each_may_do() -> None:
    table = [
        line
        for line in (DOCS / "store.md").read_text().splitlines()
        if line.startswith("| `") and line.count("|") == 6
    ]
    assert table == rows()
