"""An overlay workspace is a boundary: each attack on the host, on the limits and on the other trials is made for real.

All as root inside, which can do what any agent can.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pipeline.harnesses.kernel import MOUNT_POINT
from pipeline.harnesses.workspaces.base import Ended, Limits, Workspace
from pipeline.harnesses.workspaces.overlay import OverlayWorkspaces
from tests.workspace_parts import groups, mounts, processes, refusal, spec

pytestmark = [
    pytest.mark.skipif(bool(refusal()), reason=refusal()),
    pytest.mark.asyncio(loop_scope="module"),
]
ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(memory_bytes=192 << 20, disk_bytes=64 << 20, processes=64)

DEVICES = [
    "fd",
    "full",
    "null",
    "ptmx",
    "pts",
    "random",
    "shm",
    "stderr",
    "stdin",
    "stdout",
    "tty",
    "urandom",
    "zero",
]

CALLS = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    return libc.syscall(ctypes.c_long(number), *arguments), ctypes.get_errno()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workspace(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workspace]:
    async with OverlayWorkspaces().open(
        spec("bound", tmp_path_factory.mktemp("none"), limits=LIMITS)
    ) as opened:
        yield opened


async def shell(workspace: Workspace, command: str, timeout_s: float = 30) -> Ended:
    return await workspace.run(["/bin/bash", "-c", command], timeout_s=timeout_s)


async def python(workspace: Workspace, code: str, timeout_s: float = 30) -> Ended:
    return await workspace.run(["python3", "-c", CALLS + code], timeout_s=timeout_s)


async def said(workspace: Workspace, code: str) -> list[str]:
    ended = await python(workspace, code)
    assert ended.returncode == 0, ended.describe()
    return ended.stdout.decode().split()


# Files.


async def test_nothing_of_the_hosts_files_is_there(workspace: Workspace, tmp_path: Path) -> None:
    secret = tmp_path / "secret-credentials"
    secret.write_text("of the broker")
    hidden = [
        str(secret),
        str(ROOT),
        "/etc/shadow",
        "/etc/machine-id",
        "/sys/fs/cgroup",
        "/boot",
        "/var/lib/dpkg",
        "/root/.ssh",
    ]
    ended = await shell(
        workspace, f"ls -d {' '.join(hidden)}; ls -A /root /home/agent /tmp /opt /srv /var/log"
    )
    assert not [
        line
        for line in ended.stdout.decode().splitlines()
        if line and not line.endswith(":") and line != ".pyenv"
    ]
    ended = await shell(
        workspace, "find / -xdev -not -path '/proc/*' -name 'secret-credentials*'; env | cut -d= -f1 | sort"
    )
    assert ended.stdout.split() == [b"HOME", b"LANG", b"PATH", b"PWD", b"SHLVL", b"_"]


async def test_links_chroot_and_process_roots_do_not_lead_out(workspace: Workspace) -> None:
    escape = """
os.makedirs('/tmp/jail', exist_ok=True)
top = os.open('/', os.O_RDONLY)
os.chroot('/tmp/jail')
os.fchdir(top)
for _ in range(64):
    os.chdir('..')
os.chroot('.')
print(os.path.exists('/tmp/jail'), os.path.exists('%s'))
for path in ('/proc/1/root', '/proc/1/cwd', '/proc/1/environ', '/proc/1/fd', '/proc/1/mem', '/proc/1/map_files'):
    try:
        os.listdir(path) if path.endswith(('root', 'cwd', 'fd', 'files')) else open(path).read()
        print('open', path)
    except PermissionError:
        print('closed')
"""
    assert await said(workspace, escape % ROOT) == ["True", "False", *["closed"] * 6]


async def test_what_is_written_over_the_hosts_programs_stays_inside(workspace: Workspace) -> None:
    before = Path("/usr/bin/env").stat()
    ended = await shell(
        workspace,
        "echo '#!/bin/sh' > /usr/bin/env; rm -r /usr/share/doc; touch /usr/bin/planted; mv /usr/bin/yes /usr/bin/no; ls /usr/bin/no",
    )
    assert ended.returncode == 0, ended.describe()
    after = Path("/usr/bin/env").stat()
    assert (before.st_size, before.st_mtime_ns, before.st_ino) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ino,
    )
    assert Path("/usr/bin/yes").exists()
    assert Path("/usr/share/doc").exists()
    assert not Path("/usr/bin/planted").exists()


async def test_devices_and_kernel_files_are_out_of_reach(workspace: Workspace) -> None:
    disk = Path("/").stat().st_dev
    code = f"""
import stat
try:
    os.mknod('/tmp/disk', 0o600 | stat.S_IFBLK, {disk})
    print('made')
except PermissionError:
    print('refused')
for path in ('/proc/sys/kernel/core_pattern', '/proc/sys/kernel/hostname', '/proc/sysrq-trigger', '/proc/sys/vm/drop_caches'):
    try:
        open(path, 'w').write('1')
        print('written' if 'trigger' not in path else 'refused')
    except OSError:
        print('refused')
