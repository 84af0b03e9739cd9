"""`packtrain events`, `payload` and `config` on a real log and real objects, as a person types them."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.config import dumps, load
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import write_payload
from schemas.config import Broker, RunConfig
from schemas.config import Store as StoreConfig
from schemas.facts import (
    Failure,
    RunStarted,
    RunStopped,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
)
from schemas.payload import PayloadHeader
from services.cli.embedded import broker_member, free_port
from services.cli.main import app
from services.cli.policy import policy_directory
from services.cli.supervise import Supervisor, Unit
from tests import commands
from tests.commands import PACKTRAIN

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


def packtrain(*arguments: str, status: int = 0, fresh: bool = False) -> str:
    """What the command printed; stderr when it has to fail."""
    done = commands.packtrain(*arguments, fresh=fresh)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def recorded(directory: Path, run: str, broker: Broker) -> RunConfig:
    """Leaves a run's record as the launcher does."""
    store = StoreConfig(url=(directory / "objects").as_uri())
    config = load(DEMO).model_copy(
        update={"run": run, "directory": str(directory), "broker": broker, "store": store}
    )
    home = directory / "runs" / run
    home.mkdir(parents=True)
    (home / "config.toml").write_text(dumps(config))
    return config


async def fill(log: Log) -> None:
    await log.publish(RunStarted(run=log.run, config=load(DEMO).decisions()))
    for source in ("arithmetic", "calculator"):
        for member in range(2):
            sample = f"{source}-000000"
            await log.publish(
                SequenceDispatched(
                    source=source,
                    sample=sample,
                    sequence=f"{sample}-{member}",
                    member=member,
                    group_size=2,
                    pool="chat",
                    task_index=0,
                )
            )
    failure = Failure(kind="infra", reason="engine_unavailable", detail="\x1b[31mred\x1b[0m")
    await log.publish(
        SequenceFailed(
            source="arithmetic",
            sample="arithmetic-000000",
            sequence="arithmetic-000000-1",
            attempts=5,
            failure=failure,
        )
    )


async def test_list_shows_the_log_in_order_and_filters_by_type_source_and_id(
    tmp_path: Path, log: Log, broker: Broker
) -> None:
    recorded(tmp_path, log.run, broker)
    await fill(log)
    place = ("--directory", str(tmp_path))
    everything = packtrain("events", "list", *place, fresh=True).splitlines()
    assert [int(line.split()[0]) for line in everything] == [1, 2, 3, 4, 5, 6]
    assert len(packtrain("events", "list", *place, "--type", "sequence.dispatched").splitlines()) == 4
    assert len(packtrain("events", "list", *place, "--source", "calculator").splitlines()) == 2
    one = packtrain("events", "list", *place, "--id", "arithmetic-000000-1", "--json").splitlines()
    assert [json.loads(line)["type"] for line in one] == ["sequence.dispatched", "sequence.failed"]
    assert len(packtrain("events", "list", *place, "--id", "arithmetic-000000").splitlines()) == 3
    body = json.loads(one[1])
    assert body["data"]["failure"]["reason"] == "engine_unavailable"
    assert body["correlationid"] == "arithmetic-000000"
    assert "\x1b" not in "".join(everything + one)


async def test_list_ends_though_the_newest_message_is_no_event_to_this_version(
    tmp_path: Path, log: Log, broker: Broker
) -> None:
    recorded(tmp_path, log.run, broker)
    await fill(log)
    headers = {"ce-specversion": "1.0", "ce-type": "sample.invented", "ce-typeversion": "1", "ce-id": "x"}
    await log._js.publish(f"rl.{log.run}.sample.invented.arithmetic.x", b"{}", headers=headers)
    command = ["events", "list", "--json", "--directory", str(tmp_path)]
    done = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert done.exit_code == 0
    assert [json.loads(line)["seq"] for line in done.stdout.splitlines()] == [1, 2, 3, 4, 5, 6]
    assert done.stderr.splitlines() == [
        "packtrain: skipped, as no event to this version: {'unknown': 1}",
    ]


