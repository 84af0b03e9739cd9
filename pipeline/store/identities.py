"""The users of a SeaweedFS store: the JSON that `weed` takes as `-s3.config`, with our policies as they are. Pure.

Promises:
- a user may do what `policy_for` allows it, of each of the runs, and nothing else: SeaweedFS enforces the documents themselves;
- one that is allowed nothing is known, and refused everything;
- equal input gives equal JSON.

The JSON holds the secret keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.store.policies import EVERY_RUN, policy_for


def identities(
    keys: Mapping[str, tuple[str, str]],
    bucket: str,
    prefix: str = "",
    runs: Sequence[str] = (EVERY_RUN,),
) -> dict[str, Any]:
    """`keys`: (access key, secret key) by kind of user; `runs`: names, or `EVERY_RUN` of the bucket below the prefix.

    Raises ValueError on a kind that has no policy, or two users of one access key, BadName on a run that is no name.
    """
    if len({access for access, _ in keys.values()}) < len(keys):
        raise ValueError("two users have one access key: SeaweedFS would take either for the other")
    users: list[dict[str, Any]] = []
    policies: list[dict[str, str]] = []
    for kind, (access, secret) in sorted(keys.items()):
        attached: list[str] = []
        for run in runs:
            document = policy_for(kind, run, bucket, prefix)
            # SeaweedFS refuses a policy without statements, and with it some of those that come after.
            if document["Statement"]:
                attached.append(f"{kind}.{'every' if run == EVERY_RUN else run}")
                policies.append({"name": attached[-1], "content": json.dumps(document)})
        users.append(
            {
                "name": kind,
                "credentials": [{"accessKey": access, "secretKey": secret}],
                "actions": [],
                "policyNames": attached,
            }
        )
    return {"identities": users, "policies": policies}
