"""The dashboard as a process, at a broker that restarts: what `/metrics` says is what the log and the queues hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pipeline.log import Log
from schemas.facts import SampleRejected, SequenceDispatched, SequenceFinished, StepTrained, WindowPacked
from services.dashboard import View, fold
from tests.dashboard_parts import configured, dashboard, store
from tests.natsserver import NatsServer, free_port
from tests.recorded import demo_events, demo_messages

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def server(tmp_path: Path):
    server = NatsServer(tmp_path / "server", sync="2m")
    server.start()
    yield server
    server.stop()


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"packtrain_{name}", frozenset(labels.items())


def expected(view: View, facts: Sequence[object]) -> Mapping[tuple[str, frozenset[tuple[str, str]]], float]:
    """Some of each kind, counted in the log itself, or the view's."""
    finished = [fact for fact in facts if isinstance(fact, SequenceFinished)]
    trained = max((f for f in facts if isinstance(f, StepTrained)), key=lambda f: f.step)
    sent = Counter(f.source for f in facts if isinstance(f, SequenceDispatched))
    refused = Counter((f.source, f.reason) for f in facts if isinstance(f, SampleRejected))
    newest = view.rows[max(view.rows)]
    out = {
        key("run_events_total"): len(facts),
        key("run_step"): trained.step,
        key("run_steps"): view.steps,
        key("run_batch"): newest.step,
        key("run_policy_version"): view.policy_version,
        key("run_loss"): trained.loss,
        key("run_kl"): trained.kl,
        key("run_grad_norm"): trained.grad_norm,
        key("run_sampled_tokens_total"): sum(c.generated for f in finished for c in f.contexts),
        key("run_fetched_bytes_total"): sum(f.fetched for f in facts if isinstance(f, WindowPacked)),
        key("run_written_bytes_total", kind="payloads"): sum(f.payload.bytes for f in finished),
    }
    for name, source in view.sources.items():
        share = newest.sources[name].share
        out |= {
            key("run_sequences_dispatched_total", source=name): sent[name],
            key("run_sequences_finished_total", source=name): sum(f.source == name for f in finished),
            key("run_groups_in_flight", source=name): len(source.in_flight),
            key("run_groups_ready", source=name): source.ready,
            key("run_groups_accepted_total", source=name): source.accepted,
            key("run_reward", source=name): share.mean_reward,
            key("run_staleness", source=name): share.max_staleness,
        }
    return out | {key("run_groups_rejected_total", source=s, reason=r): n for (s, r), n in refused.items()}


async def test_a_run_is_told_over_restarts_of_broker_and_dashboard(
    tmp_path: Path, server: NatsServer
) -> None:
    messages, events = demo_messages(), demo_events()
    cut, half = len(messages) - 1, View()
    for event in events[:cut]:
        fold(half, event)
    log = await Log.connect(server.broker, "demo", "test")
    config = configured(tmp_path, server, free_port())
    async with dashboard(tmp_path, config) as board:
        board.start()
        await board.says(503, "waiting for run demo")
        await log.create()
        work = await log.work("agent-loop", "sequence.dispatched", ack_wait_s=60.0)
        await store(log, messages[:cut])
        await log.js.publish("rl.demo.sequence.finished.arithmetic.x", b"{}", headers={"ce-id": "x"})
        original = await log.letters.original(1)
        assert original is not None
        assert await log.letters.bury("grader", original, "a test")
        held = await work.fetch(3, timeout_s=10)
        sent = sum(isinstance(event.fact, SequenceDispatched) for event in events)
        await board.says(200, "ok")

        told = await board.until(
            lambda n: (
                n.get(key("run_events_total")) == cut
                and n.get(key("work_unacked", consumer="agent-loop")) == len(held)
                and n.get(key("run_dead_letters", reader="grader")) == 1
                and n.get(key("run_behind_events")) == 0
            )
        )
        for name, value in expected(half, [event.fact for event in events[:cut]]).items():
            assert told[name] == pytest.approx(value, rel=1e-12), name
        assert told[key("run_state", state="running")] == 1
        assert told[key("work_pending", consumer="agent-loop")] == sent - len(held)
        assert told[key("work_declared", consumer="agent-loop")] == 1
        for consumer in ("grader", "harness-chat", "harness-tool"):
            assert told[key("work_declared", consumer=consumer)] == 0
        assert key("work_declared", consumer="hook") not in told
        assert told[key("run_skipped_total", kind="invalid")] == 1
        assert half.last_at is not None
        assert told[key("run_last_event_timestamp_seconds")] == pytest.approx(half.last_at.timestamp())

        server.kill()
        await board.says(503, "no connection to broker")
        away = await board.until(lambda n: key("work_pending", consumer="agent-loop") not in n)
        assert away[key("run_events_total")] == cut
        server.start()
        await board.says(200, "ok")
        await store(log, messages[cut:])
        over = await board.until(lambda n: n.get(key("run_events_total")) == len(messages))
        assert over[key("run_state", state="completed")] == 1
        assert over[key("run_state", state="running")] == 0

        # It outlasts its run, and ends when it is told to. The next one tells the same.
        before = {k: v for k, v in (await board.numbers()).items() if k[0].startswith("packtrain_run_")}
        assert board.end() == 0
        board.start()
        after = await board.until(lambda n: n.get(key("run_events_total")) == len(messages))
        assert "starts from a snapshot at" in board.said()
        skipped = {
            key("run_skipped_total", kind="invalid"),
            key("run_behind_events"),
            key("run_dead_letters", reader="grader"),
        }
        assert {k: after[k] for k in before if k not in skipped} == {
            k: v for k, v in before.items() if k not in skipped
        }
        await board.says(200, "ok")
    await work.close()
    await log.close()
