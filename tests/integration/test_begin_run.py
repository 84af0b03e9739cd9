"""`packtrain runs begin`: one command that comes to the same run however often and by however many it is given."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.config import ConfigError, Override, load
from pipeline.log import Log, LogError
from pipeline.log.snapshot import bucket_name
from pipeline.store import ObjectStore, StoreUnavailable
from pipeline.store.bucket import ensure_bucket
from pipeline.store.claims import claim_body, claim_of
from pipeline.store.identities import identities
from schemas.config import Broker, RunConfig, Store
from schemas.facts import ALL, RunStarted, RunStopped, SequenceDispatched
from schemas.keys import payload_key
from schemas.payload import PayloadHeader
from services.cli import begin as beginning
from services.cli import begin_run as command
from services.cli.begin_run import begin_run, load_deployed
from services.cli.check import load_checked
from services.cli.embedded import LaunchError
from services.cli.main import app
from tests.deployed import Made, SecureServer
from tests.s3server import S3Server
from tests.unit.factories import finished

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


@pytest.fixture
def config(broker: Broker, tmp_path: Path) -> RunConfig:
    values = {
        "run": f"t{secrets.token_hex(6)}",
        "broker.url": broker.url,
        "broker.token_file": broker.token_file,
        "store.url": (tmp_path / "objects").as_uri(),
    }
    return load_deployed(DEMO, [Override(key, tuple(key.split(".")), v) for key, v in values.items()])


async def begun(config: RunConfig, groups_from: str = "", wait_s: float = 5.0) -> str:
    """What the command says."""
    said: list[str] = []
    await asyncio.to_thread(begin_run, config, groups_from, wait_s, said.append)
    assert len(said) == 1
    return said[0]


def elsewhere(config: RunConfig, **store) -> RunConfig:
    return config.model_copy(update={"store": config.store.model_copy(update=store)})


async def whole(config: RunConfig) -> list[str]:
    """Asserts that all is there that services need; the types of what is in the log."""
    log = await Log.connect(config.broker, config.run, "test")
    try:
        started = await log.last("run.started", ALL, config.run)
        assert started is not None
        assert isinstance(started.fact, RunStarted)
        assert json.loads(json.dumps(started.fact.config)) == json.loads(json.dumps(config.decisions()))
        await log.js.stream_info(f"KV_{bucket_name(config.run)}")
        store = ObjectStore.open(config.store)
        assert await claim_of(store, config.run) == claim_body(started.id)
        head, types = await log.head(), list[str]()
        async for event in log.subscribe():
            types.append(event.fact.type)
            if event.seq >= head:
                return types
        raise AssertionError("the log has no end")
    finally:
        await log.close()


async def publish(config: RunConfig, *facts) -> None:
    log = await Log.connect(config.broker, config.run, "test")
    for fact in facts:
        assert (await log.publish(fact)).won
    await log.close()


DISPATCHED = SequenceDispatched(
    source="arithmetic",
    pool="chat",
    sample="arithmetic-000000",
    sequence="arithmetic-000000-0",
    member=0,
    group_size=4,
    task_index=0,
)


async def test_it_begins_then_goes_on_then_is_over(config: RunConfig) -> None:
    assert await begun(config) == f"run {config.run} has begun"
    assert await whole(config) == ["run.started"]
    assert await begun(config) == f"run {config.run} goes on: 0 of 5 steps are trained"
    assert await whole(config) == ["run.started"]
    await publish(config, RunStopped(run=config.run, reason="cancelled", steps=0))
    assert await begun(config) == f"run {config.run} is over: cancelled after 0 steps"
    assert await whole(config) == ["run.started", "run.stopped"]


async def test_many_at_once_begin_one_run(config: RunConfig) -> None:
    said = await asyncio.gather(*(begun(config) for _ in range(6)))
    assert {each.removeprefix(f"run {config.run} ") for each in said} <= {
        "has begun",
        "goes on: 0 of 5 steps are trained",
    }
    assert await whole(config) == ["run.started"]


async def test_another_that_begins_and_claims_meanwhile_is_no_stranger(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, real = 0, command._started

    async def look(log: Log, wait_s: float):
        nonlocal looked
        looked += 1
        found = await real(log, wait_s)
        if looked == 1:
            assert "has begun" in await begun(config)
        return found

    monkeypatch.setattr(command, "_started", look)
    assert "has begun" in await begun(config)
    assert await whole(config) == ["run.started"]


@pytest.mark.parametrize("at", ["create", "open_bucket", "publish", "claim"])
@pytest.mark.parametrize("after", [False, True])
async def test_killed_on_the_way_it_is_completed(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, at: str, after: bool
) -> None:
    owner = Log if at in ("create", "publish") else beginning
    real = getattr(owner, at)

    class Killed(BaseException): ...

    async def dies(*arguments, **named):
        if after:
            await real(*arguments, **named)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(owner, at, dies)
        with pytest.raises(Killed):
            await begun(config)
    assert await begun(config) in (
        f"run {config.run} has begun",
        f"run {config.run} goes on: 0 of 5 steps are trained",
    )
    assert await whole(config) == ["run.started"]


async def killed_before_the_claim(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException): ...

    async def dies(*_) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(beginning, "claim", dies)
        with pytest.raises(Killed):
            await begun(config)


async def test_services_that_were_faster_than_the_claim_do_no_harm(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await killed_before_the_claim(config, monkeypatch)
    await publish(config, DISPATCHED)
    assert "goes on" in await begun(config)
    assert await whole(config) == ["run.started", "sequence.dispatched"]


async def test_a_sequence_that_was_finished_before_the_claim_is_still_this_runs(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await killed_before_the_claim(config, monkeypatch)
    key = payload_key(config.run, "arithmetic", "arithmetic-000000-0-a1")
    fact = finished("arithmetic-000000-0", 1.0)
    await publish(
        config, DISPATCHED, fact.model_copy(update={"payload": PayloadHeader(key=key, bytes=11, columns=())})
    )
    # A store that has nothing of it is another one than the run's.
    with pytest.raises(LaunchError, match="does not hold its objects"):
        await begun(config)
    await ObjectStore.open(config.store).create(key, b"its payload")
    assert "goes on" in await begun(config)
    assert await whole(config) == ["run.started", "sequence.dispatched", "sequence.finished"]


async def test_other_decisions_are_refused_by_name_and_change_nothing(config: RunConfig) -> None:
    await begun(config)
    other = config.model_copy(
        update={"steps": 7, "batch": config.batch.model_copy(update={"ahead": 3}), "run": config.run}
    )
    with pytest.raises(LaunchError, match=r"was begun with other settings \(batch, steps\)"):
        await begun(other)
    assert await whole(config) == ["run.started"]
    # What is none of the decisions may be otherwise: ports and places of a deployment.
    await begun(
        config.model_copy(update={"metrics": config.metrics.model_copy(update={"bind": "0.0.0.0:1"})})
    )


async def test_of_two_that_decide_otherwise_one_begins(config: RunConfig) -> None:
    other = config.model_copy(update={"steps": 7})
    found = await asyncio.gather(begun(config), begun(other), return_exceptions=True)
    refused = [each for each in found if isinstance(each, BaseException)]
    assert len(refused) == 1
    assert "was begun with other settings (steps)" in str(refused[0])
    await whole(other if refused[0] is found[0] else config)


async def test_the_place_of_another_log_is_refused_before_there_is_a_run(config: RunConfig) -> None:
    store = ObjectStore.open(config.store)
    await store.create(f"runs/{config.run}/run.json", claim_body("another"))
    with pytest.raises(LaunchError, match="holds the objects of another run"):
        await begun(config)
    log = await Log.connect(config.broker, config.run, "test")
    assert not await log.exists()
    await log.close()


async def test_another_store_than_the_runs_own_is_refused(config: RunConfig, tmp_path: Path) -> None:
    await begun(config)
    other = elsewhere(config, url=(tmp_path / "other").as_uri())
    await ObjectStore.open(other.store).create(f"runs/{config.run}/run.json", claim_body("another"))
    with pytest.raises(LaunchError, match="holds the objects of another run"):
        await begun(other)


def test_a_deployment_names_its_servers_and_needs_no_harness_here(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = DEMO.read_text()
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_deployed(file)
    assert [line.partition(":")[2].split()[0] for line in refused.value.faults] == ["broker.url", "store.url"]
    told = CliRunner().invoke(app, ["runs", "begin", "--config", str(file)])
    assert told.exit_code == 2
    named = [
        Override("", ("broker", "url"), "nats://127.0.0.1:1"),
        Override("", ("store", "url"), tmp_path.as_uri()),
    ]
    file.write_text(text.replace('harness = "chat"', 'harness = "is_not_here:Chat"'))
    assert load_deployed(file, named).run == load(file).run
    with pytest.raises(ConfigError, match="is_not_here"):
        load_checked(file, named)
    file.write_text(text + "\n[retention]\nexpire_days = 3\n")
    with pytest.raises(ConfigError, match="only a bucket expires objects"):
        load_deployed(file, named)


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[tuple[Made, SecureServer, S3Server]]:
    """Keys and servers, of which none runs yet."""
    made = Made(tmp_path)
    made.make(hosts=("10.0.0.1",))
    pairs = {
        path.stem: tuple(json.loads(path.read_text())[key] for key in ("access_key", "secret_key"))
        for path in (made.directory / "store").glob("*.json")
        if path.stem != "s3"
    }
    broker = SecureServer(tmp_path / "broker", made.directory)
    store = S3Server(tmp_path / "s3", identities(pairs, "packtrain"))
    yield made, broker, store
    broker.stop()
    store.stop()


async def test_it_waits_for_servers_that_start_and_needs_the_launchers_rights_alone(
    config: RunConfig, deployed: tuple[Made, SecureServer, S3Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, broker, store = deployed
    asked = threading.Event()

    def ask(place: Store) -> bool:
        try:
            return ensure_bucket(place)
        finally:
            asked.set()

    monkeypatch.setattr("pipeline.store.bucket.ensure_bucket", ask)

    def start() -> None:
        broker.start()
        # Only when it was asked for in vain.
        asked.wait(60)
        store.start()

    place = Store(
        url="s3://packtrain",
        endpoint=store.endpoint,
        credentials_file=str(made.directory / "store" / "launcher.json"),
    )
    ours = config.model_copy(update={"broker": broker.as_user("launcher"), "store": place})
    waiting = asyncio.create_task(begun(ours, wait_s=90.0))
    starting = threading.Thread(target=start)
    starting.start()
    assert await waiting == f"run {config.run} has begun"
    starting.join()
    assert "goes on" in await begun(ours)
    assert await whole(ours) == ["run.started"]
    removed = ["runs", "rm", ours.run, "--yes", "--directory", str(made.directory.parent / "none")]
    at = broker.as_user("launcher")
    removed += ["--nats", at.url, "--nats-credentials", at.credentials_file, "--nats-ca", at.ca_file]
    removed += ["--store", "s3://packtrain", "--store-endpoint", store.endpoint, "--store-credentials"]
    keys = made.directory / "store"
    # Nor does anybody on options that name no store, or one that is not there.
    nowhere = made.directory.parent / "nowhere"
    for given in (removed[-3:-1], ["--store", nowhere.as_uri()]):
        words = [*removed[: removed.index("--store")], *given]
        refused = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert (refused.exit_code, refused.output.count("\n")) == (2, 1), refused.output
        assert await whole(ours) == ["run.started"]
    assert not nowhere.exists()
    # Who may not remove objects removes no log that says whose they are.
    refused = await asyncio.to_thread(CliRunner().invoke, app, [*removed, str(keys / "launcher.json")])
    assert (refused.exit_code, refused.output.count("\n")) == (1, 1), refused.output
    assert await whole(ours) == ["run.started"]
    done = await asyncio.to_thread(CliRunner().invoke, app, [*removed, str(keys / "admin.json")])
    assert done.exit_code == 0, done.output
    assert "1 event" in done.output
    assert "1 object" in done.output
    assert await claim_of(ObjectStore.open(place), ours.run) is None
    assert await begun(ours) == f"run {config.run} has begun"
    # A service's rights do not suffice, and that is told rather than waited for.
    for kind in ("sampler", "reader"):
        other = ours.model_copy(update={"broker": broker.as_user(kind), "run": f"{config.run}-2"})
        with pytest.raises(LogError, match="credentials_file is another service's"):
            await asyncio.wait_for(begun(other, wait_s=60.0), 30)
    unknown = made.directory.parent / "unknown.json"
    unknown.write_text(json.dumps({"access_key": "nobody", "secret_key": "no secret"}))
    with pytest.raises(StoreUnavailable, match="InvalidAccessKeyId"):
        await asyncio.wait_for(begun(elsewhere(ours, credentials_file=str(unknown)), wait_s=60.0), 30)
    denied = elsewhere(ours, credentials_file=str(made.directory / "store" / "sampler.json"))
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(begun(denied.model_copy(update={"run": f"{config.run}-3"}), wait_s=60.0), 30)
