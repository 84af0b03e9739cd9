"""The LiteLLM proxy as a peer: installed at a pinned version into a folder of its own, one process in front of an endpoint."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from capture_world import free_port, said, say, until_answers

VERSION = "1.108.7"
FOLDER = Path(__file__).resolve().parents[1] / ".scaffolds" / f"litellm-{VERSION}"
_INSTALL_S = 600
_START_S = 120


def installed() -> bool:
    return (FOLDER / "bin" / "litellm").is_file()


def install() -> None:
    """The folder is whole or not there: it is made beside its place and renamed."""
    import uv

    say(f"installing litellm[proxy]=={VERSION} into {FOLDER}")
    part = FOLDER.parent / "litellm.part"
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(exist_ok=True)
    program = uv.find_uv_bin()
    make = [program, "venv", "--quiet", "--relocatable", "--python", sys.executable, str(part)]
    fill = [program, "pip", "install", "--quiet", "--python", str(part / "bin" / "python")]
    for command in (make, [*fill, f"litellm[proxy]=={VERSION}"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
        if done.returncode:
            raise SystemExit(f"`{' '.join(command)}` exited with {done.returncode}: {done.stderr[-1500:]}")
    part.rename(FOLDER)


@contextmanager
def litellm(endpoints: Mapping[str, str], directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Runs it with one worker, as its documentation has it for production (errors only are logged, no .env is read).

    endpoints: by the name of a model, the base URL of Chat Completions that it stands in front of, with /v1. Yields its own, with /v1,
    and the headers that it wants.
    """
    models = [
        {"model_name": name, "litellm_params": {"model": "openai/policy", "api_base": url, "api_key": "none"}}
        for name, url in endpoints.items()
    ]
    config = directory / "litellm.yaml"
    # JSON is YAML.
    config.write_text(json.dumps({"model_list": models}))
    port, key = free_port(), f"sk-{secrets.token_hex(16)}"
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(directory),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MASTER_KEY": key,
    }
    output = directory / "litellm.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [
                *(FOLDER / "bin" / "litellm", "--config", config, "--num_workers", "1"),
                *("--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"),
            ],
            stdout=log,
            stderr=log,
            env=environment,
            cwd=directory,
        )
    try:
        until_answers(f"http://127.0.0.1:{port}/health/liveliness", process, _START_S, lambda: said(output))
        yield f"http://127.0.0.1:{port}/v1", {"Authorization": f"Bearer {key}"}
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
