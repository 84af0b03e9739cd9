"""Who may listen on a packer's socket, and where it may lie."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.feed.feed import Feed
from pipeline.feed.places import claim
from pipeline.feed.server import SocketTaken, listen
from pipeline.feed.wire import SocketPathTooLong, checked_path, socket_path
from schemas.config import RunConfig


@pytest.fixture
def path() -> Iterator[Path]:
    # Not tmp_path: its name may be longer than a socket's may be.
    with tempfile.TemporaryDirectory(prefix="pt") as directory:
        yield Path(directory) / "packer-0.sock"


def test_the_socket_is_private_and_a_live_one_is_not_taken(path: Path) -> None:
    first = listen(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(SocketTaken, match=r"packer-0\.sock"):
        listen(path)
    first.close()
    second = listen(path)  # its owner is gone: replaced
    second.close()


def test_of_many_that_start_at_once_one_serves(path: Path) -> None:
    """Processes that wait for one another at a pipe, then all find the socket of one that died."""
    code = (
        "import sys, pathlib\n"
        "from pipeline.feed.server import SocketTaken, listen\n"
        "for line in sys.stdin:\n"
        "    try:\n"
        "        held = listen(pathlib.Path(line.strip()))\n"
        "        print('won', flush=True)\n"
        "    except SocketTaken:\n"
        "        print('lost', flush=True)\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )
        for _ in range(4)
    ]  # fmt: skip
    try:
        for turn in range(100):
            stale = path.with_name(f"{turn}.sock")
            listen(stale).close()
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write(f"{stale}\n")
                racer.stdin.flush()
            said = [racer.stdout.readline().strip() for racer in racers if racer.stdout is not None]
            assert sorted(said) == ["lost", "lost", "lost", "won"], turn
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def test_a_path_that_no_kernel_accepts_is_named_with_its_remedy(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    for attempt in (lambda: checked_path(long), lambda: listen(long), lambda: Feed(long)):
        with pytest.raises(SocketPathTooLong, match=r"x{120} has \d+ bytes.*107.*packer\.socket_dir"):
            attempt()
    config = RunConfig.model_construct(run="r", directory="/" + "d" * 200)
    assert (
        str(
            socket_path(
                config.model_copy(update={"packer": config.packer.model_copy(update={"socket_dir": "/s"})}), 3
            )
        )
        == "/s/packer-3.sock"
    )
    with pytest.raises(SocketPathTooLong):
        socket_path(config, 0)
    exact = Path("/" + "a" * 106)
    assert checked_path(exact) == exact


def test_a_place_is_held_by_one_also_by_one_that_hangs_and_free_once_it_is_killed(path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from pipeline.feed.places import claim\n"
        "held = claim(pathlib.Path(sys.argv[1]), 0)\n"
        "print(held is not None, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(path.parent)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "True\n"
            holder.send_signal(signal.SIGSTOP)
            assert claim(path.parent, 0) is None
            other = claim(path.parent, 1)
            assert other is not None
        finally:
            holder.kill()
            holder.wait()
    mine = claim(path.parent, 0)
    assert mine is not None
    assert (mine.number, other.number) == (0, 1)
    assert claim(path.parent, 0) is None
    for place in (mine, other):
        place.close()


def test_a_directory_that_cannot_be_written_is_named(path: Path) -> None:
    (path.parent / "file").touch()
    with pytest.raises(OSError, match=r"packer\.socket_dir .*/file: .* name a local directory"):
        claim(path.parent / "file", 0)
