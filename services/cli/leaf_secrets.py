"""`packtrain broker leaf`: what a leaf node and its hub need, beside the keys of a deployment.

Promises, beyond those of `deploy_secrets`, in whose directory it works:
- the seed is made once, unless it is asked for anew; its public half, which the hub takes, follows from it each time;
- the leaf's users may what the deployment's may: the same runs and consumers, unless other runs are given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.log.permissions import users_conf
from schemas.names import checked_name
from services.cli.deploy_secrets import (
    GIVEN,
    Given,
    check,
    new_seed,
    opened,
    public_key,
    public_keys,
    read,
    settings_of,
    write,
)
from services.cli.embedded import BadInput

_NKEY = re.compile(r"nkey: (\S+)\n")


def make_leaf(directory: Path, runs: Sequence[str], domain: str, rotate: bool) -> Path:
    """Makes `<directory>/leaf`: `users.conf` and `leaf-seed.conf` for the leaf node, `leaf-key.conf` for its hub.
    Raises BadInput, LaunchError, BadName."""
    given = Given(runs=runs)
    check(given)
    checked_name(domain, "JetStream domain")
    directory = directory.absolute()
    if not directory.exists():
        raise BadInput(f"{directory} is not there; `packtrain secrets` makes it, and the users' keys")
    with opened(directory):
        settings = settings_of(directory, given)
        keys = public_keys(directory)
        at = directory / "leaf"
        at.mkdir(mode=0o700, exist_ok=True)
        seed = at / "leaf-seed.conf"
        if rotate or not seed.exists():
            write(seed, f"nkey: {new_seed()}\n".encode(), GIVEN)
        found = _NKEY.fullmatch(read(seed).decode(errors="replace"))
        if found is None:
            raise BadInput(f"{seed} holds no nkey seed; --rotate makes it anew")
        write(at / "leaf-key.conf", f"nkey: {public_key(seed, found[1])}\n".encode(), GIVEN)
        write(
            at / "users.conf", users_conf(keys, settings.runs, settings.work, domain=domain).encode(), GIVEN
        )
    return at
