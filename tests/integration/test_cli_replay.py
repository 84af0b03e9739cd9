"""`packtrain replay` and `trace` as a person types them: on the recorded demo in a real server, and in exported files."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.config import dumps, load
from pipeline.log import Log
from pipeline.log.archive_format import Manifest
from pipeline.log.archive_writer import ArchiveWriter
from pipeline.log.fold import Found
from schemas.facts import RULES
from tests import commands
from tests.integration.test_cli_read import recorded
from tests.natsserver import NatsServer
from tests.recorded import Recorded, demo_events, demo_messages

ROOT = Path(__file__).parents[2]
UNKNOWN = {"ce-specversion": "1.0", "ce-type": "sample.invented", "ce-typeversion": "1", "ce-id": "x"}


@dataclass(frozen=True)
class Place:
    """A launcher's directory with the demo's record, and the server that holds its log."""

    directory: Path
    server: NatsServer

    def state(self) -> tuple[Any, ...]:
        """All that a reader could change in the broker."""

        async def look() -> tuple[Any, ...]:
            log = await Log.connect(self.server.broker, "demo", "test")
            try:
                state = (await log.info()).state
                streams = sorted(s.config.name or "" for s in await log.js.streams_info())
                return state.messages, state.last_seq, state.bytes, streams
            finally:
                await log.close()

        return asyncio.run(look())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The demo's 1651 messages, then one of an unknown type and one that is no event."""
    directory = tmp_path_factory.mktemp("replay")
    # Of its own: the demo's run is named demo, and a stream of that name may be another test's.
    server = NatsServer(directory / "server", sync="2m")
    server.start()
    recorded(directory, "demo", server.broker)

    async def fill() -> None:
        log = await Log.connect(server.broker, "demo", "test")
        await log.create()
        for message in demo_messages():
            ack = await log.js.publish(message.subject, message.body, headers=dict(message.headers))
            assert ack.seq == message.seq
        await log.js.publish("rl.demo.sample.invented.arithmetic.x", b"{}", headers=dict(UNKNOWN))
        await log.js.publish("rl.demo.sample.graded.arithmetic.y", b"no event")
        await log.close()

    asyncio.run(fill())
    yield Place(directory, server)
    server.stop()


def packtrain(*arguments: str, status: int = 0, fresh: bool = False) -> tuple[str, str]:
    """(stdout, stderr) of the command, which has to end with `status`."""
    done = commands.packtrain(*arguments, fresh=fresh)
    assert done.returncode == status, (done.returncode, done.stdout[-2000:], done.stderr)
    return done.stdout, done.stderr


def archived(path: Path, change: Callable[[Recorded], bytes | None]) -> Path:
    """An export of the demo in which the bodies are what `change` gives, and messages it gives None for are no events."""
    manifest = Manifest(
        run="demo", first=1, last=1651, messages=1651, payloads=False, objects=0, object_bytes=0
    )
    with ArchiveWriter(path, manifest, "") as writer:
        for message in demo_messages():
            body = change(message)
            writer.message(Found(message.subject, dict(message.headers), body or b"{}", message.seq))
        writer.close()
    return path


def test_the_demo_is_replayed_without_a_divergence_and_without_a_trace_in_the_broker(place: Place) -> None:
    before = place.state()
    out, err = packtrain("replay", "--directory", str(place.directory), fresh=True)
    assert out.splitlines()[0] == "run demo, 1,651 events up to message 1651, rules 1"
    assert "mixer: 361 decisions made again" in out
    assert "sampler: 139 decisions made again" in out
    assert out.splitlines()[-1] == "no divergence"
    assert err == "packtrain: skipped, as no event to this version: {'unknown': 1, 'invalid': 1}\n"
    packtrain("replay", "demo", "--directory", str(place.directory), "--set", "steps=4")
    packtrain("trace", "000001", "--directory", str(place.directory), fresh=True)
    # No dead letter for the invalid message, no snapshot, no stream: nothing was written.
    assert place.state() == before


def test_state_at_a_message_or_a_time(place: Place) -> None:
    where = ("replay", "demo", "--directory", str(place.directory), "--json", "--service", "sampler")
    at = json.loads(packtrain(*where, "--until", "700")[0])
    (report,) = at["reports"]
    assert (at["run"], report["last"], report["state"]["yielded"], report["state"]["trained"]) == (
        "demo",
        700,
        2,
        0,
    )
    assert report["divergences"] == []
    by_time = json.loads(packtrain(*where, "--until", "2026-11-30T10:15:02+00:00")[0])["reports"][0]
    last = next(m for m in reversed(demo_messages()) if m.headers["ce-time"] <= "2026-11-30T10:15:02")
    assert abs(by_time["last"] - last.seq) < 20
    assert (by_time["state"]["yielded"], by_time["state"]["trained"]) == (2, 1)


