"""The composition for real: it ends in trained steps, is scaled, loses nothing whatever is restarted, and leaves nothing behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.process import SERVICES
from tests.compose.composition import Composition, said, until

STAYING = {"nats", "object-store", "prometheus", "grafana", "dashboard"}
"""What a run that is over does not end: servers, and who tells of it."""
STEPS = 25
"""Of the run in which all is restarted: it goes on all the while."""


def composition(directory: Path, project: str, steps: int) -> Iterator[Composition]:
    made = Composition(directory, project, steps)
    try:
        yield made
    finally:
        made("down", "--volumes", "--timeout", "1")
        assert made.left() == []


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Composition]:
    yield from composition(tmp_path, "packtraintest", 3)


@pytest.fixture
def scaled(tmp_path: Path) -> Iterator[Composition]:
    yield from composition(tmp_path, "packtrainscaled", STEPS)


def well_ended(made: Composition, steps: int) -> None:
    """Every step was trained once, of sequences that were finished once, and a fold of the log decides as the run did."""
    assert made.trained() == list(range(1, steps + 1))
    finished = Counter(each["data"]["sequence"] for each in made.facts("sequence.finished"))
    assert max(finished.values()) == 1
    # Two ranks, so two windows of each.
    assert sorted(each["data"]["step"] for each in made.facts("window.packed")) == sorted(
        [*range(1, steps + 1)] * 2
    )
    for report in json.loads(made.reading("replay", "--json"))["reports"]:
        assert (report["divergences"], report["more"]) == ([], 0)


def test_up_ends_in_trained_steps_and_down_leaves_nothing(small: Composition) -> None:
    small("up", "--detach")
    until(small.ended, "the end of the run")
    well_ended(small, 3)
    for container, (name, service) in small.containers().items():
        if service in STAYING:
            assert small.state(container)["Health"]["Status"] == "healthy", name
        else:
            until(lambda one=container: small.state(one)["Status"] == "exited", f"the end of {name}")
            assert small.state(container)["ExitCode"] == 0, small.logs(container)[-2000:]
    # From the dashboard, Prometheus has what the run came to.
    until(lambda: small.measured("packtrain_run_step") == 3, "Prometheus's number of trained steps")
    assert small.left() != []


def test_scaled_killed_and_restarted_it_trains_every_step_once(scaled: Composition) -> None:
    scaled("up", "--detach", "--scale", "agent-loop=3", "--scale", "packer=4")
    until(lambda: scaled.trained(), "the first step")

    def serving() -> list[str]:
        """Packers that have a place and live."""
        return [
            each
            for each in scaled.containers("packer")
            if "packer 0 of 2" in scaled.logs(each) or "packer 1 of 2" in scaled.logs(each)
            if scaled.state(each)["Running"]
        ]

    assert len(scaled.containers("packer")) == 4
    assert len(serving()) == 2
    assert {len(scaled.containers("agent-loop")), len(scaled.containers("trainer"))} == {3, 1}
    # Killed by a person it is not started again; one that stands by takes its place.
    said("docker", "kill", serving()[0])
    until(lambda: len(serving()) == 2, "another packer at the place of the killed")

    before = len(scaled.trained())
    scaled("restart", "nats")
    until(lambda: len(scaled.trained()) > before, "a step after the broker's restart")

    names = {"harness": "harness-chat"}
    for service in [*(names.get(each, each) for each in SERVICES), "harness-tool", "object-store"]:
        if scaled.ended():
            pytest.fail(f"the run was over before {service} was restarted: raise STEPS")
        scaled("restart", service)
    until(scaled.ended, "the end of the run")
    well_ended(scaled, STEPS)
