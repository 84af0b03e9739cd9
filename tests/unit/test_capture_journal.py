"""The journal: what a host recorded is there after its death, whole and nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.capture import journal as journals
from pipeline.capture.call import Answer, Call
from pipeline.capture.dialogue import Dialogue
from pipeline.capture.export import export
from pipeline.capture.journal import HostJournal
from pipeline.capture.messages import Message
from pipeline.capture.records import decode, encode
from pipeline.capture.recovery import Recovery
from pipeline.capture.rules import Kind, Rules
from pipeline.capture.session import Session
from pipeline.capture.tree import Node, SampledTurn
from pipeline.engines.base import Routing
from schemas.config import Behaviour
from schemas.payload import ImageItem
from tests.capture_parts import ScriptedEngine, complete

ROOT = Path(__file__).parents[2]
CALL = '<tool_call>{"name": "t", "arguments": {}}</tool_call>'


def answer(number: int = 1, finish: str = "stop", malformed: int = 0) -> Answer:
    return Answer(number, "a", (), finish, malformed, 1, 1)  # pyright: ignore[reportArgumentType]  # one of Finish


def ids(count: int, start: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.arange(start, start + count, dtype=np.int32)


def turn(count: int, candidates: bool, routed: bool) -> SampledTurn:
    rows = np.arange(count * 6, dtype=np.uint16).reshape(count, 3, 2)
    return SampledTurn(
        ids(2),
        ids(count, 7),
        -np.arange(count, dtype=np.float32),
        ids(count, 3),
        ids(1),
        tuple(tuple(range(i % 3)) for i in range(count)) if candidates else (),
        Routing(5, rows) if routed else None,
    )


def same(a: Node, b: Node) -> bool:
    one, two = a.turn, b.turn
    if (a.number, a.role, a.kind, a.images) != (
        b.number,
        b.role,
        b.kind,
        b.images,
    ) or a.ids.tolist() != b.ids.tolist():
        return False
    if one is None or two is None:
        return one is two
    arrays = ("lead", "ids", "logprobs", "versions", "tail")
    equal = all(getattr(one, n).tolist() == getattr(two, n).tolist() for n in arrays)
    routing = one.routing and (one.routing.start, one.routing.rows.tolist(), one.routing.rows.dtype)
    other = two.routing and (two.routing.start, two.routing.rows.tolist(), two.routing.rows.dtype)
    return equal and one.candidates == two.candidates and routing == other


@given(st.integers(1, 5), st.booleans(), st.booleans(), st.sampled_from([None, "title"]), st.data())
def test_what_is_decoded_is_what_was_encoded_up_to_the_damage(
    count: int, candidates: bool, routed: bool, label: str | None, data: st.DataObject
) -> None:
    root = Node(0, None, 4, ids(0))
    image = ImageItem(digest="a" * 64, bytes=9, height=5, width=7, patches=8, start=1, end=3)
    prompt = Node(1, root, 1, ids(4), images=(image,))
    sampled = Node(2, prompt, 2, ids(count, 7), turn(count, candidates, routed), Kind("sub", label))
    whole = encode("s", [prompt, sampled], answer(malformed=2)) + encode("t", [sampled], answer(3, "length"))
    first, second = decode(whole)
    assert all(map(same, (*first.nodes, *second.nodes), (prompt, sampled, sampled)))
    assert (first.session, first.parents, first.finish, first.malformed) == ("s", (0, 1), "stop", 2)
    assert (second.session, second.parents, second.finish) == ("t", (1,), "length")
    assert first.main is False, "a subagent's"
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert len(list(decode(whole[:cut]))) == (cut >= len(encode("s", [prompt, sampled], answer(malformed=2))))
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(8, len(whole) - 1))] ^= 1
    assert len(list(decode(bytes(damaged)))) < 2


def session(journal: HostJournal, name: str = "s1") -> tuple[Session, ScriptedEngine]:
    engine = ScriptedEngine(lambda _: "a")
    return Session(name, Behaviour(), 1000, engine.renderer, engine, journal=journal), engine


def die(journal: HostJournal) -> None:
    """As SIGKILL does: the lock goes, the files stay."""
    os.close(journal._lock)


async def test_a_session_comes_back_as_it_was(tmp_path: Path) -> None:
    journal = HostJournal(tmp_path, "h1")
    tenant, _ = session(journal)
    question = Message("user", "q")
    first = await complete(tenant, "1", Dialogue((question,)))
    history = (question, Message("assistant", first.content), Message("user", "more"))
    await complete(tenant, "2", Dialogue(history))
    await complete(tenant, "3", Dialogue((*history[:2], Message("user", "other"))))
    recovery = Recovery(tmp_path)
    assert recovery.session("h1", "s1") is None, "it lives"
    die(journal)
    found = recovery.session("h1", "s1")
    assert found is not None
    assert (found.turns, found.finish) == (3, "stop")
    before, after = tenant.export(), export(found.tree)
    assert after.contexts == before.contexts
    for name, column in before.columns.items():
        assert after.columns[name].dtype == column.dtype
        assert after.columns[name].tolist() == column.tolist()
    assert recovery.session("h1", "another") is None
    assert recovery.session("h2", "s1") is None
    recovery.forget("h1", "s1")
    assert not (tmp_path / "h1").exists()


@pytest.mark.parametrize("subagent", [False, True])
async def test_how_it_ended_is_how_the_main_agent_ended(tmp_path: Path, subagent: bool) -> None:
    journal = HostJournal(tmp_path, "h1")
    engine = ScriptedEngine(lambda prompt: "a" if "sub" in prompt else CALL)
    rules = Rules(agent_header="x-agent")
    tenant = Session("s1", Behaviour(), 1000, engine.renderer, engine, rules=rules, journal=journal)
    await complete(tenant, "1", Dialogue((Message("user", "q"),)))
    if subagent:
        call = Call("2", Dialogue((Message("user", "sub"),)), "policy")
        assert (await tenant.answer(call, {"x-agent": "one"}).whole()).finish == "stop"
    assert tenant.last is not None
    assert tenant.last.finish == "tool_calls"
    die(journal)
    found = Recovery(tmp_path).session("h1", "s1")
    assert found is not None
    assert (found.turns, found.finish) == (1 + subagent, "tool_calls")


@pytest.mark.parametrize("damage", ["cut", "flipped"])
async def test_a_damaged_journal_gives_what_was_before_and_is_no_agents_whole_work(
    tmp_path: Path, damage: str
) -> None:
    journal = HostJournal(tmp_path, "h1")
    tenant, _ = session(journal)
    for number in range(2):
        await complete(tenant, str(number), Dialogue((Message("user", f"q{number}"),)))
    die(journal)
    (path,) = (tmp_path / "h1").glob("*.wal")
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
    path.write_bytes(data if damage == "flipped" else data[:-1])
    found = Recovery(tmp_path).session("h1", "s1")
    assert found is not None
    assert (found.turns, found.whole) == (1, False)


async def test_a_session_with_a_segment_missing_is_not_whole(tmp_path: Path) -> None:
    journal = HostJournal(tmp_path, "h1", segment_bytes=1)
    tenant, _ = session(journal)
    for number in range(3):
        await complete(tenant, str(number), Dialogue((Message("user", f"q{number}"),)))
    die(journal)
    sorted((tmp_path / "h1").glob("*.wal"))[1].unlink()
    found = Recovery(tmp_path).session("h1", "s1")
    assert found is not None
    assert (found.turns, found.whole) == (1, False)


async def test_several_hosts_share_what_a_dead_one_left_and_the_last_puts_it_away(tmp_path: Path) -> None:
    journal = HostJournal(tmp_path, "h1", segment_bytes=2000)
    for i in range(6):
        tenant, _ = session(journal, f"s{i}")
        await complete(tenant, "1", Dialogue((Message("user", "q"),)))
    journal.forget("s0")
    die(journal)
    hosts = [Recovery(tmp_path) for _ in range(2)]
    assert all(host.session("h1", "s1") for host in hosts)
    assert [host.session("h1", "s0") for host in hosts] == [None, None], "it was decided before its host died"
    for i in range(1, 6):
        assert (tmp_path / "h1").exists()
        hosts[i % 2].forget("h1", f"s{i}")
        assert all(host.session("h1", f"s{i}") is None for host in (*hosts, Recovery(tmp_path)))
    assert not (tmp_path / "h1").exists()


async def test_the_disk_holds_what_is_under_way(tmp_path: Path) -> None:
    journal = HostJournal(tmp_path, "h1", segment_bytes=1)
    tenants = [session(journal, f"s{i}")[0] for i in range(3)]
    for tenant in tenants:
        for number in range(2):
            await complete(tenant, str(number), Dialogue((Message("user", f"q{number}"),)))
    files = lambda: sorted(path.name for path in (tmp_path / "h1").glob("*.wal"))  # noqa: E731  # asked thrice
    assert len(files()) == 6
    journal.forget("s1")
    assert len(files()) == 4
    journal.forget("s0")
    journal.forget("s2")
    assert len(files()) <= 1
    assert all((tmp_path / "h1" / name).stat().st_size == 0 for name in files())
    journal.close()
    assert not (tmp_path / "h1").exists()


async def test_a_session_that_is_needed_stays_when_its_host_stops(tmp_path: Path) -> None:
    journal = HostJournal(tmp_path, "h1")
    tenant, _ = session(journal)
    await complete(tenant, "1", Dialogue((Message("user", "q"),)))
    journal.close()
    assert Recovery(tmp_path).session("h1", "s1") is not None


async def test_a_full_disk_costs_the_protection_and_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = HostJournal(tmp_path, "h1")
    tenant, _ = session(journal)
    await complete(tenant, "1", Dialogue((Message("user", "q"),)))
    write = os.write

    def full(file: int, data: bytes) -> int:
        write(file, bytes(data)[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journals.os, "write", full)
    assert (await complete(tenant, "2", Dialogue((Message("user", "r"),)))).content == "a"
    monkeypatch.undo()
    await complete(tenant, "3", Dialogue((Message("user", "s"),)))
    assert journal.lost == 1
    assert "No space left on device" in caplog.text
    other, _ = session(journal, "s2")
    await complete(other, "1", Dialogue((Message("user", "q"),)))
    die(journal)
    recovery = Recovery(tmp_path)
    assert recovery.session("h1", "s1") is None, "a turn of it is missing"
    assert recovery.session("h1", "s2") is not None


async def test_what_was_written_is_committed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[int] = []
    sync = os.fdatasync
    monkeypatch.setattr(journals.os, "fdatasync", lambda file: (commits.append(file), sync(file)))
    journal = HostJournal(tmp_path, "h1")
    tenant, _ = session(journal)
    committing = asyncio.create_task(journal.commit())
    await asyncio.gather(*(complete(tenant, q, Dialogue((Message("user", q),))) for q in "abcd"))
    async with asyncio.timeout(10):
        while journal.lag:
            await asyncio.sleep(0.001)
    assert 1 <= len(commits) <= 4
    committing.cancel()


async def test_a_segment_that_is_full_is_committed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    sync = os.fdatasync
    monkeypatch.setattr(
        journals.os, "fdatasync", lambda file: (sync(file), synced.add(os.fstat(file).st_ino))
    )
    journal = HostJournal(tmp_path, "h1", segment_bytes=1)
    tenant, _ = session(journal)
    for number in range(3):
        await complete(tenant, str(number), Dialogue((Message("user", f"q{number}"),)))
    assert journal.lag == 3
    committing = asyncio.create_task(journal.commit())
    async with asyncio.timeout(10):
        while journal.lag:
            await asyncio.sleep(0.001)
    assert synced == {path.stat().st_ino for path in (tmp_path / "h1").glob("*.wal")}
    assert journal.lag == 0
    committing.cancel()


def test_a_host_that_is_killed_leaves_every_turn_that_it_answered(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import asyncio, os, signal, sys
        from pipeline.capture.dialogue import Dialogue
        from pipeline.capture.journal import HostJournal
        from pipeline.capture.messages import Message
        from tests.capture_parts import complete
        from tests.unit.test_capture_journal import session

        async def main():
            tenant, _ = session(HostJournal(sys.argv[1], "h1"))
            for number in range(3):
                await complete(tenant, str(number), Dialogue((Message("user", f"q{number}"),)))
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, timeout=60)
    assert done.returncode == -9
    found = Recovery(tmp_path).session("h1", "s1")
    assert found is not None
    assert found.turns == 3


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_rubbish_is_no_journal(data: bytes) -> None:
    assert list(decode(data)) == []
