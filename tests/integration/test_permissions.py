"""What each user of the broker may do is what its service does: everything else is refused by a real server, for every kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from nats.aio.client import Client

from pipeline.hosts.report import HostReport, Reporter, reports
from pipeline.log import Log, LogError
from pipeline.log.connection import connect
from pipeline.log.permissions import KINDS
from pipeline.log.snapshot import Snapshots, open_bucket
from schemas.facts import ALL, FACTS, RunStopped, SampleAccepted
from schemas.names import subject_filter
from tests.secured import SecuredBroker

RUN, OTHER = "mine", "other"
FACTS_OF: dict[str, set[str]] = {
    "dispatcher": {"sequence.dispatched", "run.stopped"},
    "agent-loop": {"sequence.opened", "sequence.finished", "sequence.failed"},
    "harness": {"sequence.verified"},
    "grader": {"sample.graded"},
    "teacher": {"sequence.scored"},
    "sampler": {
        "sample.completed",
        "sample.accepted",
        "sample.rejected",
        "sample.shaped",
        "batch.yielded",
        "batch.replanned",
    },
    "hook": {"sample.shaped", "sample.rejected"},
    "packer": {"window.packed", "sequence.quarantined"},
    "trainer": {"batch.consumed", "step.trained", "policy.published"},
    "engine": set(),
    "collector": set(),
    "dashboard": set(),
    "reader": set(),
    "launcher": set(FACTS),
}
"""What each service publishes, said once more: another list than the code's."""
FOLDS_ALL = {"dispatcher", "sampler", "collector", "dashboard", "reader", "launcher"}
FOLDS = {
    "agent-loop": {"sequence.verified"},
    "harness": {"limit.changed"},
    "packer": {"batch.yielded", "batch.replanned", "step.trained"},
    "trainer": {"step.trained"},
    "engine": {"policy.published"},
}
WORK = {"agent-loop": {"agent-loop"}, "grader": {"grader"}, "hook": {"hook", "hook-graded"}}
NAMED = {"harness": ("harness-chat",), "teacher": ("teacher-6-before-sums",)}
CONSUMERS = (
    "agent-loop",
    "grader",
    "hook",
    "hook-graded",
    *(name for names in NAMED.values() for name in names),
    "x",
)
KEYS = {
    "dispatcher": {"dispatcher.head", "dispatcher.ab.0"},
    "sampler": {"sampler.head", "sampler.ab.0"},
    "collector": {"collector.head", "collector.ab.0"},
    "dashboard": {"dashboard.head", "dashboard.ab.0"},
    "agent-loop": {"host.agent-loop.a"},
    "harness": {"host.harness.a"},
}
STREAM_CHANGES = (
    "CREATE",
    "UPDATE",
    "DELETE",
    "PURGE",
    "MSG.DELETE",
    "SNAPSHOT",
    "RESTORE",
    "LEADER.STEPDOWN",
)
SERVICES = [kind for kind in KINDS if kind != "launcher"]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    broker = SecuredBroker(tmp_path_factory.mktemp("secured"), (RUN,), work=NAMED)
    broker.start()
    yield broker
    broker.stop()


@asynccontextmanager
async def user(secured: SecuredBroker, kind: str) -> AsyncIterator[tuple[Client, list[str]]]:
    """A client of that user, and what the server denied it, in lower case as nats-py tells it."""
    client = await connect(secured.user(kind), "probe", user=kind)
    denied: list[str] = []

    async def on_error(error: Exception) -> None:
        denied.append(str(error).partition('"')[2].partition('"')[0])

    client._error_cb = on_error  # the only place where a denial is told
    try:
        yield client, denied
    finally:
        await client.close()


async def denied_of(
    secured: SecuredBroker, kind: str, subjects: set[str], subscribe: bool = False
) -> set[str]:
    """Those of the subjects that the server does not let the user publish (or subscribe to)."""
    async with user(secured, kind) as (client, denied):
        for subject in sorted(subjects):
            if subscribe:
                await client.subscribe(subject)
            else:
                await client.publish(subject, b"{}")
        # The server goes through them in order: the last, which nobody may, is answered last.
        await client.publish("nobody.may", b"")
        async with asyncio.timeout(30):
            while "nobody.may" not in denied:
                await client.flush(30)
        return {subject for subject in subjects if subject.lower() in denied}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_service_publishes_its_own_facts_and_no_other(secured: SecuredBroker, kind: str) -> None:
    mine = {f"rl.{RUN}.{type_}.scope.id" for type_ in FACTS}
    strange = {f"rl.{OTHER}.{type_}.scope.id" for type_ in FACTS}
    strange |= {f"rl.{RUN}.step.forged.scope.id", f"rl.{RUN}.x", "rl.x", "x"}
    allowed = {f"rl.{RUN}.{type_}.scope.id" for type_ in FACTS_OF[kind]}
    if kind == "launcher":
        allowed |= {f"rl.{RUN}.step.forged.scope.id", f"rl.{RUN}.x"}
    assert await denied_of(secured, kind, mine | strange) == (mine | strange) - allowed


