"""Runs one program in namespaces of its own. Executed as a script (`python -I -S sandbox_launcher.py SPEC`); it imports
nothing of ours. SPEC is JSON: argv, binds, limits, and the descriptor that trouble is reported on.

Three processes: this one makes the namespaces and waits; its child is pid 1 of the new pid namespace, builds the file
system, gives up root and waits; the grandchild takes the limits and becomes the program. When pid 1 goes, for whatever
reason, the kernel kills all that is left in the namespace. Any step that fails is reported and the program is not run.

A root caller needs no user namespace and ends under a uid that no one else has, so that RLIMIT_NPROC counts this
sandbox alone. An ordinary caller gets a user namespace, where the count begins anew (Linux >= 5.14).
"""

# os alone, since importing pathlib costs each start 3 ms; /tmp is the sandbox's own; execve is this file's purpose.
# ruff: noqa: PTH103, PTH112, PTH120, PTH123, S108, S606
import ctypes
import json
import os
import platform
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 0x1, 0x2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SYS_MOUNT_SETATTR = 442
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
FIRST_UID = 0x70000000
"""Far above allocated uids; the launcher's pid, at most 2**22, is added."""

MOUNT_POINT = "/proc"
"""Where the new root is put together, seen by the sandbox alone: a directory that every machine has, so that none is
made for a run and none is left when the caller is killed."""

_libc = ctypes.CDLL(None, use_errno=True)


class Trouble(Exception):
    """A step that the kernel refused."""


def _call(what: str, function: Callable[..., int], *arguments: Any) -> None:
    if function(*arguments) < 0:
        raise Trouble(f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if part is None else part.encode() for part in (source, target, kind)]
    options = None if data is None else data.encode()
    _call(f"mount {target}", _libc.mount, *encoded, ctypes.c_ulong(flags), options)


def _die_with_parent(parent: int) -> None:
    _call("prctl PDEATHSIG", _libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise Trouble("the parent is gone")


def _namespaces(root: bool) -> None:
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", _libc.unshare, flags if root else flags | CLONE_NEWUSER)
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
    here = MOUNT_POINT
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", here, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
    for path in binds:
        inside = here + path
        if os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            with open(inside, "w"):
                pass
        _mount(path, inside, None, MS_BIND | MS_REC)
    os.makedirs(here + "/tmp", exist_ok=True)
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    path_bytes = here.encode()
    setattr_ = (
        ctypes.c_long(SYS_MOUNT_SETATTR),
        AT_FDCWD,
        path_bytes,
        AT_RECURSIVE,
        attributes,
        ctypes.c_size_t(32),
    )
    _call("mount_setattr read-only", _libc.syscall, *setattr_)
    _mount("tmpfs", here + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={bytes_}")
    os.chdir(here)
    pivot = SYS_PIVOT_ROOT.get(platform.machine())
    if pivot is None:
        raise Trouble(f"pivot_root is not known on {platform.machine()}")
    _call("pivot_root", _libc.syscall, ctypes.c_long(pivot), b".", b".")
    _call("umount of the old root", _libc.umount2, b".", MNT_DETACH)
    os.chdir("/tmp")


def _limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reap(child: int) -> int:
    """Wait as pid 1 does: reap every orphan, return the exit status of `child` as a shell would."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


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
    _call("prctl NO_NEW_PRIVS", _libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # A change of uid clears the death signal, so it is set after it. Inside a pid namespace the parent shows as 0.
    _die_with_parent(parent)
    child = os.fork()
    if child == 0:
        _guard(spec["report"], lambda: _exec(spec))
    os.close(spec["report"])
    for fd in (0, 1, 2):
        os.close(fd)
    return _reap(child)


def _guard(report: int, step: Callable[[], int]) -> NoReturn:
    try:
        code = step()
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}"[:500].encode())
        code = 125
    os._exit(code)


def main() -> int:
    spec = json.loads(sys.argv[1])
    os.set_inheritable(spec["report"], False)
    _die_with_parent(spec["parent"])
    root = os.geteuid() == 0
    uid = FIRST_UID + os.getpid()
    _namespaces(root)
    child = os.fork()
    if child == 0:
        _guard(spec["report"], lambda: _init(spec, root, uid, 0))
    os.close(spec["report"])
    for fd in (0, 1, 2):
        os.close(fd)
    return _reap(child)


if __name__ == "__main__":
    _guard(json.loads(sys.argv[1])["report"], main)
