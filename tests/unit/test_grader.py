"""The grader: whatever a plug-in does, the group is graded, and the event says when with its original rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from pydantic import BaseModel

from schemas.envelope import encode, new_event
from schemas.facts import SampleCompleted
from services.grader import grade, keep, resolve

GROUP = SampleCompleted(
    source="s", sample="s-000001", sequences=("s-000001-0", "s-000001-1"), rewards=(1.0, 0.0), failed=1
)


def test_the_grader_none_keeps_the_rewards_and_falls_back_to_nothing() -> None:
    assert resolve("none") is keep
    graded = grade("none", keep, GROUP)
    assert (graded.rewards, graded.fallback, graded.grader) == ((1.0, 0.0), None, "none")


def halve(completed: SampleCompleted) -> Sequence[float]:
    return [reward / 2 for reward in completed.rewards]


def test_a_function_of_a_module_rewrites_the_rewards() -> None:
    name = f"{__name__}:halve"
    graded = grade(name, resolve(name), GROUP)
    assert (graded.rewards, graded.fallback) == ((0.5, 0.0), None)
    assert graded.grader == name.replace(".", "-").replace(":", "-")


class Strict(BaseModel):
    value: int


def invalid(_: SampleCompleted) -> Sequence[float]:
    Strict.model_validate({"value": "x"})
    raise AssertionError


def raising(error: BaseException):
    def grader(_: SampleCompleted) -> Sequence[float]:
        raise error

    return grader


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        (lambda _: [1.0], "gave 1 rewards for 2 sequences"),
        (lambda _: [1.0, 2.0, 3.0], "gave 3 rewards for 2 sequences"),
        (lambda _: [1.0, math.nan], "not finite numbers of at most"),
        (lambda _: [math.inf, 0.0], "not finite numbers of at most"),
        (lambda _: [1e300, 0.0], "not finite numbers of at most"),
        (lambda _: None, "TypeError"),
        (lambda _: ["good", "bad"], "ValueError"),
        (raising(RuntimeError("judge is down")), "RuntimeError: judge is down"),
        (raising(RuntimeError("x" * 9000)), "RuntimeError: xxx"),
        (raising(RuntimeError("half a pair \ud800")), "RuntimeError: half a pair ?"),
        (raising(SystemExit(3)), "SystemExit: 3"),
        (invalid, "ValidationError"),
    ],
)
def test_output_that_cannot_be_used_keeps_the_rewards_and_says_why(grader, said: str) -> None:
    graded = grade("m:f", grader, GROUP)
    assert graded.rewards == GROUP.rewards
    assert graded.fallback is not None
    assert said in graded.fallback
    assert len(graded.fallback) <= 500
    encode(new_event(graded, "grader"), "r")


@pytest.mark.parametrize("name", ["paket.modul:größe", "m" * 300 + ":f", "a b:c"])
def test_any_name_of_a_grader_becomes_a_legal_one(name: str) -> None:
    assert grade(name, keep, GROUP).rewards == GROUP.rewards


@pytest.mark.parametrize("name", ["nowhere:f", f"{__name__}:nothing", "math", "", ":", ":f"])
def test_a_grader_that_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be imported: .*; give none, or module:function"):
        resolve(name)


def test_a_grader_that_is_no_function_is_named() -> None:
    with pytest.raises(TypeError, match="'math:pi' is not callable"):
        resolve("math:pi")
