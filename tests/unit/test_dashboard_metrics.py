"""What the dashboard counts and keeps, and that board and alert rules ask for numbers that our processes tell."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
import yaml

from pipeline.hosts.metrics import BadBind, Measures, _Collector
from pipeline.hosts.report import HostReport
from pipeline.log.permissions import KINDS, permissions_for, work_of
from schemas.envelope import Event, Invalid, Unknown
from schemas.facts import (
    Failure,
    SampleCompleted,
    SequenceDispatched,
    SequenceFailed,
    SequenceVerified,
    StepTrained,
)
from services.dashboard import serve
from services.dashboard.families import run_families, watched_families
from services.dashboard.totals import REASONS, ROWS, Totals
from services.dashboard.watching import Queue, Watch, states, work_consumers
from services.process import LASTING, SERVICES
from tests.recorded import demo_events
from tests.unit.factories import config, event

INFRA = Path(__file__).parents[2] / "infra"
BOARDS = sorted((INFRA / "grafana" / "boards").glob("*.json"))
RULES = yaml.safe_load((INFRA / "prometheus" / "rules.yml").read_text())
PROMETHEUS = yaml.safe_load((INFRA / "prometheus" / "prometheus.yml").read_text())
GIVEN = {
    "up": {"job", "instance"},
    "process_cpu_seconds_total": {"job"},
    "process_resident_memory_bytes": {"job"},
    # Of SeaweedFS 4.48.
    "SeaweedFS_s3_request_total": {"type", "code"},
}
"""What is no family of ours: Prometheus' own, its client's, and the object store's."""


def test_a_step_is_counted_once() -> None:
    events = demo_events()
    once, twice = Totals(), Totals()
    for each in events:
        once.read(each)
        twice.read(each)
        if isinstance(each, Event) and isinstance(each.fact, StepTrained):
            twice.read(each)
    assert once.loss_tokens > 0
    assert (twice.step_seconds, twice.loss_tokens) == (once.step_seconds, once.loss_tokens)


def test_a_state_that_was_kept_goes_on_as_it_would_have() -> None:
    events = demo_events()
    whole = Totals()
    for number, each in enumerate(events):
        if number % 300 == 150:
            assert Totals.load(orjson.loads(orjson.dumps(whole.dump()))) == whole
            whole = Totals.load(orjson.loads(orjson.dumps(whole.dump())))
        whole.read(each)
    straight = Totals()
    for each in events:
        straight.read(each)
    assert whole == straight
    assert whole.seq == events[-1].seq
    assert straight.trained is not None


def test_what_is_no_event_moves_the_place_alone() -> None:
    totals = Totals()
    totals.read(Invalid("rl.r.x", "no event", 7))
    assert (totals.seq, totals.view.events) == (7, 0)
    totals.read(Unknown("new.fact", "1", 8))
    assert (totals.seq, totals.view.events) == (8, 0)


def test_the_state_does_not_grow_with_steps_evaluations_or_reasons() -> None:
    newest = next(e for e in reversed(demo_events()) if e.fact.type == "batch.yielded")
    totals = Totals()
    for each in demo_events()[:1]:
        totals.read(each)
    view = totals.view
    source = view.source("math")
    source.evaluate = 1
    for number in range(1, 3 * ROWS):
        fact = newest.fact.model_copy(update={"step": number})
        totals.read(event(fact, number))
        sample = f"math-{number:06d}"
        sent = SequenceDispatched(
            source="math", sample=sample, sequence=f"{sample}-0", member=0, group_size=1, pool="p", task_index=0, min_policy_version=number,
        )  # fmt: skip
        totals.read(event(sent, number))
        done = SampleCompleted(source="math", sample=sample, sequences=("a",), rewards=(1.0,), failed=0)
        totals.read(event(done, number))
        failure = Failure(kind="infra", reason=f"r{number}")
        verdict = SequenceVerified(
            source="math", sample=sample, sequence=f"{sample}-0", attempt=1, host="h", reward=None, failure=failure,
        )  # fmt: skip
        totals.read(event(verdict, number))
    assert sorted(view.rows) == list(range(2 * ROWS, 3 * ROWS))
    assert sorted(source.evaluations) == [1, 3 * ROWS - 1]
    assert len(totals.attempts_failed) == REASONS + 1
    assert totals.attempts_failed["math infra other"] == 3 * ROWS - 1 - REASONS
    assert values(totals)["packtrain_run_infra_failures_total", ("math",)] == 3 * ROWS - 1


def values(totals: Totals) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(v for k, v in sample.labels.items() if k != "run")): sample.value
        for family in run_families("r", totals, {})
        for sample in family.samples
    }


def test_what_is_not_known_is_not_told_as_nothing() -> None:
    told = values(Totals())
    assert ("packtrain_run_loss", ()) not in told
    assert ("packtrain_run_last_step_timestamp_seconds", ()) not in told
    assert told["packtrain_run_step", ()] == 0
    assert told["packtrain_run_state", ("running",)] == 1


def test_failures_are_told_with_their_reasons() -> None:
    totals = Totals()
    fact = SequenceFailed(
        source="math", sample="math-000001", sequence="math-000001-0", attempts=3, failure=Failure(kind="infra", reason="harness_lost"),
    )  # fmt: skip
    totals.read(event(fact, 1))
    assert values(totals)["packtrain_run_sequences_failed_total", ("math", "infra", "harness_lost")] == 1


