"""Where an engine answers and `make compose-test` asks for it; elsewhere each test is skipped, and says why."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.compose.composition import ROOT, program

HERE = Path(__file__).parent


@functools.cache
def missing() -> str:
    """What is not there, in one line; empty when all is."""
    if not os.environ.get("PACKTRAIN_COMPOSE"):
        return "takes minutes, an engine and the images: run `make compose-test`"
    commands = [["docker", "info"], [*program(), "version"]]
    images = set(re.findall(r"(?m)^ *image: ([^*\s]+)$", (ROOT / "docker-compose.yml").read_text()))
    images |= set(re.findall(r"&\w+ (packtrain/\S+)", (ROOT / "docker-compose.yml").read_text()))
    commands += [["docker", "image", "inspect", image] for image in sorted(images)]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"`{' '.join(command)}`: {error}"
        if done.returncode:
            return f"`{' '.join(command)}`: {(done.stderr.strip().splitlines() or [''])[-1]}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))
            if reason := missing():
                item.add_marker(pytest.mark.skip(reason=reason))
