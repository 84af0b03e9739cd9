"""Every user of the store, on a real S3 server that enforces its policy: what it may do passes, and all else is refused.

The server is SeaweedFS with `pipeline.store.identities`; what each may do is said by hand in `tests.store_users`.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import numpy as np
import obstore
import pytest
from minio import Minio
from minio.commonconfig import ENABLED, Filter
from minio.credentials.credentials import Credentials
from minio.error import S3Error
from minio.lifecycleconfig import Expiration, LifecycleConfig, Rule
from minio.signer import presign_v4
from minio.versioningconfig import VersioningConfig
from obstore.exceptions import GenericError, PermissionDeniedError
from obstore.store import S3Store

from pipeline.store import ObjectExists, ObjectMissing, ObjectStore, StoreUnavailable
from pipeline.store.bucket import ensure_bucket
from pipeline.store.expiry import set_expiry
from pipeline.store.identities import identities
from pipeline.store.opening import open_bucket
from pipeline.store.payload import read_columns, write_payload
from pipeline.store.policies import EVERY_RUN, KINDS
from schemas.config import Store as StoreConfig
from schemas.keys import image_key, payload_key
from services.cli import certificates
from tests.s3server import S3Server
from tests.store_users import (
    CONFIGURES,
    LISTS,
    LISTS_OF_OTHERS,
    READS,
    READS_OF_OTHERS,
    REMOVES,
    WRITES,
    keys_of,
)

SECURITY = Path(__file__).parents[2] / "infra" / "store" / "security.toml"
BUCKET, PREFIX = "objects", "some/prefix"
# One name begins with the other, so that a prefix without its slash would let one see the other.
OURS, OTHER = "mine", "mine-2"
BODY = b"as it was"


@dataclass
class Place:
    """A server whose users have the rights of run OURS; `root` may do everything."""

    server: S3Server
    directory: Path

    def config(self, kind: str) -> StoreConfig:
        given = {"url": f"s3://{BUCKET}/{PREFIX}", "endpoint": self.server.endpoint}
        file = self.server.credentials_file if kind == "root" else self.directory / f"{kind}.json"
        return StoreConfig.model_validate({**given, "credentials_file": str(file)})

    def client(self, kind: str) -> S3Store:
        return open_bucket(self.config(kind), BUCKET, PREFIX)

    def minio(self, kind: str) -> Minio:
        keys = json.loads(Path(self.config(kind).credentials_file).read_text())
        host = self.server.endpoint.removeprefix("http://")
        return Minio(
            host,
            access_key=keys["access_key"],
            secret_key=keys["secret_key"],
            secure=False,
            region="us-east-1",
        )


@contextmanager
def served(directory: Path, runs: list[str]) -> Iterator[Place]:
    keys = {kind: (f"key-{kind}", secrets.token_hex(16)) for kind in KINDS}
    for kind, (access, secret) in keys.items():
        (directory / f"{kind}.json").write_text(json.dumps({"access_key": access, "secret_key": secret}))
    server = S3Server(directory / "s3", identities(keys, BUCKET, PREFIX, runs))
    secure(server.directory, directory)
    server.start()
    try:
        yield Place(server, directory)
    finally:
        server.stop()


def secure(home: Path, directory: Path) -> None:
    """infra/store/security.toml with certificates of our own; `home`: where the server looks for it."""
    now = datetime.now(UTC)
    ours, theirs = certificates.new_key(), certificates.new_key()
    files = {
        "ca": certificates.authority(ours, None, now).pem,
        "store-cert": certificates.server(theirs, None, ["127.0.0.1"], ours, now).pem,
        "store-key": theirs,
    }
    text = SECURITY.read_text()
    for name, pem in files.items():
        (home / name).write_bytes(pem)
        assert f'"/run/secrets/{name}"' in text
        text = text.replace(f"/run/secrets/{name}", str(home / name))
    (home / "security.toml").write_text(text)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with served(tmp_path_factory.mktemp("users"), [OURS]) as found:
        assert ensure_bucket(found.config("launcher")), "the launcher made no bucket"
        yield found


async def stock(place: Place) -> None:
    client = place.client("root")
    for run in (OURS, OTHER):
        for key in keys_of(run).values():
            await obstore.put_async(client, key, BODY)


async def stored(place: Place) -> dict[str, set[str]]:
    client = place.client("root")
    listed = {each["path"] for each in await obstore.list(client).collect_async()}
    return {run: {name for name, key in keys_of(run).items() if key in listed} for run in (OURS, OTHER)}


def lets(do: Callable[[], object]) -> bool:
    """Whether the server lets a call of the MinIO SDK."""
    try:
        do()
    except S3Error as error:
        if error.code != "AccessDenied":
            raise
        return False
    return True


Operation = Callable[[S3Store, str], Awaitable[Any]]


async def allowed(place: Place, kind: str, do: Operation) -> dict[str, set[str]]:
    """By run, the kinds of objects with which the server lets the user do it."""
    client = place.client(kind)

    async def one(key: str) -> bool:
        try:
            await do(client, key)
        except PermissionDeniedError:
            return False
        except GenericError as error:
            # So it is told of one of several that were to go at once.
            if "code: AccessDenied" not in str(error):
                raise
            return False
        return True

    found: dict[str, set[str]] = {}
    for run in (OURS, OTHER):
        names = keys_of(run)
        answers = await asyncio.gather(*[one(key) for key in names.values()])
        found[run] = {name for name, let in zip(names, answers, strict=True) if let}
    return found


async def _get(client: S3Store, key: str) -> None:
    assert bytes(await (await obstore.get_async(client, key)).bytes_async()) == BODY


async def _put(client: S3Store, key: str) -> None:
    await obstore.put_async(client, key, BODY, mode="overwrite", use_multipart=False)


async def _multipart(client: S3Store, key: str) -> None:
    """Begins one, and sends a part."""
    await obstore.put_async(client, key, BODY, mode="overwrite", use_multipart=True)


async def _delete(client: S3Store, key: str) -> None:
    await obstore.delete_async(client, [key])


async def test_a_user_reads_what_its_work_needs_and_nothing_else(place: Place) -> None:
    await stock(place)
    for kind in KINDS:
        for operation in (_get, obstore.head_async):
            found = await allowed(place, kind, operation)
            assert found == {OURS: READS[kind], OTHER: READS_OF_OTHERS[kind]}, (kind, operation)


async def test_a_user_writes_what_its_work_makes_and_nothing_else(place: Place) -> None:
    await stock(place)
    for kind in KINDS:
        for operation in (_put, _multipart) if kind in ("agent-loop", "packer") else (_put,):
            assert await allowed(place, kind, operation) == {OURS: WRITES[kind], OTHER: set()}, kind
        copied = await allowed(
            place, kind, lambda client, key: obstore.copy_async(client, keys_of(OTHER)["payload"], key)
        )
        reads = "payload" in READS_OF_OTHERS[kind]
        assert copied == {OURS: WRITES[kind] if reads else set(), OTHER: set()}, kind


async def test_only_the_collector_and_an_admin_remove(place: Place) -> None:
    await stock(place)
    for kind in sorted(KINDS, key=lambda kind: bool(REMOVES[kind])):
        one = place.minio(kind)

        async def remove(_: S3Store, key: str, one: Minio = one) -> None:
            if not lets(lambda: one.remove_object(BUCKET, f"{PREFIX}/{key}")):
                raise PermissionDeniedError(key)

        # Of one object, and of several at once, which is another request with checks of its own.
        for operation in (remove, _delete):
            found = await allowed(place, kind, operation)
            assert found == {OURS: REMOVES[kind], OTHER: set()}, (kind, operation)
            everything = set(keys_of(OURS))
            assert await stored(place) == {OURS: everything - REMOVES[kind], OTHER: everything}, kind
            if REMOVES[kind]:
                await stock(place)


async def test_a_user_lists_its_run_and_no_other(place: Place) -> None:
    await stock(place)

    def lists(kind: str, prefix: str) -> bool:
        client = place.minio(kind)
        return lets(lambda: list(client.list_objects(BUCKET, prefix=prefix, recursive=True)))

    for kind in KINDS:
        assert lists(kind, f"{PREFIX}/runs/{OURS}/") == (kind in LISTS), kind
        assert lists(kind, f"{PREFIX}/runs/{OURS}") == (kind in LISTS_OF_OTHERS), kind
        assert lists(kind, f"{PREFIX}/runs/{OTHER}/") == (kind in LISTS_OF_OTHERS), kind
        assert not lists(kind, f"{PREFIX}/"), kind
        assert not lists(kind, ""), kind


def ask(place: Place, kind: str, method: str, path: str, query: str = "", body: bytes = b"") -> int:
    """The status of a request as it is written here, signed: clients of ours send neither dots nor parts of others' uploads."""
    keys = json.loads(Path(place.config(kind).credentials_file).read_text())
    user = Credentials(keys["access_key"], keys["secret_key"])
    url = SplitResult("http", urlsplit(place.server.endpoint).netloc, path, query, "")
    signed = presign_v4(
        method=method, url=url, region="us-east-1", credentials=user, date=datetime.now(UTC), expires=60
    )
    with contextlib.closing(http.client.HTTPConnection(signed.netloc, timeout=20)) as connection:
        connection.request(method, f"{signed.path}?{signed.query}", body or None)
        return connection.getresponse().status


