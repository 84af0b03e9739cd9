"""The keys of a deployment: made once, read by whom they are for, and good for real servers."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import nkeys
import pytest

from pipeline.log import connect
from pipeline.log.connection import BrokerUnavailable
from schemas.names import BadName
from services.cli import certificates, deploy_secrets
from services.cli.deploy_secrets import Given, make
from services.cli.embedded import BadInput
from tests.deployed import Made, SecureServer


@pytest.fixture
def made(tmp_path: Path) -> Made:
    found = Made(tmp_path)
    found.make()
    return found


def test_files_are_for_containers_in_a_directory_for_nobody_else(made: Made) -> None:
    modes = {
        str(path.relative_to(made.directory)): stat.S_IMODE(path.stat().st_mode)
        for path in made.directory.rglob("*")
    }
    assert stat.S_IMODE(made.directory.stat().st_mode) == 0o700
    private = {name for name, mode in modes.items() if mode == 0o600}
    assert private == {"tls/ca-key.pem", "store/admin.json"}
    assert {mode for name, mode in modes.items() if name not in private} == {0o444, 0o755}
    kinds = {path.stem for path in made.directory.glob("broker/*.nk")}
    assert kinds == set(deploy_secrets.USERS)
    assert {"dispatcher", "agent-loop", "launcher", "reader", "dashboard"} <= kinds
    assert {path.stem for path in made.directory.glob("store/*.json")} == kinds | {"admin", "s3"}
    assert len({path.read_bytes() for path in made.directory.glob("broker/*.nk")}) == len(kinds)


def test_no_secret_is_said_and_public_files_hold_none(made: Made) -> None:
    content = made.content()
    private = [body.decode().strip() for name, body in content.items() if name.endswith((".nk", "-key.pem"))]
    private += [content[name].decode().strip() for name in deploy_secrets.TOKENS]
    private += [
        json.loads(body)["secret_key"]
        for name, body in content.items()
        if name.startswith("store/") and name != "store/s3.json"
    ]
    public = "\n".join([*made.said, made.environment.read_text(), content["broker/users.conf"].decode()])
    assert not [secret for secret in private if secret in public]
    for kind in deploy_secrets.USERS:
        pair = nkeys.from_seed(bytearray(content[f"broker/{kind}.nk"].strip()))
        assert bytes(pair.public_key).decode() in public
    assert made.environment.read_text() == f"PACKTRAIN_SECRETS='{made.directory}'\n"


def test_again_changes_nothing_and_keeps_what_it_was_told(made: Made) -> None:
    made.make(runs=("demo",), hosts=("broker.example.org", "10.0.0.7"), bucket="other", prefix="/some/place/")
    before = made.content()
    assert "rl.demo." in before["broker/users.conf"].decode()
    assert "rl.*." not in before["broker/users.conf"].decode()
    assert "arn:aws:s3:::other/some/place/runs/demo/" in before["store/s3.json"].decode()
    assert made.make()[0] == "all keys were there"
    assert made.changed(before) == set()
    said = made.make(runs=("*",))
    assert made.changed(before) == {"broker/users.conf", "store/s3.json", "settings.json"}
    assert "SIGHUP" in said[-1]


def test_other_lines_of_the_environment_stay(made: Made) -> None:
    made.environment.write_text("A=1\nPACKTRAIN_SECRETS=/elsewhere\nB=2\n")
    made.environment.chmod(0o600)
    made.make()
    assert made.environment.read_text() == f"A=1\nB=2\nPACKTRAIN_SECRETS='{made.directory}'\n"
    assert stat.S_IMODE(made.environment.stat().st_mode) == 0o600


def test_the_environment_is_kept_byte_by_byte_through_a_link(made: Made, tmp_path: Path) -> None:
    behind = tmp_path / "behind.env"
    behind.write_bytes(b"NAME=caf\xe9\x0c1\nexport PACKTRAIN_SECRETS = /elsewhere\n")
    made.environment.unlink()
    made.environment.symlink_to(behind)
    made.make()
    assert made.environment.is_symlink()
    assert behind.read_bytes() == f"NAME=caf\xe9\x0c1\nPACKTRAIN_SECRETS='{made.directory}'\n".encode(
        "latin-1"
    )


@pytest.mark.parametrize("name", ["a'b", "a\\b", "a\nb"])
def test_a_directory_that_no_composition_could_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"cannot be named in .*; name another with --directory"):
        make(tmp_path / name, Given(), tmp_path / ".env", print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "files"),
    [
        ("harness", {"broker/harness.nk", "broker/users.conf", "store/harness.json", "store/s3.json"}),
        ("admin", {"store/admin.json", "store/s3.json"}),
        ("run-key", {"run-key"}),
        ("server", {"tls/server-key.pem", "tls/server.pem"}),
        ("authority", {"tls/ca-key.pem", "tls/ca.pem", "tls/server-key.pem", "tls/server.pem"}),
    ],
)
def test_a_key_is_made_anew_alone(made: Made, key: str, files: set[str]) -> None:
    before = made.content()
    said = made.make(rotate=(key,))
    assert made.changed(before) == files
    assert key in said[-1] or key in " ".join(said)


def test_killed_half_way_it_is_completed(made: Made, tmp_path: Path) -> None:
    before = made.content()
    for name in ("broker/hook.nk", "broker/users.conf", "tls/ca.pem", "tls/server.pem", "engine-token"):
        (made.directory / name).unlink()
    (made.directory / "broker" / ".hook.nk.new").write_text("half a")
    made.make()
    after = made.content()
    assert set(after) == set(before)
    assert after["tls/ca-key.pem"] == before["tls/ca-key.pem"]
    assert made.changed(before) == {
        "broker/hook.nk",
        "broker/users.conf",
        "tls/ca.pem",
        "tls/server.pem",
        "engine-token",
    }


def test_two_at_once_make_one_set(tmp_path: Path) -> None:
    both = [Made(tmp_path), Made(tmp_path)]
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(Made.make, both))
    assert sorted("all keys were there" in each for each in said) == [False, True]
    before = both[0].content()
    both[0].make()
    assert both[0].changed(before) == set()


def test_a_directory_that_others_enter_is_refused(made: Made, tmp_path: Path) -> None:
    made.directory.chmod(0o750)
    with pytest.raises(BadInput, match=r"others can enter .* \(mode 0750\); chmod 700"):
        made.make()
    made.directory.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(made.directory)
    with pytest.raises(BadInput, match="cannot be used"):
        make(link, Given(), made.environment, print)


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("broker/hook.nk", "SUsecretgarbage", "holds no nkey seed"),
        ("store/hook.json", '{"access_key": "secretgarbage"}', "holds no access_key and secret_key"),
        ("run-key", "\n", "holds nothing"),
        ("tls/ca-key.pem", "secretgarbage", "holds no key"),
        ("settings.json", "{}", "cannot be read"),
    ],
)
def test_what_is_broken_is_named_and_stays(made: Made, file: str, text: str, told: str) -> None:
    path = made.directory / file
    path.chmod(0o600)
    path.write_text(text)
    with pytest.raises(BadInput, match=told) as refused:
        made.make()
    assert str(path) in str(refused.value)
    assert "secretgarbage" not in str(refused.value)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "given",
    [
        {"rotate": ("nobody",)},
        {"hosts": ("a b",)},
        {"hosts": ("-\n",)},
        {"runs": ("a.b",)},
        {"bucket": "*"},
        {"prefix": "a/*"},
    ],
)
def test_what_can_be_none_is_refused(made: Made, given: dict) -> None:
    with pytest.raises((BadInput, BadName)):
        made.make(**given)


def test_harness_hosts_are_held_to_the_pools_of_a_configuration_from_then_on(made: Made) -> None:
    def acks() -> list[str]:
        users = (
            (made.directory / "broker/users.conf").read_text().split("# harness\n")[1].split("# grader\n")[0]
        )
        return [line.strip() for line in users.splitlines() if "$JS.ACK" in line]

    assert '"$JS.ACK.*.*.>"' in acks()
    assert any("--config" in line for line in made.said)
    made.make(work={"harness": ["harness-chat"], "teacher": []})
    assert acks() == ['"$JS.ACK.*.harness-chat.>"']
    made.make(rotate=("server",))
    assert acks() == ['"$JS.ACK.*.harness-chat.>"']


def test_a_certificate_is_kept_until_it_expires_soon() -> None:
    now = datetime(2027, 1, 1, tzinfo=UTC)
    authority_key, key = certificates.new_key(), certificates.new_key()
    first = certificates.server(key, None, ("a", "10.0.0.1"), authority_key, now)
    assert first.until == now + timedelta(days=825)
    late = first.until - timedelta(days=29)
    for hosts, at, why in (
        (("a", "10.0.0.1"), now, ""),
        (("a", "10.0.0.1"), first.until - timedelta(days=31), ""),
        (("a", "10.0.0.1"), late, "it expires on"),
        (("a", "10.0.0.1"), first.until + timedelta(days=1), "it expired on"),
        (("a", "10.0.0.1", "b"), now, "it lacked b"),
        (("a",), now, "it had more names"),
    ):
        again = certificates.server(key, first.pem, hosts, authority_key, at)
        assert again.why.startswith(why)
        assert bool(again.why) == bool(why)
        assert (again.pem == first.pem) == (not why)
    other = certificates.server(key, first.pem, ("a", "10.0.0.1"), certificates.new_key(), now)
    assert other.why == "it was another authority's"
    authority = certificates.authority(authority_key, None, now)
    assert certificates.authority(authority_key, authority.pem, now).pem == authority.pem
    assert certificates.authority(certificates.new_key(), authority.pem, now).why


def test_a_certificate_that_expires_is_renewed_and_said(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=800)

    monkeypatch.setattr(deploy_secrets, "datetime", Later)
    before = made.content()
    said = made.make()
    assert "since it expires on" in said[0]
    assert made.changed(before) == {"tls/server.pem"}


def test_without_the_package_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_secrets, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install 'packtrain\[deploy\]'"):
        make(tmp_path / "s", Given(), tmp_path / ".env", print)
    assert not (tmp_path / "s").exists()


@pytest.fixture
def server(made: Made, tmp_path: Path) -> Iterator[SecureServer]:
    found = SecureServer(tmp_path / "server", made.directory)
    found.start()
    yield found
    found.stop()


async def test_a_real_server_takes_the_users_and_its_clients_the_certificate(
    server: SecureServer, made: Made
) -> None:
    for host in ("127.0.0.1", "localhost"):
        for kind in ("reader", "launcher"):
            client = await connect(server.as_user(kind, host), "test", 5.0, kind)
            await client.flush()
            await client.close()
    stranger = server.as_user("reader").model_copy(update={"credentials_file": ""})
    with pytest.raises(BrokerUnavailable):
        await connect(stranger, "test", 5.0)
    # The keys of another deployment: neither does the client trust the server, nor the server the user.
    made.make(rotate=("authority", "reader"))
    with pytest.raises(BrokerUnavailable, match="certificate"):
        await connect(server.as_user("launcher"), "test", 5.0, "launcher")


def test_the_certificate_is_what_openssl_says_it_is(made: Made, tmp_path: Path) -> None:
    made.make(hosts=("broker.example.org", "10.1.2.3"))
    context = ssl.create_default_context(cafile=str(made.directory / "tls" / "ca.pem"))
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(made.directory / "tls" / "server.pem", made.directory / "tls" / "server-key.pem")

    async def handshake(name: str) -> None:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        serving = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=ours)
        port = serving.sockets[0].getsockname()[1]
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
            writer.close()
        finally:
            serving.close()

    for name in ("nats", "broker", "localhost", "127.0.0.1", "broker.example.org", "10.1.2.3"):
        asyncio.run(handshake(name))
    for name in ("example.org", "10.1.2.4"):
        with pytest.raises(ssl.SSLCertVerificationError, match="match"):
            asyncio.run(handshake(name))


def test_a_containers_user_reads_what_it_is_given(made: Made) -> None:
    """What a container reads as another user: the file through a mount that passes the directory by."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    handle = os.open(made.directory / "broker" / "hook.nk", os.O_PATH)
    try:
        read = subprocess.run(
            ["cat", f"/proc/self/fd/{handle}"], user=10001, pass_fds=[handle], capture_output=True
        )
        assert read.stdout.startswith(b"SU")
        denied = subprocess.run(
            ["cat", str(made.directory / "broker" / "hook.nk")], user=10001, capture_output=True
        )
        assert denied.returncode != 0
    finally:
        os.close(handle)
