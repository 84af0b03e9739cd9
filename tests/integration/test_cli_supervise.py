"""The supervisor with real processes: restarts, gangs, giving up, and nothing that outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.cli import supervise
from services.cli.supervise import LIMIT, Deaths, GaveUp, Member, Supervisor, Unit, last_line

DEADLINE_S = 20.0


async def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {DEADLINE_S} s: {what}")
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def script(tmp_path: Path, name: str, body: str) -> Member:
    path = tmp_path / f"{name}.py"
    path.write_text(textwrap.dedent(body))
    return Member(name, (sys.executable, "-S", str(path)), tmp_path / f"{name}.log")


def log_of(member: Member) -> Path:
    assert member.log is not None
    return member.log


def said(member: Member) -> str:
    return last_line(log_of(member))


SLEEPS = "import time\nprint('up', flush=True)\ntime.sleep(600)"


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    await supervisor.stop(grace_s=1.0)
    if supervisor.gave_up.done():
        supervisor.gave_up.exception()


async def test_a_killed_process_is_started_again_and_its_death_is_told(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    supervisor.keep(Unit("one", (script(tmp_path, "one", SLEEPS),)))
    await until(lambda: supervisor.pids().get("one"), "a first process")
    first = supervisor.pids()["one"]
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.pids().get("one", first) != first, "a second process")
    assert not alive(first)
    assert supervisor.restarts == {"one": 1}
    assert supervisor.causes["one"] == "one ended with signal SIGKILL"


async def test_a_gang_dies_and_starts_as_one(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.keep(Unit("gang", tuple(script(tmp_path, f"rank-{i}", SLEEPS) for i in range(3))))
    await until(lambda: len(supervisor.pids()) == 3, "three ranks")
    first = supervisor.pids()
    os.kill(first["rank-1"], signal.SIGKILL)
    await until(
        lambda: len(supervisor.pids()) == 3 and not set(first.values()) & set(supervisor.pids().values()),
        "new ranks",
    )
    assert not any(alive(pid) for pid in first.values())
    assert supervisor.restarts == {"gang": 1}


async def test_a_unit_that_keeps_dying_is_given_up_with_its_last_words_and_log(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    member = script(tmp_path, "bad", "import sys\nsys.exit('the disk is full')")
    supervisor.keep(Unit("bad", (member,)))
    with pytest.raises(GaveUp) as caught:
        await asyncio.wait_for(asyncio.shield(supervisor.gave_up), DEADLINE_S)
    assert str(caught.value) == (
        f"bad died {LIMIT} times within 30 s; bad ended with exit status 1: the disk is full; see {member.log}"
    )
    assert supervisor.pids() == {}


async def test_a_program_that_cannot_be_started_is_given_up_at_once(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    supervisor.keep(Unit("none", (Member("none", (str(tmp_path / "absent"),), tmp_path / "none.log"),)))
    with pytest.raises(GaveUp, match="No such file"):
        await asyncio.wait_for(asyncio.shield(supervisor.gave_up), DEADLINE_S)


async def test_a_unit_that_is_kept_no_more_is_given_up_whatever_the_reason(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(member: Member) -> None:
        raise subprocess.SubprocessError("Exception occurred in preexec_fn.")

    monkeypatch.setattr(supervise, "_Child", fails)
    supervisor.keep(Unit("worker", (Member("worker", (sys.executable, "-c", ""), tmp_path / "log"),)))
    with pytest.raises(GaveUp, match="worker: Exception occurred in preexec_fn"):
        await asyncio.wait_for(asyncio.shield(supervisor.gave_up), DEADLINE_S)


async def test_stop_asks_first_and_then_kills_also_what_a_child_started(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    polite = script(
        tmp_path, "polite",
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("bye", flush=True), sys.exit(0)))
        print("up", flush=True)
        time.sleep(600)
        """,
    )  # fmt: skip
    stubborn = script(
        tmp_path, "stubborn",
        """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        time.sleep(600)
        """,
    )  # fmt: skip
    for member in (polite, stubborn):
        supervisor.keep(Unit(member.name, (member,)))
    await until(lambda: said(polite) and said(stubborn), "both are up")
    grandchild = int(said(stubborn))
    pids = [*supervisor.pids().values(), grandchild]
    await supervisor.stop(grace_s=0.5)
    assert said(polite) == "bye"
    await until(lambda: not any(alive(pid) for pid in pids), "nothing is left")
    assert supervisor.restarts == {}