async def test_no_trick_with_a_key_an_upload_or_a_version_leads_further(place: Place) -> None:
    await stock(place)
    base, ours, theirs = f"/{BUCKET}/{PREFIX}", keys_of(OURS), keys_of(OTHER)
    assert ask(place, "packer", "GET", f"{base}/{ours['payload']}") == 200, "what is allowed is refused"
    for up in ("..", "%2e%2e"):
        out = f"{base}/runs/{OURS}/payloads/{up}/{up}/{theirs['payload'].removeprefix('runs/')}"
        claim = f"{base}/runs/{OURS}/images/{up}/run.json"
        assert ask(place, "packer", "GET", out) in (400, 403)
        assert ask(place, "collector", "DELETE", claim) in (400, 403)
        for path in (out, claim):
            assert ask(place, "agent-loop", "PUT", path, body=b"x") in (400, 403), path
    upload = place.minio("root")._create_multipart_upload(BUCKET, f"{PREFIX}/{ours['payload']}", {})
    part = f"partNumber=1&uploadId={upload}"
    for method, query in (("POST", "uploads="), ("PUT", part)):
        assert ask(place, "agent-loop", method, f"{base}/{ours['payload']}", query) == 200, query
    another = quote(f"{PREFIX}/runs/{OTHER}/", safe="")
    for kind, method, key, query in (
        ("agent-loop", "DELETE", ours["payload"], "versionId=null"),
        ("collector", "DELETE", ours["claim"], "versionId=null"),
        ("collector", "DELETE", theirs["payload"], "versionId=null"),
        ("packer", "GET", theirs["payload"], "versionId=null"),
        ("agent-loop", "POST", theirs["payload"], "uploads="),
        ("packer", "PUT", ours["payload"], part),
        ("agent-loop", "PUT", ours["claim"], part),
        ("agent-loop", "PUT", theirs["payload"], part),
    ):
        assert ask(place, kind, method, f"{base}/{key}", query, b"x" * (method == "PUT")) == 403, (kind, key)
    for query in ("versions=", "uploads=", f"prefix={another}&versions="):
        assert ask(place, "packer", "GET", f"/{BUCKET}/", query) == 403, query
    everything = set(keys_of(OURS))
    assert await allowed(place, "root", _get) == {OURS: everything, OTHER: everything}, (
        "something is gone, or was written over"
    )


