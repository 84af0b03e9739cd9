"""Dead letters: one for a message whoever buries it, moved by one person at a time, and printed without harm."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pipeline.config import dumps, load
from pipeline.log import LetterError, Log
from pipeline.log.dead_letters import MAX_MESSAGE, printable
from pipeline.log.fold import Found
from schemas.config import Broker
from schemas.facts import MAX_BODY
from schemas.names import BadName, dead_letter_subject
from tests import commands
from tests.log_parts import HEADERS, completed, publish_raw, take

pytestmark = pytest.mark.timeout(90)
DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
ORIGINAL = Found(
    "rl.r.sample.completed.math.x", {"ce-type": "sample.completed", "Nats-Msg-Id": "1"}, b"{}", 7
)


def test_the_subject_of_a_letter_is_of_legal_tokens() -> None:
    assert dead_letter_subject("r", "grader", 12) == "dlq.r.grader.12"
    assert dead_letter_subject("r") == "dlq.r"
    with pytest.raises(BadName, match="reader"):
        dead_letter_subject("r", "a.b", 1)


async def test_a_letter_says_what_it_was_and_why(log: Log) -> None:
    assert await log.letters.bury("grader", ORIGINAL, "ValueError: no\n\x1b[31msuch\ud800", 3)
    letter = await log.letters.find("grader", 7)
    assert (letter.name, letter.state, letter.deliveries, letter.bytes) == ("grader/7", "buried", 3, 2)
    assert (letter.subject, letter.body) == (ORIGINAL.subject, b"{}")
    assert letter.reason == "ValueError: no [31msuch"
    assert letter.headers["ce-type"] == "sample.completed"
    # But for those that the broker would act on: the original's message id would make it drop the letter.
    assert "Nats-Msg-Id" not in letter.headers
    assert letter.time is not None
    with pytest.raises(LetterError, match=r"no dead letter grader/8"):
        await log.letters.find("grader", 8)


async def test_of_many_who_bury_one_message_one_does(broker: Broker, log: Log) -> None:
    others = [await Log.connect(broker, log.run, f"w{i}") for i in range(6)]
    buried = await asyncio.gather(
        *(other.letters.bury("grader", ORIGINAL, f"reason {i}", i) for i, other in enumerate(others))
    )
    assert sorted(buried) == [False] * 5 + [True]
    letters, strangers = await log.letters.all()
    assert [letter.reason for letter in letters] == [f"reason {buried.index(True)}"]
    assert strangers == 0
    # It is the letter of one reader: another that cannot handle the same message has its own.
    assert await log.letters.bury("harness-chat", ORIGINAL, "also")
    assert len((await log.letters.all())[0]) == 2
    for other in others:
        await other.close()


async def test_of_many_who_change_one_letter_one_does_and_the_others_are_told(
    broker: Broker, log: Log
) -> None:
    await log.publish(completed(1))
    original = await log.letters.original(1)
    assert original is not None
    await log.letters.bury("grader", original, "no")
    letter = await log.letters.find("grader", 1)
    others = [await Log.connect(broker, log.run, f"w{i}") for i in range(4)]
    changes = [
        (other.letters.retry if i % 2 else other.letters.drop)(letter) for i, other in enumerate(others)
    ]
    results = await asyncio.gather(*changes, return_exceptions=True)
    now = await log.letters.find("grader", 1)
    told = [r for r in results if r is not None]
    assert len(told) == 3
    for error in told:
        assert isinstance(error, LetterError)
        assert f"changed by somebody else: it is {now.state}" in str(error)
    for other in others:
        await other.close()


async def test_a_letter_moves_only_as_it_may(log: Log) -> None:
    await log.publish(completed(1))
    original = await log.letters.original(1)
    assert original is not None
    await log.letters.bury("grader", original, "no")

    async def letter():
        return await log.letters.find("grader", 1)

    await log.letters.retry(await letter())
    retried = await letter()
    assert (retried.state, retried.reason, retried.body) == ("retried", "no", original.body)
    with pytest.raises(LetterError, match="retried already"):
        await log.letters.retry(retried)
    # Its reader could not handle it again.
    assert await log.letters.bury("grader", original, "still no", 2, after=retried.at)
    assert not await log.letters.bury("grader", original, "late", 2, after=retried.at)
    assert ((await letter()).state, (await letter()).reason) == ("buried", "still no")
    # Listed letters have no bodies; changing one keeps the body all the same.
    [listed] = (await log.letters.all())[0]
    assert listed.body == b""
    await log.letters.drop(listed)
    assert ((await letter()).state, (await letter()).body) == ("dropped", original.body)
    with pytest.raises(LetterError, match="dropped already"):
        await log.letters.drop(await letter())
    await log.letters.retry(await letter())
    assert (await letter()).state == "retried"


async def test_a_change_whose_acknowledgement_was_lost_is_no_lost_race(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, calls = log.js.publish, 0

    async def lose_first_ack(*args: object, **kwargs: object):
        nonlocal calls
        calls += 1
        ack = await publish(*args, **kwargs)  # pyright: ignore[reportArgumentType]  # passes through what it was given
        if calls == 1:
            raise TimeoutError("acknowledgement lost")
        return ack

    monkeypatch.setattr(log.js, "publish", lose_first_ack)
    assert await log.letters.bury("grader", ORIGINAL, "no")
    assert calls == 2


async def test_no_original_makes_a_letter_impossible(broker: Broker, log: Log) -> None:
    padding = b"".join(b"h%d: %s\r\n" % (i, b"\xff" * 50) for i in range(60))
    hostile = [
        Found("x", {"a(b": "1", "": "2", "k\ud800": "3", "v": "\ud800\x00", "Status": "404", "dlq-state": "dropped"}, b"", 1),
        Found("x" * 5000, {f"h{i}": "\u20ac" * 100 for i in range(50)}, b"y" * MAX_MESSAGE, 2),
        Found("x", {"big": "z" * 70_000}, b"y" * MAX_BODY, 3),
    ]  # fmt: skip
    for original in hostile:
        assert await asyncio.wait_for(log.letters.bury("malformed", original, "r" * 5000), 10)
    first = await log.letters.find("malformed", 1)
    assert (first.state, first.headers["v"]) == ("buried", "")
    assert not {"a(b", "Status", "k\ud800"} & first.headers.keys()
    for seq, size in ((2, MAX_MESSAGE), (3, MAX_BODY)):
        letter = await log.letters.find("malformed", seq)
        assert letter.bytes == size
        assert MAX_BODY - 3000 < len(letter.body) < size + 1
        # The largest letter can still be changed.
        await log.letters.drop(letter)
    await publish_raw(
        broker, f"rl.{log.run}.a.b.c.d".encode(), b"NATS/1.0\r\n" + padding + b"\r\n", b"q" * 60_000
    )
    await log.publish(completed(1))
    assert len(await take(log.subscribe(), 1)) == 1


async def test_what_stands_among_the_letters_and_is_none_is_counted(broker: Broker, log: Log) -> None:
    await log.letters.bury("grader", ORIGINAL, "no")
    for subject in ("dlq.{}.7", "dlq.{}.grader.x", "dlq.{}.grader.8", "dlq.{}.gra\xffder.8"):
        await publish_raw(broker, subject.format(log.run).encode("latin1"), b"", b"")
    letters, strangers = await log.letters.all()
    assert ([letter.name for letter in letters], strangers) == (["grader/7"], 4)
    # A letter that claims to be another's is that of its subject.
    head = {"dlq-state": "buried", "dlq-seq": "1", "dlq-bytes": "-9", "dlq-deliveries": "9" * 5000}
    await log.js.publish(f"dlq.{log.run}.grader.9", b"", headers=head)
    forged = await log.letters.find("grader", 9)
    assert (forged.seq, forged.bytes, forged.deliveries) == (9, 0, 0)


async def test_malformed_is_retried_only_by_a_version_that_understands_it(log: Log) -> None:
    head = {**HEADERS, "ce-type": "sample.completed"}
    await log.js.publish(f"rl.{log.run}.sample.completed.math.math-000001", b"{not json", headers=head)
    await log.publish(completed(2))
    await take(log.subscribe(), 1)
    with pytest.raises(LetterError, match=r"malformed/1: it is no event to this version either: .*without"):
        await log.letters.retry(await log.letters.find("malformed", 1))
    assert (await log.letters.find("malformed", 1)).state == "buried"
    # As an older version left it, that did not know what this one knows.
    understood = await log.letters.original(2)
    assert understood is not None
    await log.letters.bury("malformed", understood, "an older version's reason")
    await log.letters.retry(await log.letters.find("malformed", 2))
    assert (await log.letters.find("malformed", 2)).state == "retried"
    await log.letters.bury("grader", Found("x", None, b"", 99), "no")
    with pytest.raises(LetterError, match="no longer in the stream; drop"):
        await log.letters.retry(await log.letters.find("grader", 99))


def test_a_reason_is_one_short_line_of_text() -> None:
    assert printable("a\r\n\tb\x1b[0m\u202e\x7f", 100) == "a b [0m"
    assert printable("\u20ac" * 10, 10) == "\u20ac" * 3
    assert printable("a\ud800b", 10) == "a b"


def packtrain(*arguments: str, status: int = 0, fresh: bool = False) -> str:
    """What the command printed; stderr when it has to fail."""
    done = commands.packtrain("dlq", *arguments, fresh=fresh)
    assert done.returncode == status, done.stderr
    printed = done.stderr if status else done.stdout
    assert all(c.isprintable() or c == "\n" for c in printed)
    return printed


async def test_the_commands(broker: Broker, log: Log, tmp_path: Path) -> None:
    config = tmp_path / "runs" / log.run / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(dumps(load(DEMO).model_copy(update={"run": log.run, "broker": broker})))
    at = ("--directory", str(tmp_path))
    assert await asyncio.to_thread(packtrain, "list", *at) == ""
    for number in (1, 2, 3):
        await log.publish(completed(number))
    for number in (1, 2, 3):
        original = await log.letters.original(number)
        assert original is not None
        await log.letters.bury("grader", original, f"reason {number}", 10)
    await log.js.publish(f"rl.{log.run}.a.b.c.d", b"\x1b]0;owned\x07\x7f" * 100)
    await log.letters.bury("harness-chat", Found("x", {"evil": "\x1b[2J"}, b'["\x7f\\u001b", 1]', 3), "other")
    # Written past our own care, as by a stranger.
    head = {"dlq-state": "buried", "dlq-reason": "\x1b[31mred \u202e", "dlq-subject": "\x9b"}
    await log.js.publish(f"dlq.{log.run}.malformed.4", b"\x1b]0;owned\x07\x7f" * 200, headers=head)

    listed = (await asyncio.to_thread(packtrain, "list", log.run, *at, fresh=True)).splitlines()
    assert [line.split()[:2] for line in listed] == [
        ["grader/1", "buried"], ["grader/2", "buried"], ["grader/3", "buried"],
        ["harness-chat/3", "buried"], ["malformed/4", "buried"],
    ]  # fmt: skip
    assert "\\u001b[31mred \\u202e" in listed[4]
    assert "10x" in listed[0]

    shown = await asyncio.to_thread(packtrain, "show", "1", *at, "--run", log.run)
    assert '"sample": "math-000001"' in shown
    assert "header      ce-type: sample.completed" in shown
    assert '"\\u007f\\u001b"' in await asyncio.to_thread(packtrain, "show", "harness-chat/3", *at)
    dump = await asyncio.to_thread(packtrain, "show", "malformed/4", "--config", str(config))
    assert "00000000  1b 5d 30 3b" in dump
    assert "(the first 1024 of 2200 bytes)" in dump
    several = await asyncio.to_thread(packtrain, "show", "3", *at, status=2)
    assert "grader/3, harness-chat/3" in several
    assert "names no dead letter" in await asyncio.to_thread(packtrain, "show", "\x1b[31m", *at, status=2)

    assert (
        await asyncio.to_thread(packtrain, "retry", "1", *at, fresh=True)
        == "grader/1: retried: grader is given message 1 again\n"
    )
    failed = await asyncio.to_thread(packtrain, "retry", "1", "malformed/4", "grader/2", *at, status=1)
    assert "grader/1 is retried already" in failed
    assert "malformed/4: it is no event" in failed
    assert (await log.letters.find("grader", 2)).state == "retried"
    assert (await asyncio.to_thread(packtrain, "drop", "--all-of", "grader", *at)) == "grader/3: dropped\n"
    assert "no open dead letter of 'grader'" in await asyncio.to_thread(
        packtrain, "retry", "--all-of", "grader", *at, status=1
    )
    assert "not both" in await asyncio.to_thread(packtrain, "drop", *at, status=2)
    lines = (await asyncio.to_thread(packtrain, "list", "--all", "--json", *at)).splitlines()
    assert {(x["letter"], x["state"]) for x in map(json.loads, lines)} == {
        ("grader/1", "retried"), ("grader/2", "retried"), ("grader/3", "dropped"),
        ("harness-chat/3", "buried"), ("malformed/4", "buried"),
    }  # fmt: skip
    assert len((await asyncio.to_thread(packtrain, "list", *at)).splitlines()) == 2