async def test_tail_follows_until_the_run_stops(tmp_path: Path, log: Log, broker: Broker) -> None:
    recorded(tmp_path, log.run, broker)
    await fill(log)
    tail = await asyncio.create_subprocess_exec(
        *PACKTRAIN, "events", "tail", "--directory", str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert tail.stdout is not None
    first = await asyncio.wait_for(tail.stdout.readline(), 30)
    assert b"run.started" in first  # the newest ten come first
    await log.publish(RunStopped(run=log.run, reason="completed", steps=0))
    rest, _ = await asyncio.wait_for(tail.communicate(), 30)
    assert b"run.stopped" in rest.splitlines()[-1]
    assert tail.returncode == 0


async def test_a_finished_run_is_read_with_its_broker_down(tmp_path: Path) -> None:
    supervisor = Supervisor()
    member, broker = broker_member(tmp_path, free_port())
    supervisor.keep(Unit("broker", (member,)))
    try:
        recorded(tmp_path, "past", broker)
        log = await Log.connect(broker, "past", "test")
        await log.create()
        await fill(log)
        await log.close()
    finally:
        await supervisor.stop()
    assert len(packtrain("events", "list", "--directory", str(tmp_path)).splitlines()) == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--type", "sequence.finishd"), "no event type 'sequence.finishd'"),
        (("--id", "a b"), "is not a legal name"),
        (("--run", "other"), "has no run 'other'; runs: "),
    ],
)
async def test_what_cannot_be_shown_is_refused(
    tmp_path: Path, broker: Broker, run_name: str, arguments: tuple[str, ...], said: str
) -> None:
    recorded(tmp_path, run_name, broker)
    errors = 1 if arguments[0] == "--run" else 2
    assert said in packtrain("events", "list", "--directory", str(tmp_path), *arguments, status=errors)


async def test_a_source_that_matches_nothing_is_told_with_what_there_is(
    tmp_path: Path, log: Log, broker: Broker
) -> None:
    recorded(tmp_path, log.run, broker)
    await fill(log)
    done = commands.packtrain("events", "list", "--directory", tmp_path, "--source", "harness-chat-0")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        "packtrain: no event of --source harness-chat-0; seen: arithmetic, calculator"
    ]


async def test_the_documented_consumer_runs_as_it_stands(tmp_path: Path, log: Log, broker: Broker) -> None:
    recorded(tmp_path / ".packtrain", log.run, broker)
    await log.publish(
        SequenceFinished(
            source="arithmetic", sample="arithmetic-000000", sequence="arithmetic-000000-0", attempt=1, reward=0.5,
            termination="completed", turns=1, contexts=(), payload=PayloadHeader(key="k", bytes=1, columns=()),
        )
    )  # fmt: skip
    page = (DEMO.parents[1] / "docs" / "consumers.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    assert "/runs/demo/" in program
    consumer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program.replace("/runs/demo/", f"/runs/{log.run}/"), cwd=tmp_path, stdout=asyncio.subprocess.PIPE
    )  # fmt: skip
    try:
        assert consumer.stdout is not None
        assert await asyncio.wait_for(consumer.stdout.readline(), 30) == b"1 arithmetic-000000-0 0.5\n"
    finally:
        consumer.kill()
        await consumer.wait()


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    assert "holds no run" in packtrain("events", "list", "--directory", str(tmp_path), status=1)


