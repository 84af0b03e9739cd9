"""Which run a command means: new, resumed, or refused; two runs are never mixed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from pipeline.config import Override, dumps, load
from schemas.config import Broker, RunConfig
from schemas.facts import RunStopped
from services.cli import launch, run_control
from services.cli.embedded import (
    BadInput,
    LaunchError,
    free_port,
    is_embedded,
    port_problem,
    secret_file,
    socket_directory,
    write_private,
)
from services.cli.launcher import Launcher
from services.cli.reach import read_record
from services.cli.runs import Choice, Known, choose, longest_drain, store_url, unit_arguments
from services.cli.service import check_place, label
from services.process import SERVICES

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
CONFIG = load(DEMO)
UNFINISHED = Known(CONFIG.decisions(), stopped=False)
DONE = Known(CONFIG.decisions(), stopped=True)


def record(directory: Path, run: str, config: RunConfig = CONFIG) -> Path:
    """A run's record as the launcher leaves it: with its store, and a broker that is the embedded one unless given."""
    home = directory / "runs" / run
    home.mkdir(parents=True)
    store = config.store.model_copy(update={"url": store_url(config, directory)})
    embedded = Broker(url="nats://127.0.0.1:1", token_file=str(directory / "secrets" / "broker-token"))
    update = {
        "store": store,
        "broker": config.broker if config.broker.url else embedded,
        "directory": str(directory),
    }
    (home / "config.toml").write_text(dumps(config.model_copy(update=update)))
    return directory


async def chosen(
    directory: Path, known: dict[str, Known], config: RunConfig = CONFIG, fresh: bool = False
) -> Choice:
    async def look(name: str) -> Known | None:
        return known.get(name)

    return await choose(config, fresh, look, directory)


async def test_a_name_that_nobody_has_is_started(tmp_path: Path) -> None:
    assert await chosen(tmp_path, {}) == Choice("demo", resumed=False)


async def test_an_unfinished_run_with_the_same_settings_goes_on_and_says_so(tmp_path: Path) -> None:
    choice = await chosen(record(tmp_path, "demo"), {"demo": UNFINISHED})
    assert (choice.run, choice.resumed) == ("demo", True)
    assert "goes on" in choice.note


async def test_decisions_that_went_through_json_are_the_same_decisions(tmp_path: Path) -> None:
    known = Known(json.loads(json.dumps(CONFIG.decisions())), stopped=False)
    assert (await chosen(record(tmp_path, "demo"), {"demo": known})).resumed


async def test_an_unfinished_run_of_an_older_release_goes_on_where_what_is_new_is_left_out(
    tmp_path: Path,
) -> None:
    """Its run.started lacks the keys that came later, and names its grader as a text."""
    older = json.loads(json.dumps(CONFIG.decisions()))
    del older["mixer"]
    for source in older["sources"]:
        del source["hooks"], source["tasks"], source["accept"]["inclusive"]
        source["grader"] = source["grader"]["kind"]
    assert (await chosen(record(tmp_path, "demo"), {"demo": Known(older, stopped=False)})).resumed
    older["batch"]["ahead"] += 1
    with pytest.raises(LaunchError, match=r"other settings \(batch\)"):
        await chosen(tmp_path, {"demo": Known(older, stopped=False)})
    # What no release of ours would start is another setting, not a traceback.
    older["batch"] = {"nonsense": 1}
    with pytest.raises(LaunchError, match=r"other settings \(batch"):
        await chosen(tmp_path, {"demo": Known(older, stopped=False)})


async def test_after_a_complete_run_the_next_name_is_taken(tmp_path: Path) -> None:
    choice = await chosen(tmp_path, {"demo": DONE, "demo-2": DONE})
    assert (choice.run, choice.resumed) == ("demo-3", False)
    assert "demo-2 is complete" in choice.note