def test_changed_values_tell_the_difference_and_are_no_divergence(place: Place, tmp_path: Path) -> None:
    where = ("--directory", str(place.directory))
    out, _ = packtrain("replay", *where, "--set", "sources.arithmetic.accept.max=0.7")
    assert out.splitlines()[0] == "changed: sources.arithmetic.accept.max: 1.0 -> 0.7"
    assert "  groups accepted, arithmetic: 22 -> 17" in out
    assert "  batch 5: could not have been filled from the recorded rollouts" in out
    assert "Rollouts that were never made are not invented" in out
    assert "the mixer sends out no replacements for groups that the changed sampler rejects" in out
    config = load(place.directory / "runs" / "demo" / "config.toml")
    sources = tuple(
        s.model_copy(update={"accept": s.accept.model_copy(update={"max": 0.7})})
        if s.name == "arithmetic"
        else s
        for s in config.sources
    )
    other = tmp_path / "other.toml"
    other.write_text(dumps(config.model_copy(update={"sources": sources, "run": "another"})))
    again, _ = packtrain("replay", "demo", *where, "--config", str(other))
    assert [line for line in again.splitlines() if "22 -> 17" in line]
    whole = json.loads(
        packtrain(
            "replay", *where, "--config", str(other), "--set", "sources.arithmetic.accept.max=1.0", "--json"
        )[0]
    )
    assert "sources.arithmetic.accept.max: 1.0 -> 0.7" not in whole["changes"]
    assert [d["service"] for d in whole["differences"]] == ["mixer", "sampler"]


def test_a_divergence_in_an_exported_file_is_named_with_its_cause(tmp_path: Path) -> None:
    accepted = next(m for m in demo_messages() if m.headers["ce-type"] == "sample.accepted")
    cause = next(m for m in demo_messages() if m.headers["ce-id"] == accepted.headers["ce-causationid"])

    def change(message: Recorded) -> bytes:
        body = orjson.loads(message.body)
        return orjson.dumps({**body, "pass_rate": 0.125}) if message == accepted else message.body

    same = archived(tmp_path / "same.tar", lambda message: message.body)
    assert packtrain("replay", "--file", str(same))[0].splitlines()[-1] == "no divergence"
    file = archived(tmp_path / "other.tar", change)
    out, _ = packtrain("replay", "--file", str(file), status=1)
    recomputed = orjson.loads(accepted.body)["pass_rate"]
    told = out.partition("first divergence: ")[2].splitlines()
    assert told == [
        f"sampler: message {accepted.seq}, {accepted.subject}: pass_rate differs",
        "  recorded    0.125",
        f"  recomputed  {recomputed}",
        f"  decided on message {cause.seq}, sample.graded {cause.headers['ce-subject']}",
        f"  likely cause: the run was made by decision rules 1, this version's are {RULES}",
    ]
    whole = json.loads(packtrain("replay", "demo", "--file", str(file), "--json", status=1)[0])
    (found,) = [d for report in whole["reports"] for d in report["divergences"]]
    assert (found["kind"], found["field"], found["recorded"], found["recomputed"]) == (
        "differs",
        "pass_rate",
        0.125,
        recomputed,
    )
    assert found["cause"] == {"seq": cause.seq, "type": "sample.graded", "id": cause.headers["ce-subject"]}


def test_a_message_that_is_no_event_is_skipped_told_and_missed(tmp_path: Path) -> None:
    accepted = next(m for m in demo_messages() if m.headers["ce-type"] == "sample.accepted")
    file = archived(tmp_path / "r.tar", lambda message: None if message == accepted else message.body)
    out, err = packtrain("replay", "--file", str(file), "--service", "sampler", status=1)
    assert f"first divergence: sampler: {accepted.subject}: decided on message " in out
    assert "and never recorded, though the run went on" in out
    assert "then sampler: message" in out
    assert err == "packtrain: skipped, as no event to this version: {'invalid': 1}\n"


