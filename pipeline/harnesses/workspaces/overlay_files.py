"""Files that go over the border of a workspace, as a stream of entries: the length of a marshalled dict, the dict, a file's
bytes.

The host writes a stream and reads bytes; it opens no path of a workspace. `unpack` and `read` run inside, as its root.
"""

# os alone, since importing pathlib costs each start 3 ms.
# ruff: noqa: PTH101, PTH102, PTH108, PTH112, PTH114, PTH115, PTH119, PTH120, PTH123, PTH208, PTH211
from __future__ import annotations

import errno
import marshal
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Not at run time: typing, like dataclasses, json and re, costs each start milliseconds.
    from collections.abc import Iterator
    from typing import Any, BinaryIO

CHUNK = 1 << 18


def pack(source: str, target: str, into: BinaryIO) -> None:
    """A file as `target`, or in it when that is a folder there, or a folder's content below it; links below it as they are.
    Raises FileNotFoundError, and ValueError for what is neither."""
    asked, source = source, os.path.realpath(source)
    for path, name in _walk(source, target):
        info = os.lstat(path)
        entry = {"path": name, "mode": stat.S_IMODE(info.st_mode) & 0o777}
        if stat.S_ISDIR(info.st_mode):
            _line(into, {**entry, "kind": "folder"})
        elif stat.S_ISLNK(info.st_mode):
            _line(into, {**entry, "kind": "link", "to": os.readlink(path)})
        elif stat.S_ISREG(info.st_mode):
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                named = {"name": os.path.basename(asked)} if path == source else {}
                _line(into, {**entry, **named, "kind": "file", "bytes": size})
                _copied(file, into, size, path)
        else:
            raise ValueError(f"{path} is neither a file nor a folder nor a link")


def pack_bytes(target: str, mode: int, data: bytes, into: BinaryIO) -> None:
    _line(into, {"path": target, "mode": mode, "kind": "file", "bytes": len(data)})
    into.write(data)


def pack_folder(target: str, into: BinaryIO) -> None:
    _line(into, {"path": target, "mode": 0o755, "kind": "folder"})


def _walk(source: str, target: str) -> Iterator[tuple[str, str]]:
    yield source, target
    if os.path.isdir(source) and not os.path.islink(source):
        for name in sorted(os.listdir(source)):
            yield from _walk(f"{source}/{name}", f"{target.rstrip('/')}/{name}")


def _line(into: BinaryIO, entry: dict[str, Any]) -> None:
    data = marshal.dumps(entry)
    into.write(b"%d\n" % len(data) + data)


def _copied(source: BinaryIO, into: BinaryIO, size: int, name: str) -> None:
    left = size
    while left:
        chunk = source.read(min(CHUNK, left))
        if not chunk:
            raise ValueError(f"{name} ended {left} bytes before its end")
        into.write(chunk)
        left -= len(chunk)


def unpack(stream: BinaryIO, owner: tuple[int, int]) -> None:
    """Makes the entries, as `owner`'s; a file or a link that is in the way is replaced, a folder stays. Raises OSError."""
    while line := stream.readline():
        entry = marshal.loads(stream.read(int(line)))  # noqa: S302 - from the host
        path = entry["path"]
        _parents(os.path.dirname(path))
        if entry["kind"] == "folder":
            if os.path.isdir(path):
                continue
            _parents(path)
        else:
            if os.path.isdir(path) and "name" in entry:
                path = f"{path}/{entry['name']}"
            if os.path.isdir(path) and not os.path.islink(path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if os.path.lexists(path):
                os.unlink(path)
            if entry["kind"] == "link":
                os.symlink(entry["to"], path)
                os.chown(path, *owner, follow_symlinks=False)
                continue
            with open(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb"
            ) as file:
                _copied(stream, file, entry["bytes"], path)
        os.chown(path, *owner)
        os.chmod(path, entry["mode"])


def _parents(path: str) -> None:
    if not os.path.isdir(path):
        if os.path.lexists(path):
            os.unlink(path)
        _parents(os.path.dirname(path))
        os.mkdir(path, 0o755)


def read(path: str, most: int) -> int:
    """Writes a file's bytes to stdout, at most one over `most`. Returns the exit status: 0, or the number of the error."""
    try:
        # Not to wait for a writer, where the path is a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return errno.ENOENT
        left = most + 1
        while left and (chunk := os.read(fd, min(CHUNK, left))):
            left -= len(chunk)
            view = memoryview(chunk)
            while view:
                view = view[os.write(1, view) :]
    except OSError as error:
        os.write(2, f"{path}: {error.strerror}".encode(errors="replace"))
        return error.errno or errno.EIO
    return 0


def unpack_stdin(owner: tuple[int, int]) -> int:
    """Returns the exit status: 0, or the number of the error, which is on stderr."""
    try:
        with open(0, "rb", closefd=False) as stream:
            unpack(stream, owner)
    except OSError as error:
        os.write(2, f"{error.filename or 'a file'}: {error.strerror}".encode(errors="replace"))
        return error.errno or errno.EIO
    return 0