async def test_a_launcher_of_a_run_asks_everything_of_its_streams_and_nothing_of_others(
    secured: SecuredBroker,
) -> None:
    def asked(run: str) -> set[str]:
        streams = (f"RL_{run}", f"KV_RL_{run}")
        found = {
            f"$JS.API.STREAM.{verb}.{s}"
            for verb in (*STREAM_CHANGES[:-1], "INFO", "MSG.GET")
            for s in streams
        }
        found |= {f"$JS.API.CONSUMER.{verb}.{s}" for verb in ("NAMES", "LIST") for s in streams}
        found |= {
            f"$JS.API.CONSUMER.{verb}.{s}.x"
            for verb in ("CREATE", "DURABLE.CREATE", "DELETE", "INFO", "MSG.NEXT", "RESET", "PAUSE")
            for s in streams
        }
        found |= {f"$JS.API.CONSUMER.CREATE.{s}.x.rl.{run}.step.trained.*.*" for s in streams}
        return (
            found
            | {f"$JS.API.DIRECT.GET.{s}" for s in streams}
            | {f"$JS.ACK.{s}.x.1.1.1.1.1" for s in streams}
        )

    assert await denied_of(secured, "launcher", asked(RUN) | asked(OTHER)) == asked(OTHER)


@pytest.mark.parametrize("kind", SERVICES)
async def test_it_changes_nothing_that_is_not_its_own(secured: SecuredBroker, kind: str) -> None:
    work = WORK.get(kind, set()) | set(NAMED.get(kind, ()))
    keys = {key for keys in KEYS.values() for key in keys}
    asked = {
        f"$JS.API.STREAM.{verb}.{stream}"
        for verb in STREAM_CHANGES
        for stream in (f"RL_{RUN}", f"KV_RL_{RUN}")
    }
    asked |= {
        f"$JS.API.CONSUMER.{verb}.RL_{RUN}.{n}"
        for verb in ("DELETE", "RESET", "PAUSE", "UNPIN")
        for n in CONSUMERS
    }
    asked |= {
        f"$JS.API.{verb}.RL_{OTHER}"
        for verb in ("STREAM.INFO", "STREAM.MSG.GET", "CONSUMER.LIST", "DIRECT.GET")
    }
    asked |= {
        f"$JS.API.CONSUMER.{verb}.RL_{OTHER}.{name}"
        for verb in ("MSG.NEXT", "INFO", "CREATE")
        for name in CONSUMERS
    }
    asked |= {f"$KV.RL_{OTHER}.{key}" for key in keys} | {f"dlq.{OTHER}.malformed.1", "$SYS.REQ.SERVER.PING"}
    asked |= {
        "$JS.API.ACCOUNT.PURGE.x",
        "$JS.API.SERVER.REMOVE",
        "$JS.EVENT.ADVISORY.x",
        "_INBOX.trainer.x.1",
    }
    assert await denied_of(secured, kind, asked) == asked

    by_name = {
        f"$JS.ACK.RL_{RUN}.{{}}.1.1.1.1.0",
        f"$JS.API.CONSUMER.DURABLE.CREATE.RL_{RUN}.{{}}",
        f"dlq.{RUN}.{{}}.7",
    }
    named = {subject.format(name) for subject in by_name for name in CONSUMERS}
    allowed = {subject.format(name) for subject in by_name for name in work}
    assert await denied_of(secured, kind, named) == named - allowed
    written = {f"$KV.RL_{RUN}.{key}" for key in keys}
    assert await denied_of(secured, kind, written) == written - {
        f"$KV.RL_{RUN}.{key}" for key in KEYS.get(kind, ())
    }


@pytest.mark.parametrize("kind", SERVICES)
async def test_it_reads_in_order_only_what_it_needs(secured: SecuredBroker, kind: str) -> None:
    create = f"$JS.API.CONSUMER.CREATE.RL_{RUN}.fold-1"
    asked = {f"{create}.{subject_filter(RUN, type_)}" for type_ in FACTS} | {
        f"{create}.{subject_filter(RUN)}"
    }
    asked |= {create, f"$JS.API.CONSUMER.CREATE.RL_{RUN}", f"{create}.dlq.{RUN}.>", f"{create}.rl.{RUN}.>"}
    if kind == "reader":
        allowed = asked - {f"$JS.API.CONSUMER.CREATE.RL_{RUN}"}
    else:
        allowed = {f"{create}.{subject_filter(RUN, t)}" for t in FOLDS.get(kind, set()) | {"run.stopped"}}
        if kind in FOLDS_ALL:
            allowed = {each for each in asked if each.startswith(f"{create}.rl.") and not each.endswith(">")}
        if kind == "dashboard":
            allowed.add(f"{create}.dlq.{RUN}.>")
    assert await denied_of(secured, kind, asked) == asked - allowed