async def test_what_a_dead_process_leaves_in_its_group_is_killed(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    member = script(
        tmp_path,
        "parent",
        """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        time.sleep(600)
        """,
    )
    supervisor.keep(Unit("parent", (member,)))
    await until(lambda: said(member), "it has a child")
    child = int(said(member))
    os.kill(supervisor.pids()["parent"], signal.SIGKILL)
    await until(lambda: not alive(child), "its child is gone")


async def test_a_process_that_ends_well_at_the_end_of_the_run_is_not_started_again(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    member = script(
        tmp_path, "done", "import sys\nsys.stdin.read()"
    )  # stdin is /dev/null: ends with status 0
    supervisor.ending.set()
    supervisor.keep(Unit("done", (member,)))
    await until(lambda: log_of(member).exists() and not supervisor.pids(), "it ended")
    await supervisor.stop()
    assert supervisor.restarts == {}


async def test_a_gang_that_ends_is_over_when_all_have_ended_well_and_not_before(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_QUIET_EXIT_S", 0.1)
    waits = """
        import sys, time
        from pathlib import Path
        while not Path(__file__).with_name({!r}).exists():
            time.sleep(0.02)
        print("over", flush=True)
        """
    members = tuple(script(tmp_path, f"rank-{i}", waits.format(f"end-{i}")) for i in range(2))
    keeper = supervisor.keep(Unit("gang", members, ends=True))
    (tmp_path / "end-0").touch()
    await until(lambda: supervisor.restarts["gang"] == 1, "one that ends alone is missed by the others")
    assert supervisor.causes["gang"] == "rank-0 ended with exit status 0"
    (tmp_path / "end-1").touch()
    await asyncio.wait_for(keeper, DEADLINE_S)
    assert [said(member) for member in members] == ["over", "over"]
    assert not supervisor.gave_up.done()
    assert supervisor.pids() == {}


async def test_a_process_that_somebody_stopped_in_mid_run_is_started_again(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_QUIET_EXIT_S", 0.2)
    member = script(
        tmp_path,
        "told",
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\nprint('up', flush=True)\ntime.sleep(600)",
    )
    supervisor.keep(Unit("told", (member,)))
    for restart in range(1, LIMIT + 2):  # it ends well, so it is never given up
        await until(lambda: said(member) == "up", "it is up")
        log_of(member).write_text("")
        os.kill(supervisor.pids()["told"], signal.SIGTERM)
        await until(lambda restart=restart: supervisor.restarts["told"] == restart, f"restart {restart}")
    assert supervisor.causes["told"] == "told ended with exit status 0"


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys
            from pathlib import Path
            from services.cli.supervise import Member, Supervisor, Unit

            async def main():
                supervisor = Supervisor()
                argv = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
                supervisor.keep(Unit("s", tuple(Member(f"s{{i}}", argv, Path({str(tmp_path)!r}) / f"s{{i}}.log") for i in range(2))))
                await asyncio.sleep(0)
                print(*supervisor.pids().values(), flush=True)
                await asyncio.sleep(600)

            asyncio.run(main())
            """
        )
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, str(launcher)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        process.kill()
    deadline = time.monotonic() + DEADLINE_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)


def test_deaths_far_apart_never_add_up_and_close_ones_back_off() -> None:
    deaths = Deaths(limit=3, window_s=30)
    assert all(deaths.died(now) is not None for now in (0.0, 20.0, 40.0, 60.0))
    deaths = Deaths(limit=4, window_s=30)
    assert [deaths.died(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.1, 0.2, 0.4, None]
