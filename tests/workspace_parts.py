"""What tests of overlay workspaces share: whether they can be had here, specs, and a look at what is left of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from pipeline.harnesses.kernel import MOUNT_POINT
from pipeline.harnesses.workspaces.base import Limits, Mount, Spec


@cache
def refusal() -> str:
    """Why there can be no overlay workspace here, found out without the code under test; "" when there can."""
    if os.geteuid() != 0:
        return "overlay workspaces with users of their own need root"
    try:
        probe = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "true"]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return "unshare is missing (Debian: util-linux)"
    if done.returncode:
        return f"no namespaces here: {done.stderr.strip()}"
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    if not any(
        kind.startswith("cgroup") and "rw" in options.split(",") for _, _, kind, options, *_ in mounts
    ):
        return "no control groups that can be written to"
    return ""


def spec(
    name: str,
    definition: Path,
    *,
    peer: tuple[str, int] | None = None,
    mounts: Iterable[Mount] = (),
    limits: Limits | None = None,
    start_s: float = 60.0,
) -> Spec:
    few = limits or Limits(memory_bytes=256 << 20, disk_bytes=64 << 20, processes=64)
    return Spec(name, definition, peer, tuple(mounts), {}, few, start_s)


def mounts() -> list[str]:
    """Mounts of the caller's namespace where workspaces put theirs together."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [
        fields[4] for fields in lines if fields[4] == MOUNT_POINT or fields[4].startswith(MOUNT_POINT + "/")
    ]


def groups(name: str = "") -> list[str]:
    """Control groups of workspaces whose name ends so, of any process; of all without one."""
    places = {
        line.split()[4]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if " - cgroup" in line
    }
    return [folder for place in places for folder, _, _ in os.walk(place) if _is(folder, name)]


def workspaces(host: int) -> set[str]:
    """Names of the control groups of a host's workspaces."""
    return {name for group in groups() if (name := Path(group).name).startswith(f"packtrain-{host}-")}


def roots(host: int) -> list[str]:
    """Command lines of the live root programs of a host's workspaces; each has the process of its host at its end."""
    return [line for line in processes("overlay_init import main") if line.split()[-1] == str(host)]


def _is(folder: str, name: str) -> bool:
    last = folder.rpartition("/")[2]
    return last.startswith("packtrain-") and (not name or last.endswith(f"-{name}"))


def processes(mark: str) -> list[str]:
    """Command lines of live processes that hold `mark`, whatever namespace they are in."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if mark in line:
                found.append(line)
    return found