def test_hosts_are_counted_by_state_and_forgotten_in_the_end() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)

    def report(host: str, age_s: float, state: Any = "serving") -> HostReport:
        return HostReport(
            host=host,
            service="harness",
            pool="p",
            time=now - timedelta(seconds=age_s),
            state=state,
            tenants=0,
            capacity=1,
            done=0,
            pending=0,
        )

    found = [
        report("a", 1), report("b", 11), report("c", 599), report("d", 601), report("e", 700, "stopped"),
    ]  # fmt: skip
    found.append(report("f", 2, "draining"))
    assert states(found, now) == Counter(
        {
            ("harness", "p", "serving"): 1,
            ("harness", "p", "silent"): 2,
            ("harness", "p", "stopped"): 1,
            ("harness", "p", "draining"): 1,
        }
    )


def test_the_work_that_is_watched_is_what_services_may_read() -> None:
    """By the broker's permissions, which name the work consumers of every service."""
    whole = config(teachers=[{"name": "t", "kind": "tiny", "policy": "tiny"}])
    sources = tuple(source.model_copy(update={"teachers": ("t",)}) for source in whole.sources)
    whole = whole.model_copy(update={"sources": sources})
    durable = re.compile(r"\$JS\.API\.CONSUMER\.DURABLE\.CREATE\.RL_r\.(.+)")
    declared = {
        found[1]
        for kind in KINDS
        if kind != "launcher"  # which may declare any
        for subject in permissions_for(kind, "r", work_of(whole).get(kind)).publish
        if (found := durable.fullmatch(subject))
    }
    assert set(work_consumers(whole)) == declared


async def test_without_an_address_it_is_refused() -> None:
    with pytest.raises(BadBind, match=r"metrics\.bind, which is empty"):
        await serve(cast("Any", SimpleNamespace(config=config())))


def test_it_is_a_service_that_outlasts_its_run() -> None:
    assert SERVICES["dashboard"] == "services.dashboard"
    assert LASTING == ("dashboard",)


def families() -> dict[str, set[str]]:
    """Names of samples that our processes tell, and their labels."""
    watch = Watch(cast("Any", None), config())
    watch.messages = watch.bytes = watch.head = 1
    watch.queues = {"grader": Queue(1, 1, 1, 1)}
    watch.letters, watch.hosts = Counter({"grader": 1}), Counter({("harness", "p", "serving"): 1})
    measures = Measures()
    measures.collectors.append(lambda: run_families("r", Totals(), {}))
    measures.collectors.append(lambda: watched_families("r", watch, 0))
    out: dict[str, set[str]] = dict(GIVEN)
    for family in _Collector("test", measures).collect():
        labels = {*cast("Any", family)._labelnames, "job", "instance"}
        endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
        out |= {family.name + ending: labels | {"le"} for ending in endings[family.type]}
    return out


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every panel and rule, with the labels that their texts name."""
    for group in RULES["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for board in BOARDS:
        for panel in json.loads(board.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield panel["title"], target["expr"]


def test_board_and_rules_ask_for_numbers_that_there_are() -> None:
    known = families()
    asked = list(expressions())
    assert len(asked) > 60
    for where, text in asked:
        names = set(re.findall(r"\b(?:packtrain_|process_|SeaweedFS_)\w+|\bup\b", text))
        assert names, (where, text)
        assert names <= set(known), (where, sorted(names - set(known)))
        matched = {
            (name, label)
            for name, labels in re.findall(r"(\w+)\{([^}]*)\}", text)
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels)
        }
        for name, label in matched:
            assert label in known[name], (where, name, label)
        of_all = set().union(*(known[name] for name in names))
        for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", text):
            assert {label.strip() for label in grouped.split(",")} <= of_all, (where, grouped)


def test_board_is_whole() -> None:
    assert BOARDS
    uids = [json.loads(board.read_text())["uid"] for board in BOARDS]
    assert len(set(uids)) == len(uids)
    sources = yaml.safe_load((INFRA / "grafana/provisioning/datasources/prometheus.yml").read_text())
    source = sources["datasources"][0]["uid"]
    for board in BOARDS:
        whole = json.loads(board.read_text())
        ids = [panel["id"] for panel in whole["panels"]]
        assert len(set(ids)) == len(ids)
        taken: set[tuple[int, int]] = set()
        for panel in whole["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert max(x for x, _ in cells) < 24, panel["title"]
            assert not cells & taken, panel["title"]
            taken |= cells
            for target in panel.get("targets", ()):
                assert target["datasource"]["uid"] == source
                labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                grouped = {
                    x.strip() for by in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for x in by.split(",")
                }
                assert labels <= grouped | {"state"}, (panel["title"], labels)


def test_every_service_is_scraped() -> None:
    scraped = {
        name
        for job in PROMETHEUS["scrape_configs"]
        for each in job.get("dns_sd_configs", ())
        for name in each["names"]
    }
    for service in SERVICES:
        assert any(name == service or name.startswith(f"{service}-") for name in scraped), service
    assert PROMETHEUS["rule_files"] == ["rules.yml"]
