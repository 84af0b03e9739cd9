"""The root of a workspace: the host's programs, and nothing else of the host.

Promises, once `build` returned:
- /usr (and /bin, /lib* and /sbin, where they are no links) hold the host's programs; what is written there stays in the
  workspace, or cannot be written where the kernel cannot show the host's files as the workspace's own (see `build`);
- /etc is made here; of the host's it has what the loader, alternatives and certificates need, read-only;
- all that is written lies on one tmpfs of `disk_bytes`; the host's folders that are named in `binds` are read-only;
- /proc is the workspace's own, without what tells of or acts on the machine; /dev has no device but the pseudo ones.
"""

# os alone, since importing pathlib costs each start 3 ms.
# ruff: noqa: PTH101, PTH102, PTH103, PTH110, PTH112, PTH114, PTH115, PTH120, PTH123, PTH208, PTH211
from __future__ import annotations

import os

from pipeline.harnesses.kernel import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    MOUNT_POINT,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    Trouble,
    attach,
    clone_mount,
    mount,
    pivot_into,
)

SHOWN = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
INODES_LEAST, BYTES_AN_INODE = 16_384, 4_096
TTY_GROUP = 5

_FOLDERS = {
    "dev": 0o755,
    "dev/pts": 0o755,
    "dev/shm": 0o1777,
    "etc": 0o755,
    "etc/ssl": 0o755,
    "home": 0o755,
    "home/agent": 0o755,
    "logs": 0o1777,
    "media": 0o755,
    "mnt": 0o755,
    "opt": 0o755,
    "proc": 0o555,
    "root": 0o755,
    "run": 0o755,
    "run/lock": 0o1777,
    "srv": 0o755,
    "tmp": 0o1777,
    "var": 0o755,
    "var/cache": 0o755,
    "var/lib": 0o755,
    "var/log": 0o755,
    "var/tmp": 0o1777,
}
_LINKS = {
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
    "dev/ptmx": "pts/ptmx",
    "etc/mtab": "/proc/self/mounts",
    "etc/os-release": "../usr/lib/os-release",
    "var/run": "/run",
}
_TEXTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\ntty:x:5:\nusers:x:100:\nagent:x:1000:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost workspace\n::1 localhost\n",
    "etc/hostname": "workspace\n",
    "etc/resolv.conf": "",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\nprotocols: files\n",
    "etc/shells": "/bin/sh\n/bin/bash\n",
}
_OF_THE_HOST = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/login.defs",
    "/etc/magic",
    "/etc/mime.types",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_HIDDEN = (
    "acpi",
    "asound",
    "cmdline",
    "config.gz",
    "interrupts",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kmsg",
    "latency_stats",
    "sched_debug",
    "scsi",
    "sysrq-trigger",
    "timer_list",
    "timer_stats",
)
_READ_ONLY = ("bus", "fs", "irq", "sys")


