"""A whole run whose every process is a user of its own, over TLS: what each may do is enough for its work."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import dumps
from pipeline.hosts.report import reports
from pipeline.log import Log
from pipeline.log.permissions import work_of
from schemas.config import RunConfig
from schemas.envelope import Event
from schemas.facts import RunStopped
from tests.natsserver import free_port
from tests.secured import SecuredBroker
from tests.signal_example import example

pytestmark = pytest.mark.timeout(240)
RUN = "signal"
DEADLINE_S = 180
PLACES = (
    ("engine",),
    ("dispatcher",),
    ("agent-loop", "--index", "0"),
    ("harness", "--pool", "chat", "--index", "0"),
    ("harness", "--pool", "tool", "--index", "0"),
    ("grader",),
    ("teacher",),
    ("sampler",),
    ("hook",),
    ("packer", "--index", "0"),
    ("trainer",),
    ("collector",),
    ("dashboard", "--metrics-bind", f"127.0.0.1:{free_port()}"),
)


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[SecuredBroker]:
    config = configured(tmp_path)
    broker = SecuredBroker(tmp_path / "nats", (RUN,), work=work_of(config))
    broker.start()
    yield broker
    broker.stop()


def configured(directory: Path) -> RunConfig:
    """The example of signals, with grader, teacher and hooks, one step, a rank, and what its collector removes."""

    def change(run: dict[str, Any]) -> None:
        for source in run.values():
            if isinstance(source, dict):
                source["groups"] = 1

    key = directory / "run-key"
    key.write_text("k" * 64)
    raw = tomllib.loads(example(1, change))
    return RunConfig.model_validate(
        {
            **raw,
            "run": RUN,
            "directory": str(directory),
            "store": {"url": f"file://{directory / 'store'}"},
            "engine": raw["engine"] | {"url": f"http://127.0.0.1:{free_port()}"},
            "batch": raw["batch"] | {"dp": 1},
            "retention": {"rejected_steps": 1},
            "agent_loop": {"run_key_file": str(key), "journal_dir": str(directory / "journal")},
            "packer": {"socket_dir": str(directory / "packers")},
        }
    )


@contextmanager
def services(config: RunConfig, secured: SecuredBroker, directory: Path) -> Iterator[dict[str, Path]]:
    """A process for each place, with its user's key alone; what each says."""
    said: dict[str, Path] = {}
    with ExitStack() as held:
        for name, *more in PLACES:
            file = directory / f"{name}.toml"
            file.write_text(dumps(config.model_copy(update={"broker": secured.user(name)})))
            said[" ".join((name, *more))] = output = directory / f"{'-'.join((name, *more))}.log"
            argv = [sys.executable, "-P", "-m", "services.cli.main", "service", name, "--config", str(file)]
            process = subprocess.Popen([*argv, *more], stderr=held.enter_context(output.open("wb")))
            held.callback(lambda process=process: (process.kill(), process.wait()))
        yield said


async def test_a_run_needs_no_more_than_its_users_may(secured: SecuredBroker, tmp_path: Path) -> None:
    config = configured(tmp_path)
    launcher = secured.user("launcher")
    file = tmp_path / "launcher.toml"
    file.write_text(dumps(config.model_copy(update={"broker": launcher})))
    begin = [sys.executable, "-P", "-m", "services.cli.main", "runs", "begin", "--config", str(file)]
    with services(config, secured, tmp_path) as said:
        await asyncio.to_thread(subprocess.run, begin, check=True)
        log = await Log.connect(secured.user("reader"), RUN, "test", user="reader")
        try:
            async with asyncio.timeout(DEADLINE_S):
                events = await whole(log)
                [host, *_], damaged = await reports(log)
        except TimeoutError:
            raise AssertionError(
                {name: output.read_text()[-2000:] for name, output in said.items()}
            ) from None
        finally:
            await log.close()
    assert (host.service, damaged) == ("agent-loop", 0)
    producers = {event.producer.partition("-")[0] for event in events}
    wanted = {
        "launcher",
        "dispatcher",
        "agent",
        "harness",
        "grader",
        "teacher",
        "sampler",
        "hook",
        "packer",
        "trainer",
    }
    assert producers == wanted
    denied = {n: output.read_text() for n, output in said.items() if "violation" in output.read_text()}
    assert not denied


async def whole(log: Log) -> list[Event]:
    events: list[Event] = []
    async for event in log.subscribe():
        events.append(event)
        if isinstance(event.fact, RunStopped):
            break
    return events