@pytest.mark.parametrize("kind", SERVICES)
async def test_it_subscribes_to_its_own_inbox_alone(secured: SecuredBroker, kind: str) -> None:
    others = {f"_INBOX.{other}.>" for other in KINDS if other != kind}
    asked = {
        "rl.>",
        f"rl.{RUN}.>",
        "dlq.>",
        "$KV.>",
        "$JS.>",
        "$JS.API.>",
        "_INBOX.>",
        "_INBOX.*.>",
        ">",
        "$SYS.>",
        *others,
    }
    assert await denied_of(secured, kind, {*asked, f"_INBOX.{kind}.>"}, subscribe=True) == asked


async def test_what_is_denied_is_told_and_not_waited_for(secured: SecuredBroker) -> None:
    log = await Log.connect(secured.user("launcher"), RUN, "launcher", user="launcher")
    await log.create()
    harness = await Log.connect(secured.user("harness"), RUN, "harness-a", user="harness")
    mistaken = await Log.connect(secured.user("harness", "grader"), RUN, "harness-a", user="harness")
    unnamed = await Log.connect(secured.user("reader"), RUN, "mine")

    async def folds() -> None:
        async for _ in harness.subscribe("step.trained"):
            raise AssertionError("it was given a fact")

    stopped = RunStopped(run=RUN, reason="completed", steps=1)
    try:
        told = await asyncio.gather(
            harness.publish(stopped),
            harness.publish_all([(stopped, None), (stopped, None)]),
            harness.work("grader", "sample.completed", ack_wait_s=1.0),
            folds(),
            mistaken.head(),
            unnamed.exists(),
            return_exceptions=True,
        )
        with pytest.raises(LogError, match=r"subscribe to _INBOX\.harness\.>"):
            await mistaken.publish(stopped)
    finally:
        for each in (log, harness, mistaken, unnamed):
            await each.close()
    assert [type(each) for each in told] == [LogError] * 6, told
    subjects = [
        f"user 'harness' publish rl.{RUN}.run.stopped.{ALL}.{RUN};",
        f"user 'harness' publish rl.{RUN}.run.stopped.{ALL}.{RUN};",
        f"user 'harness' publish $JS.API.CONSUMER.DURABLE.CREATE.RL_{RUN}.grader;",
        f"rl.{RUN}.step.trained.*.*; give each service its own credentials",
        "subscribe to _INBOX.harness.>, so that no answer comes: broker.credentials_file is another service's",
        'Log.connect(..., user="reader")',
    ]
    for each, said in zip(told, subjects, strict=True):
        assert said in str(each)


async def test_hosts_and_folds_keep_what_is_their_own(secured: SecuredBroker) -> None:
    async def connected(kind: str) -> Log:
        return await Log.connect(secured.user(kind), RUN, kind, user=kind)

    launcher, host, sampler, reader = [
        await connected(kind) for kind in ("launcher", "agent-loop", "sampler", "reader")
    ]
    try:
        await launcher.create()
        await open_bucket(launcher, create=True)
        report = HostReport(
            host="agent-loop-a",
            service="agent-loop",
            time=datetime.now(UTC),
            tenants=0,
            capacity=1,
            done=0,
            pending=0,
        )
        assert await Reporter(host).put(report, within_s=30)
        assert not await Reporter(sampler).put(report, within_s=6)
        assert await reports(reader) == ([report], 0)
        await launcher.publish(RunStopped(run=RUN, reason="completed", steps=1))
        snapshots = Snapshots(sampler, "sampler", 1)
        assert await snapshots.save(1, {"a": 1})
        found = await snapshots.load()
        assert found is not None
        assert found.state == {"a": 1}
        # Written over: the chunks of the one before are removed.
        assert await snapshots.save(2, {"a": 2})
        assert await Snapshots(host, "sampler", 1).save(3, {"a": 3}) == 0
    finally:
        for each in (launcher, host, sampler, reader):
            await each.close()


async def test_work_and_folds_need_no_more_than_is_permitted(secured: SecuredBroker) -> None:
    launcher = await Log.connect(secured.user("launcher"), RUN, "launcher", user="launcher")
    hook = await Log.connect(secured.user("hook"), RUN, "hook", user="hook")
    try:
        await launcher.create()
        accepted = SampleAccepted(
            source="s", sample="s-000001", pass_rate=1, mean_reward=1, tokens=1, min_version=0
        )
        work = await hook.work("hook", accepted.type, ack_wait_s=5.0)
        await launcher.publish(accepted)
        [delivery] = await work.fetch(1, timeout_s=30)
        await delivery.retry(0.0)
        [delivery] = await work.fetch(1, timeout_s=30)
        assert delivery.attempt == 2
        await delivery.progress()
        await delivery.bury("why")
        assert await work.pending() == 1  # its letter
        letter = await launcher.letters.find("hook", delivery.seq)
        assert letter.reason == "why"
    finally:
        await launcher.close()
        await hook.close()
