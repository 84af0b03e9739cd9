"""What hosts on other machines than the launcher's can reach of a run. Pure: the configuration alone."""

from __future__ import annotations

import contextlib
import ipaddress
from urllib.parse import urlsplit

from schemas.config import RunConfig


def out_of_reach(config: RunConfig) -> list[str]:
    """What they could not reach, each with its remedy."""
    loop = config.agent_loop
    found: list[str] = []

    def local(key: str, url: str, empty: str, remedy: str) -> None:
        if not url or is_loopback(urlsplit(url).hostname):
            found.append(f"{key} {url or f'is empty: {empty}'} is this machine's alone; {remedy}")

    local("broker.url", config.broker.url, "an embedded server", "name one that every node reaches")
    engine = "give an engine that every node reaches"
    local("engine.url", config.engine.url, "the tiny engine", engine)
    for i, url in enumerate(config.engine.replicas):
        local(f"engine.replicas[{i}]", url, "", engine)
    if not config.store.url:
        found.append(
            "store.url is empty: files are this machine's alone; name a bucket, or a file:/// directory that every node has"
        )
    key = "advertise" if loop.advertise else "bind"
    if is_loopback(loop.advertise or loop.bind):
        found.append(
            f"agent_loop.{key} {loop.advertise or loop.bind} is each node's alone; set agent_loop.bind to 0.0.0.0 and no "
            "advertise: a host is then reached at its node's address"
        )
    return found


def is_loopback(host: str | None) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host or "").is_loopback
    return host == "localhost"
