"""A filter of system calls for programs in a workspace: what a trial has no use for and a kernel's defect could live in.

Promises, for the caller and all its descendants, for ever:
- no namespace is made or entered, nothing is mounted, no key ring, module, BPF, performance event, io_uring;
- sockets are Unix, IPv4, IPv6 and route netlink ones: vsock, for one, passes by network namespaces to a machine's hypervisor;
- calls by another architecture's or x32's numbers fail, so that nothing of this is had under another name.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct

from pipeline.harnesses.kernel import Trouble, prctl

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000
_NAMESPACES = (
    0x00000080 | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)


# Architecture; clone, unshare, socket, socketpair; and as denied: mount, umount2, pivot_root, swapon, swapoff, reboot, setns,
# add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, kexec_load, kexec_file_load, init_module, finit_module,
# delete_module, acct, syslog, quotactl, open_by_handle_at, lookup_dcookie, fanotify_init, move_pages; iopl and ioperm.
# fmt: off
_MACHINES = {
    "x86_64": (0xC000003E, 56, 272, 41, 53, (
        165, 166, 155, 167, 168, 169, 308, 248, 249, 250, 321, 298, 323, 246, 320, 175, 313, 176, 163, 103, 179, 304, 212,
        300, 279, 172, 173)),
    "aarch64": (0xC00000B7, 220, 97, 198, 199, (
        40, 39, 41, 224, 225, 142, 268, 217, 218, 219, 280, 241, 282, 104, 294, 105, 273, 106, 89, 116, 60, 265, 18,
        262, 239)),
}
# fmt: on
_DENIED = (428, 429, 430, 431, 432, 433, 442, 443, 467)
"""open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr, quotactl_fd, open_tree_attr: one number everywhere."""

_ABSENT = (425, 426, 427, 435)
"""io_uring_*, which makes sockets past a filter, and clone3, whose flags a filter cannot read: callers fall back at ENOSYS."""


def program(machine: str) -> bytes:
    """The filter for `machine` in BPF. Raises `Trouble` for one that is not known."""
    numbers = _MACHINES.get(machine)
    if numbers is None:
        raise Trouble(f"seccomp: no system call numbers for {machine}; known: {', '.join(_MACHINES)}")
    architecture, clone, unshare, socket_, socketpair, denied = numbers
    code: list[bytes] = []

    def step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        code.append(struct.pack("=HBBI", operation, if_true, if_false, value))

    def refuse(error: int) -> None:
        step(_RETURN, _ERRNO | error)

    def refuse_if(operation: int, value: int, error: int) -> None:
        step(operation, value, 0, 1)
        refuse(error)

    step(_LOAD, _ARCHITECTURE)
    step(_EQUAL, architecture, 1, 0)
    refuse(errno.ENOSYS)
    step(_LOAD, _NUMBER)
    refuse_if(_AT_LEAST, _X32, errno.ENOSYS)
    for number in _ABSENT:
        refuse_if(_EQUAL, number, errno.ENOSYS)
    for number in (*denied, *_DENIED):
        refuse_if(_EQUAL, number, errno.EPERM)
    for number in (clone, unshare):
        step(_EQUAL, number, 0, 4)
        step(_LOAD, _ARGUMENTS)
        refuse_if(_ANY_BIT, _NAMESPACES & ~0x80 if number == clone else _NAMESPACES, errno.EPERM)
        step(_RETURN, _ALLOW)
    step(_EQUAL, socketpair, 1, 0)
    step(_EQUAL, socket_, 0, 9)
    step(_LOAD, _ARGUMENTS)
    step(_EQUAL, socket.AF_UNIX, 5, 0)
    step(_EQUAL, socket.AF_INET, 4, 0)
    step(_EQUAL, socket.AF_INET6, 3, 0)
    step(_EQUAL, socket.AF_NETLINK, 0, 3)
    step(_LOAD, _ARGUMENTS + 16)
    step(_EQUAL, 0, 0, 1)
    step(_RETURN, _ALLOW)
    refuse(errno.EAFNOSUPPORT)
    # Where a call that is neither of the two goes: over nine steps, of which the last is the refusal.
    step(_RETURN, _ALLOW)
    return b"".join(code)


def install() -> None:
    """For the caller; it needs no privilege, once no new privileges can be had."""
    text = program(os.uname().machine)
    instructions = ctypes.create_string_buffer(text, len(text))
    head = struct.pack("@HP", len(text) // 8, ctypes.addressof(instructions))
    prctl("SECCOMP", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(head, len(head)))
