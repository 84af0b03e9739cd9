"""Runs one program in namespaces of its own. Executed as `kernel.program` says, with SPEC, which is JSON:
argv, binds, limits, and the descriptor that trouble is reported on.

Three processes: this one makes the namespaces and waits; its child is pid 1 of the new pid namespace, builds the file
system, gives up root and waits; the grandchild takes the limits and becomes the program. When pid 1 goes, for whatever
reason, the kernel kills all that is left in the namespace. Any step that fails is reported and the program is not run.

A root caller needs no user namespace and ends under a uid that no one else has, so that RLIMIT_NPROC counts this
sandbox alone. An ordinary caller gets a user namespace, where the count begins anew (Linux >= 5.14).
"""

# os alone, since importing pathlib costs each start 3 ms; /tmp is the sandbox's own; execve is this file's purpose.
# ruff: noqa: PTH103, PTH112, PTH120, PTH123, S108, S606
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from pipeline.harnesses import kernel

FIRST_UID = 0x70000000
"""Far above allocated uids; the launcher's pid, at most 2**22, is added."""


def _namespaces(root: bool) -> None:
    own = (
        kernel.CLONE_NEWNS,
        kernel.CLONE_NEWUTS,
        kernel.CLONE_NEWIPC,
        kernel.CLONE_NEWPID,
        kernel.CLONE_NEWNET,
    )
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(sum(own) | (0 if root else kernel.CLONE_NEWUSER))
    if not root:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _file_system(binds: list[str], bytes_: int) -> None:
    """A root of its own: the `binds`, read-only, and a small writable /tmp."""
    here = kernel.MOUNT_POINT
    hidden = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", here, "tmpfs", hidden, "mode=0755,size=1m")
    for path in binds:
        inside = here + path
        if os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            with open(inside, "w"):
                pass
        kernel.mount(path, inside, None, kernel.MS_BIND | kernel.MS_REC)
    os.makedirs(here + "/tmp", exist_ok=True)
    shown = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID
    kernel.set_attributes("read-only", kernel.AT_FDCWD, here, kernel.AT_RECURSIVE, shown)
    kernel.mount("tmpfs", here + "/tmp", "tmpfs", hidden, f"mode=1777,size={bytes_}")
    kernel.pivot_into(here)
    os.chdir("/tmp")


def _limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _exec(spec: dict[str, Any]) -> NoReturn:
    _limits(spec["limits"])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The report descriptor is close-on-exec: its end of file tells the caller that the program runs.
    os.execve(spec["argv"][0], spec["argv"], {})


def _init(spec: dict[str, Any], root: bool, uid: int, parent: int) -> int:
    _file_system(spec["binds"], spec["disk_bytes"])
    if root:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel.no_new_privileges()
    # A change of uid clears the death signal, so it is set after it. Inside a pid namespace the parent shows as 0.
    kernel.die_with_parent(parent)
    child = os.fork()
    if child == 0:
        _guard(spec["report"], lambda: _exec(spec))
    os.close(spec["report"])
    for fd in (0, 1, 2):
        os.close(fd)
    return kernel.reap(child)


def _guard(report: int, step: Callable[[], int]) -> NoReturn:
    try:
        code = step()
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}"[:500].encode())
        code = 125
    os._exit(code)


def _launch() -> int:
    spec = json.loads(sys.argv[1])
    os.set_inheritable(spec["report"], False)
    kernel.die_with_parent(spec["parent"])
    root = os.geteuid() == 0
    uid = FIRST_UID + os.getpid()
    _namespaces(root)
    child = os.fork()
    if child == 0:
        _guard(spec["report"], lambda: _init(spec, root, uid, 0))
    os.close(spec["report"])
    for fd in (0, 1, 2):
        os.close(fd)
    return kernel.reap(child)


def main() -> None:
    _guard(json.loads(sys.argv[1])["report"], _launch)