print(open('/proc/cmdline').read(), len(open('/proc/kallsyms').read()), *sorted(os.listdir('/dev')))
"""
    assert await said(workspace, code) == [
        *["refused"] * 5,
        "0",
        *DEVICES,
    ]


# Privileges.


async def test_namespaces_mounts_and_kernel_interfaces_are_refused(workspace: Workspace) -> None:
    code = """
import platform
arm = platform.machine() == 'aarch64'
numbers = {'unshare': (272, 97), 'mount': (165, 40), 'setns': (308, 268), 'keyctl': (250, 219), 'bpf': (321, 280),
    'perf': (298, 241), 'userfaultfd': (323, 282), 'io_uring': (425, 425), 'clone3': (435, 435), 'open_tree': (428, 428),
    'clone': (56, 220), 'open_by_handle_at': (304, 265), 'syslog': (103, 116), 'x32': (0x40000000 + 39, 0x40000000 + 39)}
first = {'unshare': 0x10000000, 'clone': 0x10000011, 'syslog': 3}
for name, pair in numbers.items():
    result, error = call(pair[arm], ctypes.c_ulong(first.get(name, 0)), 0, 0, 0, 0, 0)
    if result == 0 and name == 'clone':
        os._exit(0)
    print(name, error)
"""
    out = await said(workspace, code)
    refused = dict(zip(out[::2], out[1::2], strict=True))
    assert {name for name, error in refused.items() if error == "1"} == refused.keys() - {
        "io_uring",
        "clone3",
        "x32",
    }
    assert {refused[name] for name in ("io_uring", "clone3", "x32")} == {"38"}


async def test_no_privilege_comes_with_a_program_and_pid_1_stands(workspace: Workspace) -> None:
    ended = await shell(
        workspace, "cp /bin/bash /tmp/b; chmod 6755 /tmp/b; kill -9 1; kill -STOP 1; kill -9 -1; true"
    )
    assert ended.returncode in (0, 137)
    ended = await workspace.run(
        ["/tmp/b", "-p", "-c", "id -u; grep -c NoNewPrivs:.1 /proc/self/status"], timeout_s=30, user="agent"
    )
    assert ended.stdout == b"1000\n1\n"
    ended = await shell(workspace, "grep -E 'Cap(Eff|Bnd|Prm)' /proc/self/status | cut -f2")
    # Its own files' owners, modes and processes, ports below 1024 and chroot.
    assert ended.stdout.split() == [b"00000000000405fb"] * 3
    traced = "print(libc.ptrace(16, 1, 0, 0))"
    assert await said(workspace, traced) == ["-1"]


async def test_root_inside_is_no_user_of_the_host(workspace: Workspace) -> None:
    mark = "overlay-mark-identity"
    running = asyncio.create_task(shell(workspace, f"exec -a {mark} sleep 600"))
    try:
        await until(lambda: bool(uids(mark)))
        assert all(uid >= 0x20000000 for uid in uids(mark))
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


# Processes and network.


async def test_a_program_inherits_no_descriptor(workspace: Workspace) -> None:
    ended = await shell(workspace, "ls /proc/self/fd; readlink /proc/self/fd/0")
    assert ended.stdout.split() == [b"0", b"1", b"2", b"3", b"/dev/null"]


async def test_no_process_of_the_host_is_seen(workspace: Workspace) -> None:
    pids = await said(workspace, "print(*[p for p in os.listdir('/proc') if p.isdecimal()])")
    assert len(pids) <= 3
    assert str(os.getpid()) not in pids or os.getpid() < 10


async def test_servers_of_the_host_are_out_of_reach(workspace: Workspace) -> None:
    """A broker's: on loopback, on every address of the machine, and an abstract Unix socket."""
    with socket.create_server(("0.0.0.0", 0)) as broker, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0overlay-test-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        port = broker.getsockname()[1]
        addresses = host_addresses()
        for address in addresses:
            socket.create_connection((address, port), 5).close()
        code = f"""
for address in {addresses!r}:
    try:
        socket.create_connection((address, {port}), 3)
        print('reached', address)
    except OSError as error:
        print('refused')
try:
    socket.socket(socket.AF_UNIX).connect({name!r})
    print('reached')
except ConnectionRefusedError:
    print('refused')
"""
        assert await said(workspace, code) == ["refused"] * (len(addresses) + 1)


async def test_the_internet_and_the_hypervisor_are_out_of_reach(workspace: Workspace) -> None:
    code = """
import errno
for family, address in ((socket.AF_INET, ('1.1.1.1', 53)), (socket.AF_INET, ('169.254.169.254', 80)), (socket.AF_INET6, ('2606:4700:4700::1111', 53))):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            s = socket.socket(family, kind)
            s.settimeout(3)
            s.connect(address)
            print('reached')
        except OSError as error:
            print(errno.errorcode[error.errno])
try:
    socket.getaddrinfo('example.com', 80)
except socket.gaierror:
    print('nameless')
for family in (socket.AF_VSOCK, socket.AF_PACKET, socket.AF_ALG, socket.AF_BLUETOOTH):
    try:
        socket.socket(family, socket.SOCK_STREAM)
        print('made')
    except OSError as error:
        print(errno.errorcode[error.errno])
print(*[name for _, name in socket.if_nameindex()])
"""
    out = await said(workspace, code)
    assert set(out[:6]) <= {"ENETUNREACH", "EADDRNOTAVAIL"}
    assert out[6:] == ["nameless", *["EAFNOSUPPORT"] * 4, "lo"]


