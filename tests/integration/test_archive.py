"""A run out of a broker and a store into a file, and back: real servers, real objects, a real recorded run."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import shutil
import uuid
from pathlib import Path

import orjson
import pytest

from pipeline.config import dumps
from pipeline.config import load as config_of
from pipeline.log import Log, LogError
from pipeline.log.archive import Archive, read_archive
from pipeline.log.archive_format import Manifest, canonical
from pipeline.log.archive_writer import ArchiveWriter
from pipeline.log.fold import Found
from pipeline.log.transfer import compare, export_messages, extent, import_messages
from pipeline.store import ObjectStore
from schemas.config import Broker
from schemas.config import Store as StoreConfig
from schemas.envelope import Event, decode
from services.cli import archive
from tests import commands
from tests.natsserver import NatsServer

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
FIXTURES = Path(__file__).parents[1] / "fixtures"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory):
    server = NatsServer(tmp_path_factory.mktemp("elsewhere"), sync="2m")
    server.start()
    yield server
    server.stop()


async def export(broker: Broker, run: str, path: Path) -> Path:
    log = await Log.connect(broker, run, "test")
    try:
        part = await extent(log)
        manifest = Manifest(
            run=run,
            first=part.first,
            last=part.last,
            messages=part.messages,
            payloads=False,
            objects=0,
            object_bytes=0,
        )
        with ArchiveWriter(path, manifest, "") as writer:
            async for found in export_messages(log, part):
                writer.message(found)
            writer.close()
    finally:
        await log.close()
    return path


async def load(broker: Broker, path: Path) -> int:
    with Archive(path) as file:
        for _ in file.check():
            pass
        log = await Log.connect(broker, file.manifest.run, "test")
        try:
            start = await compare(log, file)
            await import_messages(log, file, start)
            return file.manifest.last + 1 - start
        finally:
            await log.close()


async def fill(log: Log) -> None:
    """Publishes the recorded demo as its services did, but for the name of the run in the subjects."""
    for line in gzip.decompress((FIXTURES / "demo-v1.jsonl.gz").read_bytes()).splitlines():
        message = orjson.loads(line)
        headers = {**message["headers"], "Nats-Expected-Stream": log.stream}
        subject = message["subject"].replace("rl.demo.", f"rl.{log.run}.")
        await log.js.publish_async(subject, base64.b64decode(message["body"]), headers=headers)
    await log.js.publish_async_completed()


@pytest.fixture
async def recorded(log: Log) -> Log:
    await fill(log)
    return log


async def atomic(log: Log, messages: list[tuple[str, bytes]]) -> None:
    """One atomic batch, as its publisher sends it."""
    batch = uuid.uuid4().hex
    for i, (subject, body) in enumerate(messages, 1):
        headers = {
            "Nats-Msg-Id": uuid.uuid4().hex,
            "Nats-Expected-Last-Subject-Sequence": "0",
            "Nats-Batch-Id": batch,
            "Nats-Batch-Sequence": str(i),
        }
        if i < len(messages):
            await log._client.publish(subject, body, headers=headers)
        else:
            answer = await log._client.request(subject, body, headers={**headers, "Nats-Batch-Commit": "1"})
            assert "error" not in orjson.loads(answer.data)


async def test_a_recorded_run_goes_through_a_file_into_another_broker_and_back_byte_for_byte(
    recorded: Log, broker: Broker, elsewhere: NatsServer, tmp_path: Path
) -> None:
    first = await export(broker, recorded.run, tmp_path / "first.tar")
    again = await export(broker, recorded.run, tmp_path / "again.tar")
    assert sha256(again) == sha256(first)
    messages = list(read_archive(first))
    assert len(messages) == 1651
    assert await load(elsewhere.broker, first) == 1651
    second = await export(elsewhere.broker, recorded.run, tmp_path / "second.tar")
    assert sha256(second) == sha256(first)
    # It is the log that a reader wants, too.
    copy = await Log.connect(elsewhere.broker, recorded.run, "test")
    events = []
    async for event in copy.subscribe():
        events.append(event)
        if event.seq == 1651:
            break
    await copy.close()
    read = [decode(found.subject, found.headers, found.body, found.seq) for found in messages]
    assert events == read
    assert all(isinstance(event, Event) for event in read)


async def test_what_is_no_event_what_came_in_batches_and_what_is_large_goes_through_too(
    log: Log, broker: Broker, elsewhere: NatsServer, tmp_path: Path
) -> None:
    run, js = log.run, log.js
    await atomic(log, [(f"rl.{run}.a.b.c.{i}", b"\x00\xff" * i) for i in range(5)])
    await js.publish(f"rl.{run}.rubbish", b"")
    await js.publish(f"rl.{run}.rubbish", b"x", headers={"a": "", "Ünì".encode().hex(): "ü \t z", "b": "1:2"})
    await js.publish(f"rl.{run}.rubbish.ü*.x", b"second")
    second = {"Nats-Msg-Id": "one", "Nats-Expected-Last-Subject-Sequence": "6"}
    await js.publish(f"rl.{run}.rubbish", b"", headers=second | {"Nats-Expected-Last-Subject-Sequence": "7"})
    await js.publish(f"dlq.{run}.7", b"\r\n" * 9, headers={"dlq-reason": "r" * 1000, "dlq-seq": "7"})
    # As large as the stream takes, to the byte: headers are 12 bytes and a line each.
    await js.publish(f"dlq.{run}.8", b"y" * (65536 + 4096 - 12 - len("h: v\r\n")), headers={"h": "v"})
    first = await export(broker, run, tmp_path / "first.tar")
    assert await load(elsewhere.broker, first) == 11
    assert sha256(await export(elsewhere.broker, run, tmp_path / "second.tar")) == sha256(first)
    config = (await js.stream_info(log.stream)).config
    copy = await Log.connect(elsewhere.broker, run, "test")
    imported = await copy.info()
    await copy.close()
    assert imported.config.as_dict() | {"metadata": 0} == config.as_dict() | {"metadata": 0}


async def test_a_log_whose_beginning_is_forgotten_keeps_its_sequences(
    broker: Broker, run_name: str, elsewhere: NatsServer, tmp_path: Path
) -> None:
    log = await Log.connect(broker, run_name, "test")
    await log.create(first_seq=7001)
    cas = "Nats-Expected-Last-Subject-Sequence"
    await log.js.publish(f"rl.{run_name}.a", b"1", headers={cas: "0"})
    await log.js.publish(f"rl.{run_name}.a", b"2", headers={cas: "7001"})
    await log.close()
    first = await export(broker, run_name, tmp_path / "first.tar")
    assert [(f.seq, f.headers) for f in read_archive(first)] == [(7001, {cas: "0"}), (7002, {cas: "7001"})]
    assert await load(elsewhere.broker, first) == 2
    assert await load(elsewhere.broker, first) == 0
    assert sha256(await export(elsewhere.broker, run_name, tmp_path / "second.tar")) == sha256(first)
    # A launcher that goes on with it creates the stream again.
    log = await Log.connect(elsewhere.broker, run_name, "test")
    await log.create()
    assert (await log.info()).state.last_seq == 7002
    await log.close()


async def test_two_messages_with_one_id_are_both_imported(
    log: Log, broker: Broker, elsewhere: NatsServer, tmp_path: Path
) -> None:
    await log.js.update_stream((await log.info()).config.evolve(duplicate_window=0.1))
    for i in range(40):
        await log.js.publish(
            f"rl.{log.run}.a", b"%d" % i, headers={"Nats-Msg-Id": f"{i}" if i != 3 else "same"}
        )
    while (await log.js.publish(f"rl.{log.run}.b", b"", headers={"Nats-Msg-Id": "same"})).duplicate:
        pass
    first = await export(broker, log.run, tmp_path / "first.tar")
    assert await load(elsewhere.broker, first) == 41
    assert sha256(await export(elsewhere.broker, log.run, tmp_path / "second.tar")) == sha256(first)


async def test_an_interrupted_import_goes_on_and_another_run_of_that_name_is_left_alone(
    recorded: Log, broker: Broker, elsewhere: NatsServer, tmp_path: Path
) -> None:
    first = await export(broker, recorded.run, tmp_path / "first.tar")
    partial = await Log.connect(elsewhere.broker, recorded.run, "test")
    await partial.create()
    for found in list(read_archive(first))[:700]:
        await partial.js.publish_async(found.subject, found.body, headers=dict(found.headers or {}))
    await partial.js.publish_async_completed()
    assert await load(elsewhere.broker, first) == 951
    assert sha256(await export(elsewhere.broker, recorded.run, tmp_path / "second.tar")) == sha256(first)
    await partial.js.publish(f"rl.{recorded.run}.more", b"")
    with pytest.raises(LogError, match=r"another run .* goes on to message 1652.*nothing was changed"):
        await load(elsewhere.broker, first)
    assert (await partial.info()).state.last_seq == 1652
    await partial.js.delete_stream(partial.stream)
    await partial.create()
    await partial.js.publish(f"rl.{recorded.run}.other", b"")
    with pytest.raises(LogError, match=r"another run .*message 1 differs"):
        await load(elsewhere.broker, first)
    assert (await partial.info()).state.messages == 1
    await partial.close()


async def test_an_import_survives_the_death_of_the_broker(
    recorded: Log, broker: Broker, tmp_path: Path
) -> None:
    first = await export(broker, recorded.run, tmp_path / "first.tar")
    server = NatsServer(tmp_path / "fragile")
    server.start()
    log = await Log.connect(server.broker, recorded.run, "test")
    killed = 0

    def done(seq: int) -> None:
        nonlocal killed
        if seq >= 500 * (killed + 1) and killed < 2:
            killed += 1
            server.kill()
            server.start()

    try:
        with Archive(first) as file:
            await import_messages(log, file, await compare(log, file), done)
        assert killed == 2
        assert sha256(await export(server.broker, recorded.run, tmp_path / "second.tar")) == sha256(first)
    finally:
        await log.close()
        server.stop()


def test_the_canonical_form_is_what_it_says() -> None:
    headers = {
        "Nats-Batch-Id": "b", "nats-rollup": "all", "Nats-Msg-Id": " m ", "a(b)": "1", "c": "x\ny",
        "Nats-Expected-Last-Subject-Sequence": "4",
    }  # fmt: skip
    kept = {"Nats-Msg-Id": "m", "c": "x y", "Nats-Expected-Last-Subject-Sequence": "4"}
    found = Found("rl.r.a", headers, b"", 9)
    assert canonical(found, 4).headers == kept
    assert canonical(found, 5).headers == kept | {"Nats-Expected-Last-Subject-Sequence": "0"}
    assert canonical(Found("rl.r.a", {"Nats-Batch-Id": "b"}, b"", 9), 1).headers is None


# The commands


def packtrain(*arguments: str | Path, status: int = 0, fresh: bool = False) -> str:
    """What the command printed; stderr when it has to fail."""
    done = commands.packtrain(*arguments, fresh=fresh)
    assert done.returncode == status, done.stderr + done.stdout
    return done.stderr if status else done.stdout


async def demo(server: NatsServer, directory: Path) -> None:
    """The recorded demo as its launcher left it: stream, some objects, and the record."""
    log = await Log.connect(server.broker, "demo", "test")
    await log.create()
    await fill(log)
    started = await log.last("run.started", "all", "demo")
    assert started is not None
    await log.close()
    url = (directory / "objects").as_uri()
    store = ObjectStore.open(StoreConfig(url=url))
    await store.create("runs/demo/run.json", orjson.dumps({"log": started.id}))
    for i in range(40):
        await store.create(f"runs/demo/payloads/arithmetic/s-{i}.safetensors", bytes([i]) * i * 1000)
    config = config_of(DEMO).model_copy(
        update={
            "directory": str(directory),
            "broker": server.broker,
            "store": StoreConfig(url=url),
        }
    )
    home = directory / "runs" / "demo"
    home.mkdir(parents=True)
    (home / "config.toml").write_text(dumps(config))


@pytest.fixture(scope="module")
def original(elsewhere: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recorded demo is, and `demo.tar`, its export; not to be changed."""
    here = tmp_path_factory.mktemp("here")
    asyncio.run(demo(elsewhere, here))
    said = packtrain("export", "demo", here / "demo.tar", "--payloads", "--directory", here, fresh=True)
    assert said.startswith("run demo: 1,651 messages, 41 objects (761.8 KiB) in")
    return here


