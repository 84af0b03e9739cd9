"""A second network by a leaf node, as `infra/nats/leaf.conf` and `hub.conf` make it: services there reach the broker by one outbound
connection, with the same users and rights, over restarts of both ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.hosts.report import HostReport, Reporter, reports
from pipeline.log import Log, LogError
from pipeline.log.snapshot import Snapshots, open_bucket
from schemas.facts import RunStopped, StepTrained
from schemas.payload import Ref
from tests.backends import BACKEND
from tests.natsserver import free_port
from tests.secured import INFRA, SecuredBroker, nkey_pair

pytestmark = pytest.mark.timeout(120)
RUN = "far"
REF = Ref(key="w", bytes=0, crc32c=0)


@dataclass
class Networks:
    hub: SecuredBroker
    leaf: SecuredBroker

    @asynccontextmanager
    async def there(self, kind: str) -> AsyncIterator[Log]:
        """The log as a service of that kind sees it in the second network."""
        log = await Log.connect(self.leaf.user(kind), RUN, kind, user=kind)
        try:
            yield log
        finally:
            await log.close()


@pytest.fixture
def networks(tmp_path: Path) -> Iterator[Networks]:
    if BACKEND != "binaries":
        pytest.skip("a leaf node reaches its hub over loopback, and has a configuration of its own")
    seed, public = nkey_pair()
    port = free_port()
    hub_conf = (INFRA / "hub.conf").read_text()
    hub_conf = hub_conf.replace('"0.0.0.0:7422"', f'"127.0.0.1:{port}"')
    hub = SecuredBroker(tmp_path / "hub", (RUN,), extra=hub_conf.replace("/etc/nats", str(tmp_path / "hub")))
    leaf = SecuredBroker(
        tmp_path / "leaf",
        (RUN,),
        conf="leaf.conf",
        keys=hub.keys,
        domain="hub",
        replace={
            '"tls://nats:7422"': f'"tls://localhost:{port}"',
            'ca_file: "/etc/nats/tls/ca.pem" }': f'ca_file: "{hub.authority.ca}" }}',
        },
    )
    (tmp_path / "leaf" / "leaf-seed.conf").write_text(f"nkey: {seed}\n")
    (tmp_path / "hub" / "leaf-key.conf").write_text(f"nkey: {public}\n")
    hub.start()
    leaf.start()
    yield Networks(hub, leaf)
    leaf.stop()
    hub.stop()


def trained(step: int) -> StepTrained:
    numbers = {"loss": 0.0, "grad_norm": 0.0, "kl": 0.0, "loss_tokens": 1, "seconds": 1.0}
    return StepTrained(step=step, weights=REF, optimizer=REF, parent=None, **numbers)


async def test_services_of_a_second_network_take_part_over_restarts_of_both_ends(networks: Networks) -> None:
    launcher = await Log.connect(networks.hub.user("launcher"), RUN, "launcher", user="launcher")
    await launcher.create()
    await open_bucket(launcher, create=True)
    async with networks.there("trainer") as trainer, networks.there("packer") as packer:
        reading = packer.subscribe("step.trained", poll_s=0.5)

        async def step(number: int) -> None:
            assert (await trainer.publish(trained(number))).won
            assert (await anext(reading)).fact == trained(number)

        async with asyncio.timeout(90):
            await step(1)
            assert not (await trainer.publish(trained(1).model_copy(update={"loss": 1.0}))).won
            for number, each in enumerate((networks.hub, networks.leaf), 2):
                each.kill()
                publishing = asyncio.create_task(step(number))
                each.start()
                await publishing
            burst = await trainer.publish_all([(trained(number), None) for number in (4, 5, 6)])
            assert [each.won for each in burst] == [True] * 3
    assert (await launcher.size())[0] == 6
    await launcher.close()


async def test_work_and_keys_of_a_second_network_are_the_hubs(networks: Networks) -> None:
    launcher = await Log.connect(networks.hub.user("launcher"), RUN, "launcher", user="launcher")
    await launcher.create()
    await open_bucket(launcher, create=True)
    async with (
        networks.there("agent-loop") as host,
        networks.there("sampler") as sampler,
        asyncio.timeout(60),
    ):
        work = await host.work("agent-loop", "step.trained", ack_wait_s=30.0)
        await launcher.publish(trained(1))
        [delivery] = await work.fetch(1, timeout_s=30)
        await delivery.retry(0.0)
        [delivery] = await work.fetch(1, timeout_s=30)
        await delivery.ack()
        while (await work.pending()) or (
            await launcher.js.consumer_info(launcher.stream, work.name)
        ).num_ack_pending:
            await asyncio.sleep(0.05)
        report = HostReport(
            host="a", service="agent-loop", time=datetime.now(UTC), tenants=0, capacity=1, done=0, pending=0
        )
        assert await Reporter(host).put(report, within_s=30)
        assert await reports(launcher) == ([report], 0)
        assert await Snapshots(sampler, "sampler", 1).save(1, {"a": 1})
        # The rights are those of the user at its own end.
        with pytest.raises(LogError, match=r"user 'agent-loop' publish rl\.far\.run\.stopped"):
            await host.publish(RunStopped(run=RUN, reason="completed", steps=1))
    await launcher.close()
