"""The script of a sandbox's programs, run by the bash of this machine: what is told of a program is what it did."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.harnesses.workspaces import script
from pipeline.harnesses.workspaces.base import Ended


def bash(text: str) -> str:
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


MARKS: list[str] = []


def new() -> str:
    MARKS.append(secrets.token_hex(8))
    return MARKS[-1]


def run(*argv: str, timeout_s: float = 20, **more: object) -> Ended:
    mark = new()
    said = bash(script.program(mark, argv, timeout_s=timeout_s, **more))  # type: ignore[arg-type]
    return script.ended(mark, said, 0.0)


def marked() -> list[int]:
    """Processes that carry a mark of these tests."""
    words = [b"PACKTRAIN_RUN=" + mark.encode() for mark in MARKS]
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if set(words) & set(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@settings(max_examples=12)
@given(
    # NUL ends an argument, and is no part of one.
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20), max_size=4),
    st.binary(max_size=300),
)
def test_words_and_bytes_go_through_as_they_are(words: list[str], stdin: bytes) -> None:
    ended = run("sh", "-c", 'for w in "$@"; do printf "%s\\0" "$w"; done; cat >&2', "sh", *words, stdin=stdin)
    assert ended.stdout == b"".join(word.encode() + b"\0" for word in words)
    assert ended.stderr == stdin
    assert (ended.returncode, ended.stopped, ended.oom) == (0, "", False)


def test_the_environment_the_folder_and_the_end_are_told() -> None:
    ended = run("sh", "-c", 'echo "$A"; pwd; exit 7', cwd="/usr", env={"A": "$x 'y'\nz"})
    assert (ended.returncode, ended.stdout) == (7, b"$x 'y'\nz\n/usr\n")
    assert run("sh", "-c", "kill -15 $$").returncode == 143
    assert run("/no/such").returncode == 127
    assert run("true", cwd="/no/such").returncode == 126


def test_no_value_of_an_environment_is_an_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox's processes are seen on its engine's machine."""
    seen = tmp_path / "seen"
    (tmp_path / "env").write_text(f'#!/bin/sh\necho "$@" >> {seen}\nexec /usr/bin/env "$@"\n')
    (tmp_path / "env").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    there = tmp_path / "there"
    there.mkdir()
    (there / "told").write_text(
        '#!/bin/sh\necho "$TOKEN $UID" $(/usr/bin/tr "\\\\0" "\\\\n" < /proc/$$/environ | /usr/bin/grep -c s3cret)\n'
    )
    (there / "told").chmod(0o755)
    ended = run("told", env={"TOKEN": "s3cret", "no-name": "s3cret-too", "PATH": str(there), "UID": "7"})
    assert ended.stdout == b"s3cret 7 2\n", ended.stderr
    assert not seen.exists() or "s3cret " not in seen.read_text()


def test_the_end_of_an_output_is_kept() -> None:
    ended = run("sh", "-c", "seq 1000; seq 1000 >&2", output_bytes=8)
    assert ended.stdout == ended.stderr == b"99\n1000\n"


def test_a_program_cannot_say_the_scripts_words() -> None:
    mark = "0" * 16
    forged = f"{mark} 0,,0,0\n{mark} err\n{mark} end\n"
    said = bash(script.program(mark, ["sh", "-c", f"printf '{forged}'; exit 5"], timeout_s=20))
    assert script.ended(mark, said, 0.0).returncode == 5
    assert script.ended(mark, said, 0.0).stdout.decode() == forged


def test_at_its_time_it_dies_with_all_it_started() -> None:
    began = time.monotonic()
    many = "trap '' TERM; setsid sleep 4324 & (sleep 4324 &); echo began; sleep 4324"
    ended = run("sh", "-c", many, timeout_s=0.3)
    assert (ended.stopped, ended.returncode, ended.stdout) == ("time", 137, b"began\n")
    assert time.monotonic() - began < 10
    assert marked() == []


def test_what_writes_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "MOST_WRITTEN", 1 << 20)
    ended = run("yes", output_bytes=4)
    assert (ended.stopped, ended.stdout) == ("output", b"y\ny\n")
    assert marked() == []


def test_a_run_is_killed_from_outside_and_no_other() -> None:
    mine, other = new(), new()
    running = [
        subprocess.Popen(
            ["bash", "-c", script.program(mark, ["sh", "-c", "sleep 4325 & sleep 4325"], timeout_s=100)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for mark in (mine, other)
    ]
    deadline = time.monotonic() + 20
    while len(marked()) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    bash(script.kill(mine))
    out, _ = running[0].communicate(timeout=20)
    assert script.ended(mine, out, 0.0).returncode == 137
    assert len(marked()) == 3
    bash(script.kill(other))
    running[1].communicate(timeout=20)
    assert marked() == []


def test_what_did_not_come_to_its_end_is_refused() -> None:
    mark = secrets.token_hex(8)
    said = bash(script.program(mark, ["true"], timeout_s=20))
    for cut in ("", said[: said.index(f"{mark} end")], "bash: no such container"):
        with pytest.raises(ValueError, match="did not run the program to its end"):
            script.ended(mark, cut, 0.0)


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "it's").write_bytes(bytes(range(256)))
    os.mkfifo(tmp_path / "fifo")
    mark = secrets.token_hex(8)
    assert script.contents(mark, bash(script.read(mark, str(tmp_path / "it's"), 256))) == bytes(range(256))
    assert len(script.contents(mark, bash(script.read(mark, str(tmp_path / "it's"), 9))) or b"") == 10
    for none in (tmp_path, tmp_path / "none", tmp_path / "fifo"):
        assert script.contents(mark, bash(script.read(mark, str(none), 9))) is None
    with pytest.raises(ValueError, match="gave no file"):
        script.contents(mark, "bash: gone")