def build(disk_bytes: int, binds: list[tuple[str, str]], owner: int, user_namespace: int) -> bool:
    """Makes the root and enters it; `binds` are (source, target). `owner` is the host's id of the workspace's root, whose
    user namespace is open as `user_namespace` (-1: the caller is in it already). Returns whether /usr can be written to:
    where not, the kernel lacks overlays of mounts with mapped ids (Linux >= 5.19, and not on top of an overlay)."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    inodes = max(INODES_LEAST, disk_bytes // BYTES_AN_INODE)
    options = f"mode=0755,size={disk_bytes},nr_inodes={inodes}"
    mount("tmpfs", MOUNT_POINT, "tmpfs", MS_NOSUID | MS_NODEV, options)
    root = MOUNT_POINT + "/root"
    _folder(root, 0o755, owner)
    mount(root, root, None, MS_BIND)
    _skeleton(root, owner)
    writable = _programs(root, owner, user_namespace)
    _devices(root, owner if user_namespace >= 0 else None)
    # The sources are opened in the old root and shown in the new one, where no link leads out of it.
    shown = [(path, path) for path in _OF_THE_HOST if os.path.exists(path)] + binds
    trees = [
        (_shown(os.path.realpath(source), user_namespace), os.path.isdir(source), target)
        for source, target in shown
    ]
    _processes(root)
    pivot_into(root)
    for tree, is_folder, target in trees:
        _place(target, is_folder, owner)
        attach(tree, target)
    return writable


def _folder(path: str, mode: int, owner: int) -> None:
    os.mkdir(path)
    os.chmod(path, mode)
    os.chown(path, owner, owner)


def _file(path: str, text: str, owner: int) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
    os.chmod(path, 0o644)
    os.chown(path, owner, owner)


def _link(path: str, target: str, owner: int) -> None:
    os.symlink(target, path)
    os.lchown(path, owner, owner)


def _skeleton(root: str, owner: int) -> None:
    for name, mode in _FOLDERS.items():
        _folder(f"{root}/{name}", mode, owner)
    for name, text in _TEXTS.items():
        _file(f"{root}/{name}", text, owner)
    for name, target in _LINKS.items():
        _link(f"{root}/{name}", target, owner)
    agent = owner + 1000
    # An ordinary caller's namespace has its own id alone.
    if owner:
        os.chown(f"{root}/home/agent", agent, agent)


def _programs(root: str, owner: int, user_namespace: int) -> bool:
    writable = user_namespace >= 0
    for name in sorted(os.listdir("/")):
        if name not in ("usr", "bin", "sbin") and not name.startswith("lib"):
            continue
        path = "/" + name
        if os.path.islink(path):
            _link(root + path, os.readlink(path), owner)
        elif os.path.isdir(path):
            _folder(root + path, 0o755, owner)
            writable = writable and _overlay(path, root + path, owner, user_namespace)
            if not writable:
                attach(clone_mount(path, SHOWN), root + path)
    return writable


def _overlay(path: str, target: str, owner: int, user_namespace: int) -> bool:
    lower, upper, work = (f"{MOUNT_POINT}/{part}{path}" for part in ("lower", "upper", "work"))
    for folder in (lower, upper, work):
        os.makedirs(folder, mode=0o755)
    os.chown(upper, owner, owner)
    try:
        attach(clone_mount(path, SHOWN, user_namespace), lower)
        # On a tmpfs a sync has nothing to do; `volatile` spares the calls.
        layers = f"lowerdir={lower},upperdir={upper},workdir={work},volatile,xino=off"
        mount("overlay", target, "overlay", MS_NOSUID | MS_NODEV, layers)
    except Trouble:
        return False
    return True


def _devices(root: str, owner: int | None) -> None:
    for name in _DEVICES:
        _file(f"{root}/dev/{name}", "", owner or 0)
        attach(clone_mount(f"/dev/{name}", MOUNT_ATTR_NOSUID), f"{root}/dev/{name}")
    group = "" if owner is None else f",gid={owner + TTY_GROUP}"
    options = f"newinstance,ptmxmode=0666,mode=0620{group}"
    mount("devpts", f"{root}/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)


def _processes(root: str) -> None:
    own = f"{root}/proc"
    mount("proc", own, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in _HIDDEN:
        path = f"{own}/{name}"
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k,nr_inodes=2")
        elif os.path.exists(path):
            attach(clone_mount("/dev/null", MOUNT_ATTR_NOSUID), path)
    for name in _READ_ONLY:
        path = f"{own}/{name}"
        if os.path.exists(path):
            attach(clone_mount(path, SHOWN), path)


def _shown(source: str, user_namespace: int) -> int:
    """The mount of something of the host, its files as the workspace's own where the file system can."""
    if user_namespace >= 0:
        try:
            return clone_mount(source, SHOWN, user_namespace)
        except Trouble:
            pass
    return clone_mount(source, SHOWN)


def _place(target: str, is_folder: bool, owner: int) -> None:
    """Where a mount goes: a folder or an empty file, with its parents."""
    parent = os.path.dirname(target)
    missing: list[str] = []
    while not os.path.isdir(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    for folder in reversed(missing):
        _folder(folder, 0o755, owner)
    if os.path.isdir(target) if is_folder else os.path.exists(target):
        return
    if is_folder:
        _folder(target, 0o755, owner)
    else:
        _file(target, "", owner)
