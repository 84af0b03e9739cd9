"""Directories of weights: whole, whoever else writes them, and not more of them than are needed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.engines import push


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    directory = tmp_path / "policy"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "old.safetensors").write_text("old")
    return directory


def test_two_that_write_a_version_at_once_leave_it_whole(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, copy = tmp_path / "weights", shutil.copyfile

    def meanwhile(*given: Path) -> None:
        monkeypatch.setattr(shutil, "copyfile", copy)
        push.write_version(root, 7, b"new", policy)
        copy(*given)

    monkeypatch.setattr(shutil, "copyfile", meanwhile)
    written = push.write_version(root, 7, b"new", policy)
    assert [path.name for path in root.iterdir()] == ["00000007"]
    assert {path.name: path.read_text() for path in written.iterdir()} == {
        "config.json": "{}",
        "model.safetensors": "new",
    }


def test_what_a_killed_writer_left_goes_with_the_old_versions(tmp_path: Path, policy: Path) -> None:
    root = tmp_path / "weights"

    def killed(*_: Path) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "copyfile", killed)
        for version in (1, 5):
            with pytest.raises(KeyboardInterrupt):
                push.write_version(root, version, b"new", policy)
    for version in (1, 2, 3, 4):
        push.write_version(root, version, b"new", policy)
    push.remove_old(root, {1})
    left = sorted(path.name for path in root.iterdir())
    assert [name for name in left if not name.startswith(".")] == ["00000001", "00000003", "00000004"]
    assert [name[:9] for name in left if name.startswith(".")] == [".00000005"], "another may be writing it"
