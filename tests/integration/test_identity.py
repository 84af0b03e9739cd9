"""Who a client of the broker is, and whom it believes: real servers with TLS, keys and tokens, and what each refusal says."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.log import BrokerUnavailable, connect
from schemas.config import Broker
from tests.log_parts import until
from tests.natsserver import NatsServer
from tests.secured import Authority, SecuredBroker, nkey_pair

RUN = "tls"
TIMEOUT_S = 60.0
"""What a refusal must not take: it is told at once."""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    broker = SecuredBroker(tmp_path_factory.mktemp("secured"), (RUN,))
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """A server that asks for our certificate too."""
    verify = {'min_version: "1.2"': 'min_version: "1.2", verify: true'}
    broker = SecuredBroker(tmp_path_factory.mktemp("mutual"), (RUN,), replace=verify)
    broker.authority.sign("client")
    broker.start()
    yield broker
    broker.stop()


async def refused(broker: Broker, **changes: Any) -> str:
    """What `connect` says of it, at once."""
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable) as caught:
        await connect(broker.model_copy(update=changes), "probe", TIMEOUT_S)
    assert time.monotonic() - began < TIMEOUT_S / 2
    said = str(caught.value)
    assert "\n" not in said
    return said


async def test_a_user_is_let_in_by_its_key_over_tls(secured: SecuredBroker) -> None:
    client = await connect(secured.user("packer"), "probe", user="packer")
    # Where TLS is asked for and not spoken, it would not have come so far.
    assert client._server_info["tls_required"]
    assert client.new_inbox().startswith("_INBOX.packer.")
    await client.close()
    # What only files ask for is TLS as well.
    plain = f"nats://localhost:{secured.port}"
    client = await connect(secured.user("packer").model_copy(update={"url": plain}), "probe", user="packer")
    await client.close()


async def test_who_is_not_known_is_told_at_once(secured: SecuredBroker, tmp_path: Path) -> None:
    good = secured.user("packer")
    stranger = tmp_path / "stranger.nk"
    seed, _ = nkey_pair()
    stranger.write_text(seed)
    said = await refused(good, credentials_file=str(stranger))
    assert f"refused the identity in {stranger}" in said
    assert "set broker.credentials_file" in said
    assert seed not in said
    assert "lets in nobody without an identity" in await refused(good, credentials_file="")
    token = tmp_path / "token"
    token.write_text("t0ken")
    said = await refused(good, credentials_file="", token_file=str(token))
    assert f"refused the token in {token}" in said
    assert "t0ken" not in said


@pytest.mark.parametrize(
    "text",
    ["", "SUA", "no seed", "SU\n\nSU", "A" * 58, "SU" + "\N{LATIN SMALL LETTER E WITH ACUTE}" * 56, "JWT"],
    ids=range(7),
)
async def test_what_is_no_seed_is_refused_unsent_and_unsaid(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if text == "JWT":
        text = "-----BEGIN NATS USER JWT-----\nx\n-----BEGIN USER NKEY SEED-----\nSUnone\n"
    file.write_text(text)
    said = await refused(Broker(url="tls://localhost:1", credentials_file=str(file)))
    assert f"broker.credentials_file {str(file)!r}" in said
    assert not text or text not in said
    assert "SUnone" not in said


async def test_a_server_that_cannot_prove_itself_is_told_nothing(
    secured: SecuredBroker, nats_server: NatsServer, tmp_path: Path
) -> None:
    good = secured.user("packer")
    other = Authority(tmp_path)
    for changes in (
        {"ca_file": ""},
        {"ca_file": other.ca},
        {"ca_file": "", "url": good.url.replace("tls", "nats", 1)},
    ):
        said = await refused(good, **changes)
        assert "has a certificate that is not trusted" in said
        assert "set broker.ca_file" in said
    plain = good.model_copy(update={"url": nats_server.broker.url})
    assert "speaks no TLS" in await refused(plain)
    tls = nats_server.broker.model_copy(update={"url": nats_server.broker.url.replace("nats", "tls", 1)})
    assert "speaks no TLS" in await refused(tls)
    missing = str(tmp_path / "missing")
    assert "broker.ca_file" in await refused(good, ca_file=missing)
    assert "broker.ca_file" in await refused(good, ca_file=good.credentials_file)


async def test_a_name_that_the_certificate_has_not_is_refused(tmp_path: Path) -> None:
    broker = SecuredBroker(tmp_path, (RUN,))
    broker.authority.sign("server", ["elsewhere.example"])
    broker.start()
    try:
        said = await refused(broker.user("packer"))
    finally:
        broker.stop()
    assert "elsewhere.example" in said or "not valid for 'localhost'" in said
    assert "name the host in broker.url as its certificate does" in said


async def test_closing_while_the_broker_is_away_is_no_error(tmp_path: Path) -> None:
    broker = SecuredBroker(tmp_path, (RUN,))
    broker.start()
    try:
        client = await connect(broker.user("packer"), "probe", user="packer")
    finally:
        broker.stop()
    await until(lambda: client.is_reconnecting)
    await client.publish(f"rl.{RUN}.window.packed.all.x", b"{}")
    await client.close()
    assert client.is_closed


async def test_a_server_may_ask_for_our_certificate(mutual: SecuredBroker) -> None:
    good = mutual.user("packer")
    assert "broker.cert_file" in await refused(good)
    tls = mutual.directory / "tls"
    ours = {"cert_file": str(tls / "client.pem"), "key_file": str(tls / "client-key.pem")}
    client = await connect(good.model_copy(update=ours), "probe", user="packer")
    await client.close()
    said = await refused(good, **(ours | {"key_file": str(tls / "ca-key.pem")}))
    assert "broker.cert_file" in said


async def test_a_client_that_is_told_to_stop_while_it_waits_for_a_broker_leaves_none_behind() -> None:
    before = asyncio.all_tasks()
    connecting = asyncio.create_task(connect(Broker(url="nats://127.0.0.1:1"), "probe", TIMEOUT_S))
    await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert asyncio.all_tasks() == before


def test_the_cluster_that_is_deployed_is_one(tmp_path: Path) -> None:
    """Its configuration, as the server itself reads it."""
    broker = SecuredBroker(tmp_path, conf="cluster/nats.conf", replace={"$NATS_NAME": "nats-0"})
    binary = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or "nats-server"
    checked = subprocess.run([binary, "-t", "-c", str(broker._config)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
