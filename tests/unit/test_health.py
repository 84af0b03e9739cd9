"""What `/livez`, `/readyz` and `/metrics` answer, and what keeps a process from being ready."""

from __future__ import annotations

import aiohttp
import pytest

from pipeline.hosts.health import Health
from pipeline.hosts.metrics import BadBind, Measures, serving
from services.process import SERVICES, kind_of


def test_a_process_is_ready_when_its_service_says_so_and_no_check_finds_fault() -> None:
    faults = ["", "the second", "the third"]
    health = Health(checks=[lambda: faults[0], lambda: faults[1], lambda: faults[2]])
    assert health.fault() == "starting"
    health.not_ready("waiting for a run")
    assert health.fault() == "waiting for a run"
    health.ready()
    assert health.fault() == "the second"
    faults[0] = "the first"
    assert health.fault() == "the first"
    faults[:] = ["", "", ""]
    assert health.fault() == ""
    health.not_ready("again")
    assert health.fault() == "again"


async def test_the_endpoints_of_a_process() -> None:
    measures, health = Measures(), Health()
    async with serving("127.0.0.1:0", "sampler", measures, health), aiohttp.ClientSession() as session:
        base = measures.address.removesuffix("/metrics")

        async def get(path: str) -> tuple[int, str]:
            async with session.get(base + path) as answer:
                return answer.status, await answer.text()

        assert await get("/readyz") == (503, "starting\n")
        assert await get("/livez") == (200, "ok\n")
        health.ready()
        assert await get("/readyz") == (200, "ok\n")
        status, told = await get("/metrics")
        assert status == 200
        assert 'target_info{service="sampler"} 1.0' in told
    assert measures.address == ""


async def test_an_address_that_is_none() -> None:
    with pytest.raises(BadBind, match=r"metrics\.bind '192\.0\.2\.1:0'"):
        async with serving("192.0.2.1:0", "sampler", Measures(), Health()):
            pass


def test_the_kind_of_a_process_is_told_from_its_name() -> None:
    assert {kind: kind_of(kind) for kind in SERVICES} == {kind: kind for kind in SERVICES}
    names = ("agent-loop-0", "harness-tool-1", "harness-agent-loop-host7", "packer-3", "trainer-12")
    assert [kind_of(name) for name in names] == ["agent-loop", "harness", "harness", "packer", "trainer"]
    assert kind_of("packers") == kind_of("other-0") == ""
