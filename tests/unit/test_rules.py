"""Rules on turns and on what follows them: what they flag, what they let pass, and that hostile text takes no more time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.harnesses.shell import told
from pipeline.harnesses.workspaces.base import Ended
from pipeline.signal.rules import (
    BUILT_IN,
    BadRule,
    Called,
    Results,
    Rule,
    RuleFailed,
    Turn,
    judge_of,
    resolve,
)
from schemas.signal import Penalty

HERE = "tests.unit.test_rules"


def turn(text: str = "", ids: Sequence[int] = (7,), **given: Any) -> Turn:
    return Turn(text, np.asarray(ids, np.int32), **given)


class Long:
    """A rule of one's own."""

    judges = "turn"

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.most = (options or {"most": 10}).pop("most")
        if options:
            raise ValueError(f"unknown: {options}")

    def __call__(self, seen: Turn) -> bool:
        return len(seen.text) > self.most


class Raises(Long):
    def __call__(self, seen: Turn) -> bool:
        raise KeyError("x")


class Mute(Long):
    def __call__(self, seen: Turn) -> Any:
        return None


class NoRule:
    judges = "everything"


def brute(ids: Sequence[int], n: int, times: int, tokens: int, share: float) -> bool:
    """Repetition by its definition alone."""
    for start in range(len(ids)):
        for period in range(1, n + 1):
            end = start + period
            while end < len(ids) and ids[end] == ids[end - period]:
                end += 1
            if end - start >= max(period * times, tokens) and end - start >= 2 * period:
                return True
    grams = {tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)}
    for gram in grams:
        count, at = 0, 0
        while at <= len(ids) - n:
            found = tuple(ids[at : at + n]) == gram
            count, at = count + found, at + (n if found else 1)
        if share < 1 and count >= times and count * n > share * len(ids):
            return True
    return False


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.lists(st.integers(0, 2), max_size=40),
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 9)).map(
            lambda given: [9, *given[0] * given[1], 8]
        ),
    ),
    st.integers(1, 5),
    st.integers(2, 5),
    st.one_of(st.integers(2, 12), st.just(1000)),
    st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]),
)
def test_repetition_is_what_it_says(ids: list[int], n: int, times: int, tokens: int, share: float) -> None:
    rule = resolve("repetition", {"n": n, "times": times, "tokens": tokens, "share": share})
    assert rule(turn(ids=ids)) == brute(ids, n, times, tokens, share)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5000), st.integers(1, 7))
def test_a_text_that_repeats_no_n_gram_so_often_is_clean(seed: int, count: int, often: int) -> None:
    """`often` times the same text, each with words of its own between."""
    rng = np.random.default_rng(seed)
    part = rng.integers(0, 50_000, count)
    ids = np.concatenate([np.append(part, 60_000 + i) for i in range(often)])[:6000]
    assert not resolve("repetition")(turn(ids=ids.tolist()))


