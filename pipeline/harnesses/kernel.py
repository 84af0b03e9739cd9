"""Linux calls that Python has no names for: namespaces, mounts, capabilities. For programs that build a sandbox.

Such programs run as `program(module)` says: with os and the standard library alone, without site and without environment,
since what a sandbox's root program imports it runs. Each call raises `Trouble`, which names the step.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Not at run time: typing and collections cost each start 10 ms.
    from collections.abc import Callable
    from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_IDMAP = 0x1, 0x2, 0x4, 0x100000
MNT_DETACH = 2
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPABILITY_VERSION = 0x20080522
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1

MOUNT_POINT = "/proc"
"""Where a new root is put together, seen by the sandbox alone: a directory that every machine has, so that none is
made for a run and none is left when the caller is killed."""

_ROOT = os.path.realpath(__file__ + "/../../..")
_libc = ctypes.CDLL(None, use_errno=True)


class Trouble(Exception):
    """A step that the kernel refused."""


def program(module: str) -> list[str]:
    """Argv up to the arguments of a program whose `main` is in `module`, which is ours."""
    start = f"import sys; sys.path.append({_ROOT!r}); from {module} import main; main()"
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", start]


def _call(what: str, function: Callable[..., int], *arguments: Any) -> int:
    result = function(*arguments)
    if result < 0:
        raise Trouble(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _syscall(what: str, number: int, *arguments: Any) -> int:
    return _call(what, _libc.syscall, ctypes.c_long(number), *arguments)


def prctl(what: str, option: int, *arguments: Any) -> None:
    padded = [*arguments, 0, 0, 0, 0][:4]
    values = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in padded]
    _call(f"prctl {what}", _libc.prctl, option, *values)


def unshare(flags: int) -> None:
    _call("unshare", _libc.unshare, flags)


def enter_user_namespace(fd: int) -> None:
    _call("setns", _libc.setns, fd, CLONE_NEWUSER)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if part is None else os.fsencode(part) for part in (source, target, kind)]
    options = None if data is None else os.fsencode(data)
    _call(f"mount {target}", _libc.mount, *encoded, ctypes.c_ulong(flags), options)


def set_attributes(
    what: str, fd: int, path: str, flags: int, attributes: int, user_namespace: int = 0
) -> None:
    block = (ctypes.c_uint64 * 4)(attributes, 0, 0, user_namespace)
    _syscall(
        f"mount_setattr {what}", SYS_MOUNT_SETATTR, fd, os.fsencode(path), flags, block, ctypes.c_size_t(32)
    )


def clone_mount(source: str, attributes: int, user_namespace: int = -1) -> int:
    """A descriptor of a mount of one file or folder, without what is mounted below it, which is not anywhere yet. With
    `user_namespace` (a descriptor) the host's ids show as that namespace's: needs Linux >= 5.12 and a file system that can."""
    what = f"open_tree {source}"
    tree = _syscall(what, SYS_OPEN_TREE, AT_FDCWD, os.fsencode(source), OPEN_TREE_CLONE | os.O_CLOEXEC)
    try:
        if user_namespace >= 0:
            attributes |= MOUNT_ATTR_IDMAP
        set_attributes(source, tree, "", AT_EMPTY_PATH, attributes, max(0, user_namespace))
    except BaseException:
        os.close(tree)
        raise
    return tree


def attach(tree: int, target: str) -> None:
    """Shows a mount of `clone_mount` at `target`, and closes its descriptor."""
    try:
        where = (AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)
        _syscall(f"move_mount {target}", SYS_MOVE_MOUNT, tree, b"", *where)
    finally:
        os.close(tree)


def pivot_into(root: str) -> None:
    """Makes the mount `root` the root, and lets go of the former one."""
    os.chdir(root)
    number = SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise Trouble(f"pivot_root is not known on {os.uname().machine}")
    _syscall("pivot_root", number, b".", b".")
    _call("umount of the old root", _libc.umount2, b".", MNT_DETACH)
    os.chdir("/")


def die_with_parent(parent: int) -> None:
    """SIGKILL for the caller when its parent ends. A change of uid clears it. In a new pid namespace the parent is 0."""
    prctl("PDEATHSIG", PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        raise Trouble("the parent is gone")


def no_new_privileges() -> None:
    prctl("NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)


def keep_capabilities(kept: frozenset[int], last: int) -> None:
    """Gives up all capabilities but `kept`, also those that executing a program could bring; `last` is the highest."""
    for number in range(last + 1):
        if number not in kept:
            prctl(f"CAPBSET_DROP {number}", PR_CAPBSET_DROP, number)
    mask = sum(1 << number for number in kept)
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    _call("capset", _libc.capset, header, struct.pack("=6I", low, low, 0, high, high, 0))


def loopback_up() -> None:
    with socket.socket() as some:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(some, SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(some, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def received(connection: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """A message and its descriptors, `most` at most, which no program that is executed inherits: `socket.recv_fds` leaves out
    the flag for that, whatever it is told."""
    numbers = array.array("i")
    space = socket.CMSG_LEN(most * numbers.itemsize)
    message, extra, _, _ = connection.recvmsg(4096, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return message, list(numbers)


def reap(child: int) -> int:
    """Wait as pid 1 does: reap every orphan, return the exit status of `child` as a shell would."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return exit_status(status)


def exit_status(status: int) -> int:
    """A wait status as a shell shows it: 128 + n for signal n."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