def test_a_file_that_is_none_or_of_another_run_is_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in packtrain("replay", "--file", str(tmp_path / "x"), status=2)[1]
    (tmp_path / "junk").write_bytes(b"junk" * 500)
    _, err = packtrain("trace", "1", "--file", str(tmp_path / "junk"), status=2)
    assert len(err.splitlines()) == 1
    file = archived(tmp_path / "r.tar", lambda message: message.body)
    assert "is of run demo, not other" in packtrain("replay", "other", "--file", str(file), status=2)[1]
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged.tar").write_bytes(damaged)
    _, err = packtrain("replay", "--file", str(tmp_path / "damaged.tar"), status=2)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--service", "grader"), "no service 'grader' to replay; services: mixer, sampler, yield"),
        (("--until", "yesterday"), "--until 'yesterday' is neither a sequence number"),
        (("--until", "0"), "--until '0' is neither"),
        (("--until", "2026-11-30T10:15:00"), "nor a time with its zone"),
        (("--until", "2000-01-01T00:00:00Z"), "the log of run demo holds no event up to there"),
        (("--set", "sources.arithmetik.groups=1"), "no source 'arithmetik'; sources: arithmetic, calculator"),
        (("--set", "steps"), "'steps' is not path=value"),
        (("--set", "steps=0"), "--set steps = 0: a run has at least 1"),
        (("--config", "/nowhere.toml"), "/nowhere.toml: cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_status_2(place: Place, arguments: tuple[str, ...], said: str) -> None:
    out, err = packtrain("replay", "--directory", str(place.directory), *arguments, status=2)
    assert said in err
    assert (len(err.splitlines()), out) == (1, "")


def test_a_run_that_is_not_there_is_told(place: Place, tmp_path: Path) -> None:
    where = ("--directory", str(place.directory))
    assert "has no run 'other'; runs: demo" in packtrain("replay", "other", *where, status=1)[1]
    assert "holds no run" in packtrain("trace", "1", "--directory", str(tmp_path), status=1)[1]


async def test_a_log_without_its_beginning_cannot_be_decided_again(
    tmp_path: Path, log: Log, broker: Any
) -> None:
    recorded(tmp_path, log.run, broker)
    message = demo_messages()[1]
    subject = message.subject.replace("rl.demo.", f"rl.{log.run}.")
    headers = {k: v for k, v in message.headers.items() if k != "Nats-Expected-Stream"}
    await log.js.publish(subject, message.body, headers=headers)
    _, err = packtrain("replay", "--directory", str(tmp_path), status=2)
    assert "begins at message 1, sequence.dispatched: what was before it is gone" in err


def test_a_trace_prints_the_tree_and_the_whole_as_json(place: Place) -> None:
    where = ("--directory", str(place.directory), "--run", "demo")
    out, _ = packtrain("trace", "arithmetic-000001-3", *where)
    assert out.splitlines()[0] == "sequence arithmetic-000001-3, batch 000001: 14 events in 13.354 s"
    assert len(out.splitlines()) == 15
    out, _ = packtrain("trace", "2", *where)
    assert [line.split()[0] for line in out.splitlines()[2:10]] == [
        *(f"arithmetic-{i:06d}" for i in (4, 5, 6, 7)),
        *(f"calculator-{i:06d}" for i in (4, 5, 7, 8)),
    ]
    whole = json.loads(packtrain("trace", "000002", *where, "--json")[0])
    assert (whole["run"], whole["trace"]["kind"], len(whole["trace"]["nodes"])) == ("demo", "batch", 6)
    root, *others = whole["trace"]["nodes"]
    assert [node["type"] for node in others if node["cause"] == root["seq"]] == [
        "window.packed",
        "window.packed",
        "batch.consumed",
    ]


@pytest.mark.parametrize(
    ("id_", "status", "said"),
    [
        ("arithmetic-00000", 1, "near ones: arithmetic-000000, "),
        ("7", 1, "no sample, sequence or batch '000007'; batches: 000001 to 000005"),
        ("../x", 2, "is not a legal name"),
        ("\x1b[31m", 2, "is not a legal name"),
    ],
)
def test_an_id_that_is_not_there_is_one_line(place: Place, id_: str, status: int, said: str) -> None:
    _, err = packtrain("trace", id_, "--directory", str(place.directory), status=status)
    assert said in err
    assert "\x1b" not in err
    assert len(err.splitlines()) == 1


def test_a_trace_of_a_log_without_its_beginning_says_so(tmp_path: Path) -> None:
    file = archived(tmp_path / "tail.tar", lambda message: message.body if message.seq > 1 else None)
    out, err = packtrain("trace", "1", "--file", str(file))
    assert "batch.yielded 000001" in out
    assert (
        "begins at message 2, sequence.dispatched: what was before it is gone, and samples of batches" in err
    )


def test_the_output_in_the_document_is_what_the_commands_print(place: Place, tmp_path: Path) -> None:
    (tmp_path / ".packtrain").symlink_to(place.directory)
    accepted = next(m for m in demo_messages() if m.headers["ce-type"] == "sample.accepted")

    def change(message: Recorded) -> bytes:
        body = orjson.loads(message.body)
        return orjson.dumps({**body, "pass_rate": 0.125}) if message == accepted else message.body

    archived(tmp_path / "altered.tar", change)
    blocks = re.findall(
        r"```text\n\$ packtrain (.+)\n((?:.*\n)*?)```", (ROOT / "docs" / "replay.md").read_text()
    )
    assert len(blocks) == 5
    for command, shown in blocks:
        assert commands.packtrain(*command.split(), cwd=tmp_path).stdout == shown, command


def test_the_program_in_the_document_runs() -> None:
    program = (ROOT / "docs" / "replay.md").read_text().partition("```python\n")[2].partition("```")[0]
    told: list[Any] = []
    exec(program, {"events": demo_events(), "print": lambda *values: told.append(values)})
    ((divergences, pending, state),) = told
    assert (divergences, pending, state["yielded"]) == ((), (), 5)