@pytest.mark.parametrize("period", [1, 2, 7, 16])
def test_an_endless_loop_is_flagged_wherever_it_is(period: int) -> None:
    rule = resolve("repetition")
    loop = list(range(period)) * (128 // period)
    clean = list(range(1000, 3000))
    assert rule(turn(ids=[*clean, *loop, *clean]))
    assert not rule(turn(ids=[*clean, *loop[:60], *clean])), "a row of dashes"


def test_one_sentence_said_in_most_of_the_turn_is_flagged() -> None:
    sentence = list(range(16))
    said = [token for i in range(20) for token in (*sentence, 100 + i)]
    assert resolve("repetition")(turn(ids=said))
    assert not resolve("repetition", {"share": 1})(turn(ids=said))


def lines(rule: Rule, seen: Any) -> int:
    """How many lines of Python a rule runs for it."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        rule(seen)
    finally:
        sys.settrace(before)
    return count


HOSTILE = (
    "a",
    "=",
    "= ",
    "=" * 255 + "a",
    "\ufffd ",
    "exit code ",
    "[exit status 0",
    "no space left on devic",
)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("text", HOSTILE)
def test_work_grows_no_faster_than_what_is_judged(name: str, text: str) -> None:
    rule = resolve(name)

    def work(size: int) -> int:
        if rule.judges == "results":
            return lines(rule, Results((text * size,)))
        ids = [i % 3 * (i % 40 < 3) + 10 for i in range(size)]
        return lines(rule, turn(text * size, ids))

    small, large = work(2000), work(8000)
    assert large <= 4.5 * small + 200, f"{small} lines, then {large}"


def test_a_call_that_does_not_parse_and_one_of_a_tool_that_is_not_offered() -> None:
    malformed, unknown = resolve("malformed_call"), resolve("unknown_tool")
    assert malformed(turn(malformed=1))
    assert not malformed(turn("<tool_call>", calls=(Called("a", "{}"),)))
    assert unknown(turn(calls=(Called("a", "{}"), Called("b", "{}")), offered=frozenset({"a"})))
    assert not unknown(turn(calls=(Called("a", "{}"),), offered=frozenset({"a", "b"})))
    assert unknown(turn(calls=(Called("a", "{}"),))), "none is offered"


@pytest.mark.parametrize(
    ("text", "flagged"),
    [
        ("\ufffd" * 9, True),
        ("ok " * 10 + "\x00\x01\ue000\ufffd" * 3, True),
        ("half a character\ufffd", False),  # a turn that is cut at its length
        ("\ufffd" * 9 + "word " * 100, False),
        ("x" + "#" * 256, True),
        ("x" + "#" * 255, False),
        ("<>{}" * 63 + "a" + "<>{}" * 63, False),
        ("\u4f60\u597d\uff0c\u4e16\u754c" * 100, False),
        ("    }\n" * 500, False),
        ("col | col\n" + "-" * 120 + "\n", False),
    ],
)
def test_garbled(text: str, flagged: bool) -> None:
    rule = resolve("garbled")
    assert rule(turn(text)) == flagged
    assert rule(turn(reasoning=text)) == flagged
    assert rule(turn(calls=(Called("a", text),))) == flagged


@settings(deadline=None)
@given(st.text("#=a ", max_size=60), st.integers(1, 20))
def test_a_row_of_signs_is_found_wherever_it_stands(text: str, run: int) -> None:
    rows = "".join(c if c in "#=" else " " for c in text).split()
    assert resolve("garbled", {"run": run})(turn(text)) == (max(map(len, rows), default=0) >= run)


EXITS = [
    "x\n[exit status {}]", "x\n[exit status {}; something was killed, out of memory]",  # ours
    "<returncode>{}</returncode>\n<output>\nx\n</output>", '{{\n  "returncode": {},\n  "output": "x"',  # mini-swe-agent
    "x\n[The command completed with exit code {}.]", "x\n[Command finished with exit code {}]",  # OpenHands
    "Exit code {}\nx", "Exit code: {}\nWall time: 1", "x\n\nCommand exited with code {}",  # Claude Code, Codex, pi
    "Process exited with code {}",
]  # fmt: skip


@pytest.mark.parametrize("said", EXITS)
def test_what_scaffolds_tell_of_an_exit_is_known(said: str) -> None:
    rule = resolve("nonzero_exit")
    for status in ("1", "2", "127", "137", "-1", "-11"):
        assert rule(Results(("ok", said.format(status))))
    assert not rule(Results((said.format("0"),)))


def test_what_the_shell_harness_tells_is_known() -> None:
    rule, most = resolve("nonzero_exit"), 1000
    assert rule(Results((told(Ended(2, b"", b""), "make: error", most),)))
    assert rule(Results((told(Ended(137, b"", b"", oom=True), "x" * 50_000, 1 << 16),)))
    assert not rule(Results((told(Ended(0, b"", b""), "all 12 tests passed", most),)))
    own = resolve("nonzero_exit", {"pattern": r"^FAILED"})
    assert own(Results(("FAILED x",)))
    assert not own(Results(("[exit status 1]",)))


def test_a_failure_of_the_sandbox_is_known_at_both_ends_of_a_long_message() -> None:
    rule = resolve("infra_failure")
    long = "x" * 100_000
    assert rule(Results(("ok", "cp: error writing 'b': No space left on device")))
    assert rule(Results(("pip: Failed to establish a new connection: [Errno 111] Connection refused",)))
    assert rule(Results((f"No space left on device\n{long}",)))
    assert rule(Results((f"{long}\nNo space left on device",)))
    assert not rule(Results((f"{long}\nNo space left on device\n{long}",))), "its middle is not looked at"
    assert not rule(Results(("12 tests failed",)))
    assert resolve("infra_failure", {"phrases": ["Quota"]})(Results(("quota is spent",)))


def test_each_penalty_has_its_bit() -> None:
    rules = judge_of(
        [
            Penalty(rule="malformed_call"),
            Penalty(rule="nonzero_exit", scope="sequence"),
            Penalty(rule=f"{HERE}:Long", options={"most": 3}, stop=True, scope="context"),
            Penalty(rule=f"{HERE}:Long"),
        ]
    )
    assert rules.flags(turn("four", malformed=1)) == 0b0101
    assert rules.flags(turn("eleven char")) == 0b1100
    assert rules.flags(turn("1")) == 0
    assert rules.flags(Results(("[exit status 1]",))) == 0b0010
    assert (rules.stops, rules.context, rules.sequence, rules.own) == (0b0100, 0b0100, 0b0010, True)
    assert rules.stopped_by(0b0101) == f"{HERE}:Long"
    assert rules.stopped_by(0b1011) == ""
    assert not judge_of([Penalty(rule="garbled")]).own
    assert judge_of([]).flags(turn()) == 0


@pytest.mark.parametrize(("rule", "said"), [("Raises", "KeyError: 'x'"), ("Mute", "answered NoneType")])
def test_a_rule_that_fails_is_named(rule: str, said: str) -> None:
    with pytest.raises(RuleFailed, match=f"{HERE}:{rule}' .*{said}"):
        judge_of([Penalty(rule=f"{HERE}:{rule}")]).flags(turn())


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("repetitions", {}, "none of .*'repetition'"),
        ("absent:X", {}, "No module named 'absent'"),
        (f"{HERE}:Absent", {}, "no attribute 'Absent'"),
        (f"{HERE}:NoRule", {}, "needs judges"),
        ("repetition", {"times": 1}, "times"),
        ("garbled", {"shar": 1}, "shar"),
        ("malformed_call", {"n": 1}, "n\n"),
        ("nonzero_exit", {"pattern": "("}, "is no pattern"),
        ("infra_failure", {"phrases": [" "]}, "empty phrase"),
    ],
)
def test_what_is_no_rule_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises((BadRule, ValidationError), match=said):
        resolve(name, options)
