"""Names that processes take from their machine, and the address that others reach it at."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.hosts.machine import NoAddress, claim_name, towards
from schemas.names import checked_name

CLAIM = """
import sys
from pipeline.hosts.machine import claim_name
name, held = claim_name(sys.argv[1])
print(name, flush=True)
sys.stdin.read()
"""


def test_a_name_is_the_machines_and_of_two_live_processes_each_has_its_own(run_name: str) -> None:
    machine = socket.gethostname()
    name, held = claim_name(run_name)
    with held:
        assert checked_name(name, "name").startswith(f"{run_name}-")
        assert name.endswith(machine[-8:].replace(".", "-"))
        other, beside = claim_name(run_name)
        with beside:
            assert other == f"{name}-2"
    again, held = claim_name(run_name)
    with held:
        assert again == name


def test_a_killed_processs_name_is_free_at_once(run_name: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM, run_name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        mine, held = claim_name(run_name)
        held.close()
        assert mine == f"{name}-2"
        other.kill()
        other.wait()
    mine, held = claim_name(run_name)
    held.close()
    assert mine == name


def test_a_name_of_any_length_is_legal_and_its_number_is_kept(run_name: str) -> None:
    kind = f"{run_name}-{'pool.' * 30}"
    first, held = claim_name(kind)
    second, beside = claim_name(kind)
    with held, beside:
        assert checked_name(second, "name") == f"{first}-2"


async def test_the_address_towards_a_broker_is_of_the_family_that_is_listened_on() -> None:
    assert await towards("nats://127.0.0.1:4222", "0.0.0.0") == "127.0.0.1"
    assert await towards("nats://127.0.0.1:4222", "::") == "127.0.0.1"
    assert await towards("tls://localhost", "0.0.0.0") == "127.0.0.1"
    with pytest.raises(
        NoAddress, match=r"bind is 0\.0\.0\.0, .* towards the broker ::1: .* set agent_loop\.advertise"
    ):
        await towards("nats://[::1]:4222", "0.0.0.0")
    with pytest.raises(NoAddress, match=r"no-such-broker\.invalid"):
        await towards("nats://no-such-broker.invalid:4222", "0.0.0.0")