async def test_payload_show_marks_exactly_the_tokens_with_loss(
    tmp_path: Path, log: Log, broker: Broker
) -> None:
    run_name = log.run
    config = recorded(tmp_path, run_name, broker)
    tokenizer = PolicyTokenizer.load(policy_directory("tiny"))
    prompt, answer = tokenizer.encode("what is 1 + 2?\x1b[31m"), tokenizer.encode("3")
    tokens = np.array([*prompt, *answer], np.int32)
    mask = np.array([0] * len(prompt) + [1] * len(answer), np.uint8)
    columns = {
        "tokens": tokens,
        "loss_mask": mask,
        "logprobs": np.where(mask, -0.5, 0).astype(np.float32),
        "policy_version": np.where(mask, 3, 0).astype(np.int32),
        "segments": np.array([[0, len(prompt), 1, 0, 0], [len(prompt), len(tokens), 2, 3, 0]], np.int32),
    }
    key = f"runs/{run_name}/payloads/arithmetic/arithmetic-000000-0-a1.safetensors"
    header = await write_payload(ObjectStore.open(config.store), key, columns)
    await log.publish(
        SequenceFinished(
            source="arithmetic", sample="arithmetic-000000", sequence="arithmetic-000000-0", attempt=1, reward=1 / 3,
            termination="completed", turns=1, contexts=(), payload=header,
        )
    )  # fmt: skip
    shown = packtrain("payload", "show", key, "--directory", str(tmp_path), fresh=True)
    assert shown.splitlines()[0] == f"{key}, {header.bytes} bytes"
    assert packtrain("payload", "show", "arithmetic-000000-0", "--directory", str(tmp_path)) == shown
    assert "reward=0.333333 " in packtrain("events", "list", "--directory", str(tmp_path))
    assert f'"reward": {1 / 3!r}' in packtrain("events", "list", "--json", "--directory", str(tmp_path))
    assert "what is 1 + 2?\\x1b[31m[[3]]" in shown
    assert "assistant" in shown
    assert "3..3" in shown
    assert "-0.500" in shown
    for column in columns:
        assert column in shown


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("runs/x/none", "no object runs/x/none"),
        ("arithmetic-000000-0", "has no finished sequence arithmetic-000000-0"),
        ("../../etc/passwd", "is neither a sequence"),
        ("arithmetic-0-0", "is neither a sequence"),
        ("x", "is neither a sequence"),
    ],
)
async def test_a_payload_that_is_not_there_is_one_line(
    tmp_path: Path, log: Log, broker: Broker, key: str, said: str
) -> None:
    recorded(tmp_path, log.run, broker)
    wrong = said.startswith("is neither")
    told = packtrain("payload", "show", key, "--directory", str(tmp_path), status=2 if wrong else 1)
    assert said in told
    assert "schemas.keys" not in told
    assert len(told.splitlines()) == 1


async def test_a_damaged_payload_is_told_not_shown(tmp_path: Path, broker: Broker, run_name: str) -> None:
    config = recorded(tmp_path, run_name, broker)
    one = np.ones(1, np.int32)
    columns = {
        "tokens": one, "loss_mask": one.astype(np.uint8), "logprobs": one.astype(np.float32), "policy_version": one,
        "segments": np.array([[0, 1, 2, 3, 0]], np.int32),
    }  # fmt: skip
    key = f"runs/{run_name}/payloads/a/a.safetensors"
    header = await write_payload(ObjectStore.open(config.store), key, columns)
    path = tmp_path / "objects" / key
    body = bytearray(path.read_bytes())
    body[header.column("tokens").offset] ^= 1
    path.write_bytes(body)
    assert "is damaged" in packtrain("payload", "show", key, "--directory", str(tmp_path), status=1)


def test_config_show_is_complete_and_check_tells_every_fault(tmp_path: Path) -> None:
    again = tmp_path / "again.toml"
    again.write_text(packtrain("config", "show", str(DEMO), fresh=True))
    assert load(again) == load(DEMO)
    said = packtrain("config", "check", str(again), fresh=True)
    assert "run demo, 5 steps, sources arithmetic, calculator" in said
    again.write_text(again.read_text().replace("steps = 5", "steps = 1"))
    assert "run demo, 1 step, sources" in packtrain("config", "check", str(again))
    again.write_text(again.read_text().replace("steps = 1\n", "steps = 0\nwrong = 1\n"))
    assert len(packtrain("config", "check", str(again), status=2).splitlines()) == 2
    assert json.loads(packtrain("config", "schema", fresh=True))["title"] == "RunConfig"


@pytest.mark.parametrize("module", ["cli.main", "dispatcher", "sampler", "grader", "packer", "process"])
def test_the_command_line_and_control_services_start_in_under_a_second_without_torch(module: str) -> None:
    code = f"import sys, services.{module}; print([m for m in ('torch', 'ray', 'openai', 'reasoning_gym') if m in sys.modules])"
    costs: list[float] = []
    while len(costs) < 3 and min(costs, default=1.0) >= 1.0:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.stdout.strip() == "[]"
        # Processor time: a machine that is busy with other tests is not a slow start.
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(costs) < 1.0