async def test_the_bucket_itself_is_the_launchers_to_make_and_nobodys_to_open_or_remove(place: Place) -> None:
    rule = Rule(ENABLED, rule_filter=Filter(prefix="x/"), rule_id="x", expiration=Expiration(days=1))
    everyone = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": f"arn:aws:s3:::{BUCKET}/*"}
        ],
    }
    operations: dict[str, tuple[Callable[[Minio], object], set[str]]] = {
        "see the lifecycle": (lambda client: client.get_bucket_lifecycle(BUCKET), CONFIGURES),
        "set the lifecycle": (
            lambda client: client.set_bucket_lifecycle(BUCKET, LifecycleConfig([rule])),
            CONFIGURES,
        ),
        "make another bucket": (lambda client: client.make_bucket("another"), set()),
        "remove the bucket": (lambda client: client.remove_bucket(BUCKET), set()),
        "open it to everyone": (lambda client: client.set_bucket_policy(BUCKET, json.dumps(everyone)), set()),
        "keep versions": (
            lambda client: client.set_bucket_versioning(BUCKET, VersioningConfig(ENABLED)),
            set(),
        ),
    }
    for what, (do, may) in operations.items():
        for kind in KINDS:
            client = place.minio(kind)
            assert lets(lambda do=do, client=client: do(client)) == (kind in may), (what, kind)


def test_nobody_adds_a_user_without_a_certificate(place: Place) -> None:
    """SeaweedFS takes users by gRPC from whoever its port talks to, which is HTTP/2 and begins with a SETTINGS frame (type 4)."""
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    trusting = ssl.create_default_context(cafile=str(place.server.directory / "ca"))
    trusting.set_alpn_protocols(["h2"])

    def answer(secured: bool) -> bytes:
        with socket.create_connection(("127.0.0.1", place.server.iam_port), timeout=10) as plain:
            try:
                wire = trusting.wrap_socket(plain, server_hostname="127.0.0.1") if secured else plain
                wire.sendall(hello)
                return wire.recv(9)
            except OSError:
                return b""

    for secured in (False, True):
        assert answer(secured)[3:4] != b"\x04", f"the port talks, TLS: {secured}"


async def test_services_work_as_these_users(place: Place) -> None:
    """A payload's whole life: written by an agent loop, read by a packer, shown to a reader, removed by the collector."""

    def opened(kind: str) -> ObjectStore:
        return ObjectStore.open(place.config(kind), patience_s=5)

    assert not ensure_bucket(place.config("launcher")), "it was made before"
    assert set_expiry(place.config("launcher"), OURS, 3)
    writer, packer, collector = opened("agent-loop"), opened("packer"), opened("collector")
    columns = {
        "tokens": np.arange(100, dtype=np.int32),
        "logprobs": np.zeros(100, np.float32),
        "loss_mask": np.ones(100, np.uint8),
        "policy_version": np.zeros(100, np.int32),
        "segments": np.zeros((1, 5), np.int32),
    }
    key = payload_key(OURS, "math", "math-000009-0-a1")
    header = await write_payload(writer, key, columns)
    with pytest.raises(ObjectExists):
        await writer.create(key, b"another")
    # One that is missing is told from one that is forbidden.
    assert await writer.size(image_key(OURS, "1" * 64)) is None
    got = await read_columns(packer, header, ["tokens"])
    np.testing.assert_array_equal(got["tokens"], columns["tokens"])
    assert key in [found async for found, _ in opened("reader").list(f"runs/{OURS}")]
    for kind in ("agent-loop", "packer"):
        with pytest.raises(StoreUnavailable, match="access denied"):
            await opened(kind).remove([key])
    with pytest.raises(StoreUnavailable, match="access denied"):
        await packer.create(payload_key(OURS, "math", "math-000009-0-a2"), b"x")
    await collector.remove([key])
    with pytest.raises(ObjectMissing):
        await opened("reader").get(key)


async def test_users_of_every_run_have_the_rights_of_each(tmp_path: Path) -> None:
    with served(tmp_path, [EVERY_RUN]) as place:
        ensure_bucket(place.config("launcher"))
        await stock(place)
        for kind in ("agent-loop", "packer", "collector", "dashboard"):
            for operation, may in ((_get, READS[kind]), (_put, WRITES[kind])):
                assert await allowed(place, kind, operation) == {OURS: may, OTHER: may}, kind
            removed = await allowed(place, kind, _delete)
            assert removed == {OURS: REMOVES[kind], OTHER: REMOVES[kind]}, kind