async def test_fresh_leaves_the_unfinished_run_and_the_newest_decides_from_then_on(tmp_path: Path) -> None:
    known = {"demo": UNFINISHED}
    assert (await chosen(record(tmp_path, "demo"), known, fresh=True)).run == "demo-2"
    known["demo-2"] = UNFINISHED
    choice = await chosen(record(tmp_path, "demo-2"), known)
    assert (choice.run, choice.resumed) == ("demo-2", True)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (Override("", ("steps",), 9), "steps"),
        (Override("", ("batch", "token_budget"), 8192), "batch"),
        (Override("", ("engine", "policy"), "smollm2"), "engine.policy"),
        (Override("", ("store", "url"), "s3://other/place"), "store.url"),
    ],
)
async def test_an_unfinished_run_with_other_settings_is_refused_by_name(
    tmp_path: Path, override: Override, named: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        await chosen(record(tmp_path, "demo"), {"demo": UNFINISHED}, load(DEMO, [override]))
    assert f"run demo is unfinished and was started with other settings ({named})" in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert "--run" in str(caught.value)


async def test_a_run_that_had_a_store_does_not_go_on_with_files(tmp_path: Path) -> None:
    given = load(DEMO, [Override("", ("store", "url"), "s3://bucket/place")])
    directory = record(tmp_path, "demo", given)
    with pytest.raises(LaunchError, match=r"with other settings \(store\.url\)"):
        await chosen(directory, {"demo": UNFINISHED})
    assert (await chosen(directory, {"demo": UNFINISHED}, given)).resumed


async def test_a_run_goes_on_in_the_directory_that_it_was_moved_to(tmp_path: Path) -> None:
    moved = record(tmp_path / "before", "demo").rename(tmp_path / "after")
    assert (await chosen(moved, {"demo": UNFINISHED})).resumed


def test_a_record_has_the_paths_of_where_it_lies(tmp_path: Path) -> None:
    file = Path("runs/demo/config.toml")
    given = load(DEMO, [Override("", ("packer", "socket_dir"), "/elsewhere/sockets")])
    before = record(tmp_path / "before", "demo", given)
    assert read_record(before / file) == load(before / file)
    after = before.rename(tmp_path / "after")
    found = read_record(after / file)
    assert is_embedded(found)
    assert found.directory == str(after)
    assert found.broker.token_file == str(after / "secrets" / "broker-token")
    assert found.store.url == (after / "objects").as_uri()
    assert found.packer.socket_dir == "/elsewhere/sockets"
    copy = tmp_path / "config.toml"  # no record: it is where nobody's directory is
    copy.write_bytes((after / file).read_bytes())
    assert read_record(copy) == load(copy)


async def test_a_record_of_another_broker_is_not_overwritten(tmp_path: Path) -> None:
    given = load(DEMO, [Override("", ("broker", "url"), "nats://10.0.0.5:4222")])
    directory = record(tmp_path, "demo", given)
    with pytest.raises(LaunchError, match=r"has run demo of broker nats://10\.0\.0\.5:4222; .*--run"):
        await chosen(directory, {})
    assert await chosen(directory, {}, given) == Choice("demo", resumed=False)
    other = record(tmp_path / "other", "demo-2")
    with pytest.raises(LaunchError, match="has run demo-2 of the embedded broker"):
        await chosen(other, {"demo": DONE}, given)
    assert (await chosen(other, {"demo": DONE})).run == "demo-2"


async def test_a_run_of_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="was not started from"):
        await chosen(tmp_path, {"demo": UNFINISHED})


async def test_settings_that_decide_nothing_may_change(tmp_path: Path) -> None:
    config = load(DEMO, [Override("", ("agent_loop", "hosts"), 2)])
    assert (await chosen(record(tmp_path, "demo"), {"demo": UNFINISHED}, config)).resumed


async def test_hosts_that_were_shared_out_stay_so(tmp_path: Path) -> None:
    def budget(hosts: int, share: float = 1.0) -> RunConfig:
        pools = (CONFIG.pools[0], CONFIG.pools[1].model_copy(update={"share": share}))
        return CONFIG.model_copy(update={"host_budget": hosts, "pools": pools})

    directory = record(tmp_path, "demo", budget(4))
    assert (await chosen(directory, {"demo": UNFINISHED}, budget(4))).resumed
    for other in (budget(6), budget(4, share=3.0), CONFIG):
        with pytest.raises(LaunchError, match=r"with other settings \(host_budget\)"):
            await chosen(directory, {"demo": UNFINISHED}, other)
    units = dict(unit_arguments(budget(6, share=3.0)))
    assert [name for name in units if name.startswith("harness")] == [
        "harness-chat-0", "harness-chat-1", *(f"harness-tool-{i}" for i in range(4)),
    ]  # fmt: skip
    check_place(budget(6, share=3.0), "harness", 3, "tool")
    with pytest.raises(BadInput, match="pool tool has hosts = 4; use 0 to 3"):
        check_place(budget(6, share=3.0), "harness", 4, "tool")