@pytest.fixture
def exported(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original / "demo.tar", tmp_path))


async def test_the_commands_take_a_whole_run_to_another_directory_and_back(
    exported: Path, original: Path, elsewhere: NatsServer, tmp_path: Path
) -> None:
    content = exported.read_bytes()
    assert str(original).encode() not in content
    assert elsewhere.token.encode() not in content
    assert elsewhere.broker.url.encode() not in content
    there = ("--directory", tmp_path / "there")
    packtrain("import", exported, *there, fresh=True)
    packtrain("export", tmp_path / "again.tar", "--payloads", *there)
    assert sha256(tmp_path / "again.tar") == sha256(exported)
    assert "1,651 of the messages were there already" in packtrain("import", exported, *there)
    listed = packtrain("events", "list", *there).splitlines()
    assert len(listed) == 1651
    assert "run.stopped" in listed[-1]
    assert "1,651" in packtrain("replay", "demo", *there)
    assert "sequence.finished" in packtrain("trace", "calculator-000002-3", *there)
    [row] = [json.loads(line) for line in packtrain("runs", "list", "--json", *there).splitlines()]
    assert (row["run"], row["state"], row["steps"], row["wanted"]) == ("demo", "completed", 5, 5)
    assert "is over" in packtrain("runs", "resume", "demo", *there, status=1)
    assert "exists already" in packtrain("export", tmp_path / "again.tar", *there, status=2)


