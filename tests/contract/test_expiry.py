"""The expiry rule of a run, on a real S3 server and against one that answers as Amazon's may."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from minio.commonconfig import ENABLED, Filter
from minio.lifecycleconfig import Expiration, LifecycleConfig, Rule

from pipeline.config import load
from pipeline.store import StoreUnavailable
from pipeline.store.bucket import bucket_of, speaking
from pipeline.store.expiry import set_expiry
from schemas.config import Store as StoreConfig
from services.cli.claim import claim, open_place
from services.cli.embedded import LaunchError


def rules(config: StoreConfig) -> dict[str, int]:
    """Days by prefix."""
    with speaking(config, "look", "it is there") as (client, _):
        found = client.get_bucket_lifecycle(bucket_of(config))
    return {
        rule.rule_filter.prefix or "": rule.expiration.days or 0
        for rule in (found.rules if found else [])
        if rule.rule_filter and rule.expiration
    }


def test_a_run_has_its_rule_and_the_bucket_keeps_its_others(s3_config: StoreConfig) -> None:
    with speaking(s3_config, "look", "it is there") as (client, _):
        own = Rule(
            ENABLED, rule_filter=Filter(prefix="backups/"), rule_id="backups", expiration=Expiration(days=30)
        )
        client.set_bucket_lifecycle(bucket_of(s3_config), LifecycleConfig([own]))
    assert set_expiry(s3_config, "one", 7)
    assert not set_expiry(s3_config, "one", 7)
    assert set_expiry(s3_config, "two", 9)
    one, two = (f"some/prefix/runs/{run}/payloads/" for run in ("one", "two"))
    assert rules(s3_config) == {"backups/": 30, one: 7, two: 9}
    assert set_expiry(s3_config, "one", 8)
    assert set_expiry(s3_config, "two", 0)
    assert not set_expiry(s3_config, "two", 0)
    assert rules(s3_config) == {"backups/": 30, one: 8}


async def test_a_run_has_no_rule_in_the_place_of_another(s3_config: StoreConfig) -> None:
    demo = load(Path(__file__).parents[2] / "examples" / "demo.toml")
    asked = demo.model_copy(
        update={
            "run": "taken",
            "store": s3_config,
            "retention": demo.retention.model_copy(update={"expire_days": 7}),
        }
    )
    store = await open_place(asked, resumed=False)
    await claim(store, demo.model_copy(update={"run": "taken", "store": s3_config}), "its log", begun=False)
    for refused in (open_place(asked, resumed=False), claim(store, asked, "another log", begun=False)):
        with pytest.raises(LaunchError, match="another run"):
            await refused
    mine = "some/prefix/runs/taken/payloads/"
    assert mine not in rules(s3_config)
    await claim(store, asked, "its log", begun=False)
    assert rules(s3_config)[mine] == 7


STRANGE = (
    "<Rule><ID>large</ID><Status>Enabled</Status><Filter><ObjectSizeGreaterThan>1048576</ObjectSizeGreaterThan></Filter>"
    "<Expiration><Days>3</Days></Expiration></Rule>"
    "<Rule><ID>old form</ID><Prefix>logs/</Prefix><Status>Disabled</Status><Expiration><Days>5</Days></Expiration></Rule>"
)
"""Rules that the SDK cannot write back: one that it refuses to read, and one of which it would drop the prefix."""


class Bucket(BaseHTTPRequestHandler):
    """A bucket's lifecycle, kept as it was put. `forget`: puts that are lost, as when another writer comes between."""

    lifecycle = ""
    forget = 0

    def do_GET(self) -> None:
        missing = "<Error><Code>NoSuchLifecycleConfiguration</Code><Message>m</Message><Resource>r</Resource><RequestId>1</RequestId></Error>"
        self._answer(200 if Bucket.lifecycle else 404, Bucket.lifecycle or missing)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if Bucket.forget:
            Bucket.forget -= 1
        else:
            Bucket.lifecycle = body
        self._answer(200, "")

    def do_DELETE(self) -> None:
        Bucket.lifecycle = ""
        self._answer(204, "")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[StoreConfig]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    (tmp_path / "keys.json").write_text('{"access_key": "a", "secret_key": "secret-secret"}')
    Bucket.lifecycle, Bucket.forget = "", 0
    yield StoreConfig(
        url="s3://bucket",
        endpoint=f"http://127.0.0.1:{server.server_port}",
        credentials_file=str(tmp_path / "keys.json"),
    )
    server.shutdown()
    serving.join()
    server.server_close()


def test_rules_that_the_client_does_not_know_stay_as_they_are(bucket: StoreConfig) -> None:
    Bucket.lifecycle = f'<LifecycleConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{STRANGE}</LifecycleConfiguration>'
    assert set_expiry(bucket, "one", 7)
    assert STRANGE in Bucket.lifecycle
    assert "<Prefix>runs/one/payloads/</Prefix>" in Bucket.lifecycle
    assert not set_expiry(bucket, "one", 7)
    assert set_expiry(bucket, "one", 0)
    assert STRANGE in Bucket.lifecycle
    assert "runs/one" not in Bucket.lifecycle


def test_a_rule_that_another_writer_undid_is_set_again_but_not_for_ever(bucket: StoreConfig) -> None:
    Bucket.forget = 1
    assert set_expiry(bucket, "one", 7)
    assert "<Days>7</Days>" in Bucket.lifecycle
    assert set_expiry(bucket, "one", 0)
    assert Bucket.lifecycle == ""
    Bucket.forget = 99
    with pytest.raises(
        StoreUnavailable, match=r"does not hold the rule for runs/one/payloads/.*expire_days = 0"
    ):
        set_expiry(bucket, "one", 7)