def test_every_service_gets_its_processes_and_the_ranks_are_one_unit() -> None:
    units = dict(unit_arguments(load(DEMO, [Override("", ("agent_loop", "hosts"), 2)])))
    members = [name for unit in units.values() for name, _ in unit]
    assert sorted(members) == sorted(
        ["sampler", "dispatcher", "grader", "agent-loop-0", "agent-loop-1", "harness-chat-0", "harness-tool-0",
         "packer-0", "packer-1", "trainer-0", "trainer-1"]
    )  # fmt: skip
    assert [name for name, _ in units["trainer"]] == ["trainer-0", "trainer-1"]
    assert {arguments[0] for unit in units.values() for _, arguments in unit} == set(SERVICES) - {
        "engine", "hook", "teacher", "collector", "dashboard",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "index", "pool", "said"),
    [
        ("packer", 2, "", r"batch\.dp \* cp \* pp = 2; use 0 to 1"),
        ("trainer", 2, "", r"batch\.dp \* cp \* tp \* pp = 2; use 0 to 1"),
        ("sampler", 1, "", "there is one"),
        ("harness", 0, "", r"needs --pool, one of \['chat', 'tool'\]"),
        ("harness", 1, "tool", "pool tool has hosts = 1"),
        ("sampler", 0, "tool", "for service harness only"),
    ],
)
def test_a_place_that_the_run_does_not_have_is_refused(name: str, index: int, pool: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_place(CONFIG, name, index, pool)


def test_packers_are_of_coordinates_and_an_external_trainer_has_no_processes_of_ours() -> None:
    wide = [Override("", ("batch", name), 2) for name in ("cp", "tp", "pp")]
    config = load(DEMO, [*wide, Override("", ("trainer", "kind"), "external")])
    units = dict(unit_arguments(config))
    assert [name for name in units if name.startswith("packer")] == [f"packer-{n}" for n in range(8)]
    assert "trainer" not in units
    check_place(config, "packer", 7, "")
    with pytest.raises(BadInput, match=r"cp \* pp = 8; use 0 to 7"):
        check_place(config, "packer", 8, "")
    with pytest.raises(BadInput, match=r"trainer\.kind is external"):
        check_place(config, "trainer", 0, "")
    one_stage = load(DEMO, wide[:2])
    assert len(dict(unit_arguments(one_stage))["trainer"]) == 8


def test_processes_are_named_by_what_they_are() -> None:
    names = [label("sampler", 0, ""), label("trainer", 1, ""), label("harness", 0, "tool")]
    assert names == ["sampler", "trainer-1", "harness-tool-0"]


def test_secrets_are_private_from_their_first_byte_and_stay_the_same(tmp_path: Path) -> None:
    path = secret_file(tmp_path / "secrets" / "key")
    text = path.read_text()
    assert len(text) == 64
    assert secret_file(path).read_text() == text
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    assert write_private(path, "other").stat().st_mode & 0o777 == 0o600


def test_a_free_port_is_below_those_of_outgoing_connections() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port() for _ in range(20)}
    assert all(10_000 <= port < lowest for port in ports)
    assert all(port_problem("127.0.0.1", port) is None for port in ports)


def test_sockets_move_when_their_directory_is_too_long_for_an_address(tmp_path: Path) -> None:
    short, long = tmp_path / "s", tmp_path / ("x" * 100)
    assert socket_directory(long, short) == short
    assert socket_directory(Path("/tmp") / short.relative_to("/tmp").parts[0], short).is_dir()
    assert short.stat().st_mode & 0o777 == 0o700


def draining() -> RunConfig:
    """The demo, of whose two pools one drains for a minute, and the agent-loop hosts for half a minute."""
    pools = (CONFIG.pools[0], CONFIG.pools[1].model_copy(update={"drain_s": 60.0}))
    loop = CONFIG.agent_loop.model_copy(update={"drain_s": 30.0})
    return CONFIG.model_copy(update={"pools": pools, "agent_loop": loop})


class Stopped:
    """Stands for the supervisor: what was stopped, and how long each might take."""

    def __init__(self) -> None:
        self.told: list[tuple[list[str], float]] = []

    def units(self) -> list[str]:
        return ["broker", "engine", "agent-loop-0", "harness-chat-0"]

    async def stop(self, names: Sequence[str], grace_s: float) -> None:
        self.told.append((list(names), grace_s))


HOSTS = ["agent-loop-0", "harness-chat-0"]


@pytest.mark.parametrize(
    ("config", "over", "told"),
    [
        (CONFIG, False, [(["engine", *HOSTS], 10.0), (["engine"], 10.0)]),
        (draining(), False, [(HOSTS, 70.0), (["engine"], 10.0)]),
        (draining(), True, [(["engine", *HOSTS], 10.0), (["engine"], 10.0)]),
    ],
    ids=["without a drain", "with one", "a run that is over"],
)
async def test_the_engine_outlives_the_hosts_that_drain(
    config: RunConfig, over: bool, told: list[tuple[list[str], float]], tmp_path: Path
) -> None:
    """Their tenants end with its answers, and whoever stops them waits for as long as they may take."""
    launched = launch._Launch(config, launch.Options(), tmp_path, Console())
    launched.actors = None
    launched.view.stopped = RunStopped(run="demo", reason="completed", steps=1) if over else None
    stopped = Stopped()
    launched.supervisor = cast(Any, stopped)
    await launched._stop_services()
    assert stopped.told == told


def test_whoever_asks_a_launcher_to_stop_waits_for_the_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, "demo", draining())
    waited: list[float] = []

    def stop(directory: Path, running: Launcher, timeout_s: float) -> None:
        waited.append(timeout_s)

    async def ending(directory: Path, run: str) -> None:
        return None

    monkeypatch.setattr("services.cli.launcher.find_launcher", lambda _: Launcher(1, "demo"))
    monkeypatch.setattr("services.cli.launcher.stop", stop)
    monkeypatch.setattr(run_control, "_ending", ending)
    run_control.stop(tmp_path, "demo", lambda _: None)
    assert waited == [run_control.STOP_S + longest_drain(draining())] == [120.0]