# Limits.


async def test_a_fork_bomb_is_bounded_and_the_host_goes_on(workspace: Workspace) -> None:
    bomb = asyncio.create_task(
        shell(workspace, "bomb() { bomb | bomb & }; bomb; bomb; exec sleep 600", timeout_s=2)
    )
    most = 0
    while not bomb.done():
        folder = next(
            group
            for group in groups("bound")
            if Path(group, "pids.current").exists() and f"-{os.getpid()}-" in group
        )
        most = max(most, int(Path(folder, "pids.current").read_text()))
        assert subprocess.run(["true"], timeout=20).returncode == 0
        await asyncio.sleep(0.05)
    assert (await bomb).stopped == "time"
    # One that the workspace starts is moved into a full group, where it cannot fork.
    assert 32 <= most <= LIMITS.processes + 1
    assert (await shell(workspace, "ls /proc | grep -c '^[0-9]'")).stdout.strip() in (b"3", b"4")


async def test_a_memory_hog_is_killed_and_the_workspace_lives_on(workspace: Workspace) -> None:
    ended = await python(workspace, "held = [bytearray(8 << 20) for _ in range(100)]")
    assert (ended.returncode, ended.oom) == (137, True)
    ended = await shell(workspace, "echo alive")
    assert (ended.stdout, ended.oom) == (b"alive\n", False)
    assert await workspace.peak_bytes() <= LIMITS.memory_bytes


async def test_a_full_disk_is_the_workspaces_own(workspace: Workspace) -> None:
    code = """
import errno
written = 0
try:
    with open('/var/tmp/filler', 'wb') as file:
        while True:
            written += file.write(bytes(1 << 20))
            file.flush()
except OSError as error:
    print(errno.errorcode[error.errno], written >> 20)
try:
    open('/usr/lib/more', 'wb').write(bytes(1 << 20))
except OSError as error:
    print(errno.errorcode[error.errno])
os.unlink('/var/tmp/filler')
made = 0
try:
    while True:
        os.close(os.open(f'/tmp/f{made}', os.O_CREAT | os.O_WRONLY))
        made += 1
except OSError as error:
    print(errno.errorcode[error.errno], made < 20_000)
os.system('find /tmp -name "f*" -delete')
"""
    out = await said(workspace, code)
    assert out[0] == out[2] == out[3] == "ENOSPC"
    assert 50 <= int(out[1]) <= 64
    assert out[4] == "True"
    await workspace.write("/tmp/after", b"room again")


# Other trials, and afterwards.


async def test_two_workspaces_share_nothing(workspace: Workspace, tmp_path: Path) -> None:
    async with OverlayWorkspaces().open(spec("other", tmp_path)) as other:
        assert (
            await shell(
                other,
                "echo x > /tmp/of-the-other; (setsid sleep 600 &); (setsid python3 -m http.server --bind 127.0.0.1 80 >/dev/null 2>&1 &); until (: < /dev/tcp/127.0.0.1/80) 2>/dev/null; do sleep 0.01; done",
            )
        ).returncode == 0
        ended = await shell(
            workspace,
            "ls /tmp/of-the-other; (: < /dev/tcp/127.0.0.1/80) && echo reached; grep -l sleep /proc/[0-9]*/comm",
        )
        assert ended.stdout == b""


async def test_nothing_outlives_the_trial(tmp_path: Path) -> None:
    mark = "overlay-mark-outlive"
    fds = set(Path("/proc/self/fd").iterdir())
    async with OverlayWorkspaces().open(spec("outlive", tmp_path)) as workspace:
        daemon = f"trap '' TERM HUP; (setsid bash -c 'trap \"\" TERM HUP; (exec -a {mark} sleep 600) & disown; exit' &); exit"
        assert (await shell(workspace, daemon)).returncode == 0
        await until(lambda: bool(processes(mark)))
        assert groups("outlive")
    assert processes(mark) == []
    assert groups("outlive") == []
    assert mounts() == [MOUNT_POINT]
    await until(lambda: set(Path("/proc/self/fd").iterdir()) <= fds)


async def until(holds: object, within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


def uids(mark: str) -> list[int]:
    """The host's ids of the processes whose command line is the mark's."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if (entry / "cmdline").read_bytes().startswith(mark.encode()):
                    found.append(entry.stat().st_uid)
            except OSError:
                continue
    return found


def host_addresses() -> list[str]:
    """Every IPv4 address of this machine's interfaces."""
    found = {"127.0.0.1"}
    with socket.socket() as some:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(some, 0x8915, struct.pack("256s", name.encode()))
            except OSError:
                continue
            found.add(socket.inet_ntoa(answer[20:24]))
    return sorted(found)
