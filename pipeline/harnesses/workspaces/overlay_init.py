"""The root program of a workspace: makes its namespaces, is its pid 1, and starts what the host asks for.

Executed as `kernel.program` says, with two arguments: the descriptor of a SOCK_SEQPACKET socket to the host, and the host's
pid. Two processes stay: this one, which waits outside, and its child, pid 1 inside. When the host goes, or closes the
socket, or one of the two is killed, the kernel kills all that is left in the pid namespace, and with the last process the
mounts and the network go.

Promises for every program that it starts:
- a root caller's workspace has a user namespace over a range of ids that nobody else has, and owns no other namespace: root
  inside has no right over its mounts, its network or its pids; an ordinary caller's root is the caller itself;
- no capability but a few over its own files and processes, no new privileges, a filter of system calls;
- it is in the workspace's control groups before it begins, while pid 1, which cannot be traced or killed from inside, is not.

No signal but SIGKILL ends either process: who stops a host may send SIGTERM to all that it started, and its trials are to end first.

The host sends: one message with the settings (a memfd of a marshalled dict; descriptors of the groups' cgroup.procs), then a message for
each program: its number, with a memfd of a marshalled dict, stdin, stdout, stderr and its own cgroup.procs. It gets one message, of
text, when all is ready, with the listening socket, and one for each program that ended.
"""

# os alone, since importing pathlib costs each start 3 ms; execve is this file's purpose.
# ruff: noqa: PTH123, S606
from __future__ import annotations

import array
import errno
import marshal
import os
import resource
import select
import signal
import socket
import sys

from pipeline.harnesses import kernel
from pipeline.harnesses.workspaces import overlay_files, overlay_root, seccomp

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Not at run time: typing, like dataclasses, json and re, costs each start milliseconds.
    from typing import Any, NoReturn

FIRST_ID, IDS, RANGES = 0x20000000, 0x10000, 0x8000
"""Ids of a workspace on the host: far above allocated ones, chosen by pid."""

KEPT_CAPABILITIES = frozenset((0, 1, 3, 4, 5, 6, 7, 8, 10, 18))
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT."""

_OPEN_FILES = 65_536
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        kernel.die_with_parent(int(sys.argv[2]))
        _, fds = kernel.received(control, 8)
        settings = _settings(fds[0])
        code = _start(control, settings, fds[1:])
    except BaseException as error:
        _refused(control, error)
        code = 125
    os._exit(code)


def _refused(control: socket.socket, error: BaseException) -> None:
    control.send(f"refused {type(error).__name__}: {error}"[:1000].encode(errors="replace"))


def _start(control: socket.socket, settings: dict[str, Any], groups: list[int]) -> int:
    os.umask(0)
    root = os.geteuid() == 0
    first = FIRST_ID + os.getpid() % RANGES * IDS if root else 0
    users = _user_namespace(first) if root else -1
    own = (
        kernel.CLONE_NEWNS,
        kernel.CLONE_NEWPID,
        kernel.CLONE_NEWNET,
        kernel.CLONE_NEWUTS,
        kernel.CLONE_NEWIPC,
    )
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(sum(own) | kernel.CLONE_NEWCGROUP | (0 if root else kernel.CLONE_NEWUSER))
    if not root:
        _map("/proc/self", ("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1"))
    child = os.fork()
    if child == 0:
        try:
            _init(control, settings, groups, first, users)
        except BaseException as error:
            _refused(control, error)
        os._exit(125)
    control.close()
    for fd in (users, *groups):
        if fd >= 0:
            os.close(fd)
    return kernel.reap(child)


def _user_namespace(first: int) -> int:
    """A descriptor of a new user namespace, whose ids from 0 on are the host's from `first` on."""
    ready, ready_w = os.pipe()
    hold, hold_w = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(hold_w)
            kernel.unshare(kernel.CLONE_NEWUSER)
            os.write(ready_w, b".")
            os.read(hold, 1)
        except BaseException as error:
            os.write(ready_w, str(error).encode())
        os._exit(0)
    for fd in (ready_w, hold):
        os.close(fd)
    try:
        said = os.read(ready, 500)
        if said != b".":
            raise kernel.Trouble(f"user namespace: {said.decode(errors='replace')}")
        _map(f"/proc/{child}", ("uid_map", f"0 {first} {IDS}"), ("gid_map", f"0 {first} {IDS}"))
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (ready, hold_w):
            os.close(fd)
        os.waitpid(child, 0)


def _map(process: str, *texts: tuple[str, str]) -> None:
    for name, text in texts:
        try:
            with open(f"{process}/{name}", "w", encoding="ascii") as file:
                file.write(text)
        except OSError as error:
            raise kernel.Trouble(f"{name} {text!r}: {error.strerror}") from error


