"""Tasks are pure functions of (seed, options, index); verifiers reward what they should, and their absence is no 0."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import schemas.config
from pipeline.harnesses.environments.arithmetic import Arithmetic, dataset_seed
from pipeline.harnesses.environments.base import (
    EnvironmentBroken,
    Outcome,
    ToolUse,
    UnknownEnvironment,
    make_environment,
)
from pipeline.harnesses.environments.calculator import TOOL, Calculator
from pipeline.harnesses.environments.programs.calculate import Refused, evaluate
from pipeline.harnesses.environments.programs.verify_calculator import reward


def test_arithmetic_asks_in_reasoning_gyms_words_and_is_the_same_each_time() -> None:
    first, again = Arithmetic(0, {}), Arithmetic(0, {})
    task = first.task(0)
    assert task.prompt == "State the final answer to the following arithmetic problem: 63 + 12 ="
    assert task.expected == "75"
    assert [first.task(i) for i in range(50)] == [again.task(i) for i in range(50)]


def test_another_seed_is_another_set_not_the_same_one_shifted() -> None:
    assert dataset_seed(1) - dataset_seed(0) > 2**31
    ours, held_out = Arithmetic(0, {}), Arithmetic(1, {})
    shifted = {tuple(ours.task(i + k).prompt for i in range(5)) for k in range(300)}
    assert tuple(held_out.task(i).prompt for i in range(5)) not in shifted


def test_arithmetic_scores_by_the_number() -> None:
    env = Arithmetic(0, {})
    task = env.task(0)
    for answer, expected in (
        ("75", 1.0),
        (" 75\n", 1.0),
        ("75.0", 1.0),
        ("74", 0.0),
        ("", 0.0),
        ("it is 75", 0.25),
    ):
        assert env.verify(task, Outcome(answer)) == expected, answer
    assert not env.call(task, "calculator", "{}").ok


@pytest.mark.parametrize(
    "options", [{"max_digit": 2}, {"min_terms": 3}, {"min_digits": 0}, {"max_terms": "many"}]
)
def test_options_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        Arithmetic(0, options)


def test_environments_are_made_by_kind() -> None:
    config = schemas.config.Environment(kind="calculator", seed=3, options={"low": 1, "high": 9})
    env = make_environment(config)
    assert isinstance(env, Calculator)
    assert env.task(0) == make_environment(config).task(0)
    for kind in ("arithmetics", "no.such.module:Thing", "pipeline.harnesses.environments.base:Nothing"):
        with pytest.raises(UnknownEnvironment, match=kind.split(":")[0]):
            make_environment(schemas.config.Environment(kind=kind))


@given(st.integers(0, 50), st.integers(0, 10_000))
def test_calculator_tasks_state_what_they_expect(seed: int, index: int) -> None:
    task = Calculator(seed, {}).task(index)
    prefix, expression = task.prompt[:-1].split("compute ")
    assert prefix == "Use the calculator to "
    assert str(evaluate(expression)) == task.expected
    a, operator, b = expression.split()
    assert 100 <= int(a) <= 999
    assert 100 <= int(b) <= 999
    assert operator in "+-*"


def test_the_tool_computes_in_the_sandbox_and_answers_bad_calls() -> None:
    env = Calculator(0, {})
    task = env.task(0)
    assert env.call(task, "calculator", '{"expression": "347 * 82"}') == ToolUse(
        "calculator", '{"expression": "347 * 82"}', "28454", ok=True
    )
    for name, arguments in (
        ("calculator", "{\"expression\": \"__import__('os').system('true')\"}"),
        ("calculator", '{"expression": "9**9**9**9"}'),
        ("calculator", '{"expression": "1/0"}'),
        ("calculator", '{"expression": "\\ud800"}'),
        ("calculator", '{"expression": 5}'),
        ("calculator", '{"expression": "1", "more": 1}'),
        ("calculator", "not json"),
        ("calc", '{"expression": "1"}'),
    ):
        use = env.call(task, name, arguments)
        assert not use.ok, use
        assert use.output.startswith("error: "), use


def test_the_verifier_program_rewards_a_right_answer_that_used_the_tool() -> None:
    env = Calculator(0, {})
    task = env.task(0)
    used = (ToolUse("calculator", "{}", task.expected, ok=True),)
    failed = (ToolUse("calculator", "{}", "error: x", ok=False),)
    assert env.verify(task, Outcome(f" {task.expected}.", used)) == 1.0
    assert env.verify(task, Outcome("7", used)) == 0.0
    assert env.verify(task, Outcome(task.expected, failed)) == 0.0
    assert env.verify(task, Outcome(task.expected)) == 0.0
    assert env.verify(task, Outcome("\ud800 lone surrogate \x00", used)) == 0.0


def test_a_verifier_that_breaks_is_never_a_reward_of_zero() -> None:
    env = Calculator(0, {})
    env._verifier = "print('no verdict')"
    with pytest.raises(EnvironmentBroken, match="no verdict"):
        env.verify(env.task(0), Outcome(""))
    env._verifier = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(EnvironmentBroken, match="137"):
        env.verify(env.task(0), Outcome(""))
    env._verifier = "print('{\"reward\": NaN}')"
    with pytest.raises(EnvironmentBroken, match="no verdict"):
        env.verify(env.task(0), Outcome(""))


@given(st.text(max_size=60))
def test_any_text_is_a_number_or_refused(text: str) -> None:
    try:
        value = evaluate(text)
    except Refused:
        return
    assert isinstance(value, int | float)


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
def test_integers_are_exact(a: int, b: int, operator: str) -> None:
    expected = {"+": a + b, "-": a - b, "*": a * b}[operator]
    assert evaluate(f"({a}) {operator} ({b})") == expected


def test_reward_is_strict_about_the_number() -> None:
    use = {"name": TOOL.name, "ok": True}
    assert reward("28,454", "28454", [use]) == 1.0
    assert reward("284540", "28454", [use]) == 0.0