async def test_an_import_that_was_interrupted_leaves_a_run_that_cannot_go_on_and_is_completed_by_the_same_command(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    target = archive.Target(there, Broker(), StoreConfig())

    async def dies(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            archive.import_file(exported, target, print)

    with monkeypatch.context() as patch:
        patch.setattr(archive, "import_messages", dies)
        await asyncio.to_thread(interrupted)
    assert len(list((there / "objects").rglob("*.safetensors"))) == 40
    assert not (there / "objects/runs/demo/run.json").exists()
    assert "is not complete" in packtrain("runs", "resume", "demo", "--directory", there, status=1)
    assert "holds no run" in packtrain("events", "list", "--directory", there, status=1)
    assert "41 objects" in packtrain("import", exported, "--directory", there)
    packtrain("export", tmp_path / "again.tar", "--payloads", "--directory", there)
    assert sha256(tmp_path / "again.tar") == sha256(exported)


async def test_a_place_that_holds_another_run_of_the_name_is_refused_unchanged(
    exported: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    objects = there / "objects/runs/demo"
    objects.mkdir(parents=True)
    (objects / "other.bin").write_bytes(b"x")
    said = packtrain("import", exported, "--directory", there, status=1)
    assert "holds runs/demo/other.bin, an object of another run demo; nothing was changed" in said
    (objects / "other.bin").rename(objects / "run.json")
    assert "holds runs/demo/run.json" in packtrain("import", exported, "--directory", there, status=1)
    assert [path.name for path in (there / "objects").rglob("*") if path.is_file()] == ["run.json"]
    assert packtrain("runs", "list", "--directory", there) == ""


async def test_a_log_whose_beginning_is_forgotten_takes_no_place_that_another_log_has_claimed(
    exported: Path, tmp_path: Path
) -> None:
    with Archive(exported) as whole:
        messages = list(whole.messages(100))
        config = whole.config
        claim = next(whole.read(member) for key, member in whole.objects() if key == "runs/demo/run.json")
    file = tmp_path / "tail.tar"
    manifest = Manifest(
        run="demo",
        first=100,
        last=1651,
        messages=1552,
        payloads=True,
        objects=1,
        object_bytes=len(claim),
    )
    with ArchiveWriter(file, manifest, config) as writer:
        for found in messages:
            writer.message(found)
        writer.object("runs/demo/run.json", claim)
        writer.close()
    there = tmp_path / "there"
    place = there / "objects/runs/demo/run.json"
    place.parent.mkdir(parents=True)
    place.write_bytes(claim[:-3] + b'x"}')
    said = packtrain("import", file, "--directory", there, status=1)
    assert "holds runs/demo/run.json, an object of another run demo; nothing was changed" in said
    place.write_bytes(claim)  # its own, from before its broker was lost
    assert "1,552 messages" in packtrain("import", file, "--directory", there)


async def test_objects_that_were_there_before_an_import_are_not_removed_with_it(
    exported: Path, original: Path, tmp_path: Path
) -> None:
    there, objects = ("--directory", tmp_path / "there"), tmp_path / "objects"
    shutil.copytree(original / "objects", objects)
    before = sorted(path for path in objects.rglob("*") if path.is_file())
    packtrain("import", exported, *there, "--store", objects.as_uri())
    said = packtrain("runs", "rm", "demo", "--yes", *there)
    assert "1,651 events" in said
    assert (
        f"the objects below runs/demo stay in {objects.as_uri()}: they were there before the import" in said
    )
    assert sorted(path for path in objects.rglob("*") if path.is_file()) == before
    assert not (tmp_path / "there/runs/demo").exists()
    # Its own go with it.
    packtrain("import", exported, *there)
    packtrain("import", exported, *there)
    assert "41 objects" in packtrain("runs", "rm", "demo", "--yes", *there)


async def test_a_damaged_file_changes_nothing(exported: Path, tmp_path: Path) -> None:
    content = bytearray(exported.read_bytes())
    content[-5000] ^= 1
    exported.write_bytes(content)
    said = packtrain("import", exported, "--directory", tmp_path / "there", status=2)
    assert "is damaged: its CRC32C is" in said
    assert not (tmp_path / "there").exists()
    assert "No such file" in packtrain("import", tmp_path / "none.tar", "--directory", tmp_path, status=1)