def _init(
    control: socket.socket, settings: dict[str, Any], groups: list[int], first: int, users: int
) -> None:
    kernel.die_with_parent(0)
    kernel.loopback_up()
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        last_capability = int(file.read())
    # Root inside has no right over the network namespace, and servers in a trial like low ports.
    with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", "w", encoding="ascii") as file:
        file.write("0")
    socket.sethostname("workspace")
    binds = [(source, target) for source, target in settings["binds"]]
    writable = overlay_root.build(settings["disk_bytes"], binds, first, users)
    # From here on everything may be the workspace's: nothing is imported from there.
    sys.path.clear()
    sys.meta_path.clear()
    listening = _listening(settings["port"])
    if users >= 0:
        kernel.enter_user_namespace(users)
        os.close(users)
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    kernel.keep_capabilities(KEPT_CAPABILITIES, last_capability)
    kernel.no_new_privileges()
    seccomp.install()
    kernel.die_with_parent(0)
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(hard, _OPEN_FILES) if hard != resource.RLIM_INFINITY else _OPEN_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    rights = (
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listening.fileno()]))] if listening else []
    )
    control.sendmsg([b"ready %d" % writable], rights)
    if listening:
        listening.close()
    _serve(control, groups)


def _listening(port: int) -> socket.socket | None:
    """Stays in this network namespace, whoever serves it."""
    return socket.create_server(("127.0.0.1", port), backlog=1024) if port else None


def _serve(control: socket.socket, groups: list[int]) -> NoReturn:
    died, died_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, _nothing)
    signal.set_wakeup_fd(died_w, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(died, select.POLLIN)
    programs: dict[int, int] = {}
    while True:
        for fd, _ in poll.poll():
            if fd == died:
                os.read(died, 4096)
                _reap(control, programs)
                continue
            message, fds = kernel.received(control, 5)
            if not message:
                os._exit(0)
            number = int(message)
            try:
                pid = os.fork()
            except OSError as error:
                control.send(f"failed {number} fork: {error.strerror}".encode())
            else:
                if pid == 0:
                    _child(fds, groups)
                programs[pid] = number
            for received in fds:
                os.close(received)


def _nothing(_number: int, _frame: object) -> None:
    """The signal has done its work when it wrote to the wakeup descriptor."""


def _reap(control: socket.socket, programs: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        number = programs.pop(pid, None)
        if number is not None:
            control.send(b"ended %d %d" % (number, kernel.exit_status(status)))


def _child(fds: list[int], groups: list[int]) -> NoReturn:
    code = 125
    try:
        request, stdin, stdout, stderr, own_group = fds
        for group in (own_group, *groups):
            os.write(group, b"0")
        for fd, at in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(fd, at)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, *_IGNORED):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        what = _settings(request)
        if what["do"] == "run":
            code = _program(what)
        elif what["do"] == "put":
            code = overlay_files.unpack_stdin(_identity(what.get("owner") or "root")[:2])
        elif what["do"] == "get":
            code = overlay_files.read(what["path"], what["most"])
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode(errors="replace"))
    os._exit(code)


def _program(what: dict[str, Any]) -> int:
    argv, env = what["argv"], what["env"]
    try:
        user, group, groups, home = _identity(what["user"])
        if (user, group, groups) != (0, 0, [0]):
            os.setgroups(groups)
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
        env.setdefault("HOME", home)
        os.chdir(what["cwd"])
    except (OSError, ValueError) as error:
        os.write(2, f"workspace: {error}\n".encode(errors="replace"))
        return 126
    name = argv[0]
    places = [""] if "/" in name else [f"{place}/" for place in env.get("PATH", "").split(":") if place]
    trouble = errno.ENOENT
    for place in places:
        try:
            os.execve(place + name, argv, env)
        except OSError as error:
            # A program that is there but cannot be executed says more than the next place, where there is none.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                trouble = error.errno or errno.EIO
    os.write(2, f"{name}: {os.strerror(trouble)}\n".encode(errors="replace"))
    return 127 if trouble == errno.ENOENT else 126


def _identity(user: str) -> tuple[int, int, list[int], str]:
    """Uid, gid, groups and home of `name`, `number`, `name:group` or `number:number` by the workspace's own files."""
    name, _, group_name = user.partition(":")
    people, groups = _entries("/etc/passwd", 6), _entries("/etc/group", 4)
    found = next((entry for entry in people if name in (entry[0], entry[2])), None)
    if found is None and not name.isdecimal():
        raise ValueError(f"no user {name!r} in the workspace's /etc/passwd")
    uid, gid, home = (int(found[2]), int(found[3]), found[5]) if found else (int(name), int(name), "/")
    if group_name:
        group = next((entry for entry in groups if group_name in (entry[0], entry[2])), None)
        if group is None and not group_name.isdecimal():
            raise ValueError(f"no group {group_name!r} in the workspace's /etc/group")
        gid = int(group[2]) if group else int(group_name)
    more = [int(entry[2]) for entry in groups if found and found[0] in entry[3].split(",")]
    return uid, gid, [gid, *(other for other in more if other != gid)], home


def _entries(path: str, fields: int) -> list[list[str]]:
    try:
        with open(path, "rb") as file:
            lines = file.read(1 << 20).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [entry for entry in (line.split(":") for line in lines) if len(entry) >= fields]


def _settings(fd: int) -> dict[str, Any]:
    with open(fd, "rb") as file:
        return marshal.loads(file.read())  # noqa: S302 - from the host
