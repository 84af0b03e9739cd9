"""The chain of hooks: what is a hook, which chains there are, what no hook may give; and what a check says of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date, time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.signal.chain_faults import chain_faults
from pipeline.signal.hooks import BUILT_IN, REMEDY, BadHook, Chain, Member, Signal, built_in, chain, resolve
from schemas.config import RunConfig, Source
from services.cli.check import faults
from services.cli.check_hooks import check_hooks
from services.cli.plugins import problem
from tests.unit.factories import config as made_config

OWN = "examples.hooks.likely_tokens:LikelyTokens"


def run_of(hooks: list[Any], *more: dict[str, Any], top_k: int = 0, **source: Any) -> RunConfig:
    """A run of a source with these hooks and, for each of `more`, another with that changed. It has a teacher, `large`."""
    given = {
        "name": "math", "pool": "p", "groups": 2, "group_size": 2, "environment": {"kind": "arithmetic"},
        "hooks": [{"kind": hook} if isinstance(hook, str) else hook for hook in hooks], **source,
    }  # fmt: skip
    sources = [given, *({**given, "name": f"other{i}", **changed} for i, changed in enumerate(more))]
    return made_config(sources=sources, teachers=[{"name": "large", "top_k": top_k}])


def source_of(hooks: list[Any], **source: Any) -> Source:
    return run_of(hooks, **source).sources[0]


def opd(kind: str = "opd", **options: Any) -> dict[str, Any]:
    return {"kind": kind, "options": {"teacher": "large", **options}}


def signal(*rewards: float, loss_tokens: int = 3) -> Signal:
    members = tuple(Member(f"math-000001-{i}", loss_tokens=loss_tokens) for i in range(len(rewards)))
    return Signal(members, np.array(rewards), columns=({},) * len(rewards))


# What a hook is.


NEEDED: dict[str, dict[str, Any]] = {
    "overlong": {"max_length": 100, "buffer": 10}, "opd": {"teacher": "large"}, "opd_topk": {"teacher": "large"},
}  # fmt: skip
"""Options that have no default."""


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_built_in_hook_is_one(kind: str) -> None:
    assert resolve(kind, NEEDED.get(kind)).stage in ("rewards", "advantages", "after")


class NoStage:
    stage = "before"
    columns = ()

    def __call__(self, signal: Signal) -> Signal:
        return signal


class OneColumn(NoStage):
    stage = "after"
    columns = "logprobs"


class NotCalled:
    stage = "after"
    columns = ()


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("grop", {}, "hook 'grop' is none of .*'grpo'.*, and not of the form module:Class"),
        (":", {}, "is none of"),
        ("absent:Hook", {}, "hook 'absent:Hook' cannot be imported: No module named 'absent'"),
        (f"{__name__}:Absent", {}, "cannot be imported: .* has no attribute 'Absent'"),
        (f"{__name__}:NoStage", {}, "has stage 'before', must be one of"),
        (f"{__name__}:OneColumn", {}, "has columns 'logprobs', must be a tuple"),
        (f"{__name__}:NotCalled", {}, "cannot be called"),
        (f"{__name__}:NoStage", {"x": 1}, "has no options, and is given x: leave them out"),
    ],
)
def test_what_is_no_hook_is_told(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadHook, match=said):
        resolve(kind, options)


def test_another_package_names_its_hook_and_takes_no_built_in_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text(
        "class Hook:\n    stage, columns = 'after', ()\n    def __call__(self, signal): return signal\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[packtrain.hooks]\ncalm = theirs:Hook\ngrpo = theirs:Hook\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = source_of(["grpo", "calm"])
    assert not built_in(source)
    assert [type(hook).__module__ for _, hook in chain(source).hooks] == [
        "pipeline.signal.advantages", "theirs",
    ]  # fmt: skip
    with pytest.raises(BadHook, match=r"'clam' is none of .*'calm'"):
        resolve("clam")


# Which chains there are.


def test_a_source_without_hooks_has_its_estimator_and_is_pure() -> None:
    one = chain(source_of([], estimator="rloo"))
    assert (one.kinds, one.columns, one.pure, one.estimator) == (("rloo",), (), True, "rloo")


def test_a_chain_that_reads_columns_or_is_other_peoples_is_not_pure() -> None:
    assert chain(source_of(["length_penalty", "grpo", "redistribute", "segment_penalty"])).pure
    distilled = chain(source_of(["grpo", opd(add=True)]))
    assert (distilled.columns, distilled.pure) == (("logprobs", "teacher.large.logprobs"), False)
    assert not chain(source_of(["grpo", OWN])).pure


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        (["grpo", "length_penalty"], "'length_penalty' is of stage 'rewards' and stands after"),
        (["length_penalty"], "make no advantages: add an estimator"),
        (["redistribute"], "make no advantages"),
        (["grpo", "rloo"], "each make advantages"),
        (["grpo", opd()], "give opd add = true"),
        (["grpo", opd(add=True), "redistribute"], "put it before 'opd'"),
        ([opd("opd_topk"), "segment_penalty"], "weighs one advantage a sequence, and 'opd_topk'"),
    ],
)
def test_a_list_that_is_no_chain_is_told(hooks: list[Any], said: str) -> None:
    with pytest.raises(BadHook, match=said):
        chain(source_of(hooks))


# What no hook may give.


@dataclass
class Made:
    """A hook of a test."""

    change: Callable[[Signal], Any]
    stage: Any = "after"
    columns: tuple[str, ...] = ()

    def __call__(self, signal: Signal) -> Any:
        return self.change(signal)


def chained(*changes: Callable[[Signal], Any]) -> Chain:
    first = Made(lambda s: replace(s, advantages=s.rewards - s.rewards.mean()), "advantages")
    hooks = (("first", first), *((f"mine{i}", Made(change)) for i, change in enumerate(changes)))
    return Chain(hooks, (), False, "first")


def tokens(*arrays: Any) -> Callable[[Signal], Signal]:
    return lambda s: replace(s, tokens=arrays)


FULL = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: None, "'mine0' gave NoneType, must give a Signal"),
        (lambda s: replace(s, advantages=[1.0, 0.0]), "advantages that are not 2 finite numbers: a list"),
        (lambda s: replace(s, advantages=np.zeros(3)), "not 2 finite numbers"),
        (lambda s: replace(s, advantages=np.array([0.0, np.nan])), r"not 2 finite numbers: \[0.0, nan\]"),
        (
            lambda s: replace(s, advantages=np.array([1e39, 0.0])),
            r"\[1e\+39, 0.0\]; they are trained as float32",
        ),
        (tokens(None, np.full(3, -1e39)), "math-000001-1: advantages by token must be 3 finite"),
        (lambda s: replace(s, rewards=np.array([np.inf, 0.0])), "gave rewards that are not"),
        (lambda s: replace(s, advantages=None), "stands before one that makes them"),
        (lambda s: replace(s, members=s.members[::-1]), "in another order"),
        (tokens(FULL), "of 1 members, of 2"),
        (tokens(FULL, FULL[:2]), "math-000001-1: advantages by token must be 3 finite numbers"),
        (tokens(None, FULL * np.float32("nan")), "math-000001-1: advantages by token must be 3 finite"),
        (tokens(None, "aaa"), "and are a str"),
    ],
)
def test_what_cannot_be_trained_is_told_with_its_hook(change: Any, said: str) -> None:
    with pytest.raises(BadHook, match=said):
        chained(change).run(signal(1.0, 0.0))


def test_advantages_that_those_by_token_stand_for_are_not_changed_unseen() -> None:
    double = lambda s: replace(s, advantages=s.advantages * 2)  # noqa: E731
    assert chained(double, tokens(FULL, None)).run(signal(1.0, 0.0)).made().tolist() == [1.0, -1.0]
    with pytest.raises(BadHook, match="'mine1' changed advantages of sequences where those by token"):
        chained(tokens(FULL, None), double).run(signal(1.0, 0.0))


def test_weighing_with_anybodys_advantages_by_token_is_refused() -> None:
    weighed = replace(
        chained(tokens(FULL, None)),
        hooks=(*chained(tokens(FULL, None)).hooks, ("segment_penalty", Made(lambda s: s))),
    )
    with pytest.raises(BadHook, match="'segment_penalty' weighs one advantage a sequence"):
        weighed.run(signal(1.0, 0.0))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8))
def test_whatever_a_hook_gives_what_comes_out_is_finite(numbers: list[float]) -> None:
    given_back = chained(lambda s: replace(s, advantages=np.array(numbers)))
    try:
        made = given_back.run(signal(*[0.5] * len(numbers))).made()
    except BadHook:
        assert not (np.abs(numbers) <= np.finfo(np.float32).max).all()
    else:
        assert made.tolist() == numbers
        assert np.isfinite(made.astype(np.float32)).all()


# What `config check` says.

WEIGH = {"rule": "repetition", "strategy": "weigh"}


def kappa(value: float) -> dict[str, Any]:
    return {"kind": "segment_penalty", "options": {"kappa": value}}


def test_a_group_too_large_for_advantages_by_token_is_refused_and_others_are_not() -> None:
    for hooks, size, faulty in ((["grpo", OWN], 128, 0), (["grpo", OWN], 512, 1), (["grpo"], 512, 0)):
        config = run_of(hooks, group_size=size)
        found = list(chain_faults(config, config.sources[0]))
        assert len(found) == faulty
        assert all("group_size 512 is above" in what for what in found)


@pytest.mark.parametrize(
    ("config", "place", "said"),
    [
        (run_of([{"kind": "length_penalty", "options": {"quantil": 1}}, "grpo"]), ("hooks", 0, "options"),
         "hook 'length_penalty' refuses its options: quantil: Extra"),
        (run_of(["redistribute"]), ("hooks",), "make no advantages"),
        (run_of(["rloo"], group_size=1, accept={"min": -1, "max": 2}), ("hooks",),
         "no group of group_size 1 could be shaped: rloo needs a group of at least 2"),
        (run_of([opd()]), ("hooks",), "is teacher 'large''s, and the source's teachers are []"),
        (run_of([opd("opd_topk")], teachers=["large"]), ("hooks",), "'large' has top_k 0: give it one"),
        (run_of(["grpo"], penalties=[WEIGH]), ("penalties", 0, "strategy"), "needs the hook 'segment_penalty'"),
        (run_of(["grpo", "segment_penalty"]), ("hooks", 1), "and the source has none: add one"),
        (run_of([opd(), "segment_penalty"], penalties=[WEIGH], teachers=["large"]), ("hooks",), "weighs one advantage"),
    ],
)  # fmt: skip
def test_faults_of_hooks_are_told_at_their_key(config: RunConfig, place: tuple[Any, ...], said: str) -> None:
    told = check_hooks(config)
    # Of one source, as teachers may repeat what is said of columns.
    where, what = told.found[0]
    assert where == ("sources", 0, *place)
    assert said in what
    assert {place for place, _ in told.found} == {where}
    assert (told.asked, told.fit) == ([], [])


def test_sources_that_weigh_in_one_batch_weigh_alike() -> None:
    def other(value: float) -> dict[str, Any]:
        return {"hooks": [{"kind": "grpo"}, kappa(value)]}

    assert check_hooks(run_of(["grpo", "segment_penalty"], other(2.0), penalties=[WEIGH])).found == []
    ((where, what),) = check_hooks(run_of(["grpo", kappa(3)], other(4), penalties=[WEIGH])).found
    assert where == ("sources", 1, "hooks", 1, "options")
    assert "give all sources the same options" in what


def test_chains_that_are_right_have_no_fault() -> None:
    good = run_of(
        ["length_penalty", {"kind": "overlong", "options": NEEDED["overlong"]}, "grpo", "redistribute", opd(add=True)],
        {"hooks": [opd("opd_topk")]}, {"hooks": []},
        top_k=8, teachers=["large"],
    )  # fmt: skip
    assert check_hooks(good).found == []


def test_a_chain_that_leaves_no_group_of_the_size_an_advantage_is_told() -> None:
    """Every group would be dropped, and others dispatched in its place, for ever."""
    alone = run_of([{"kind": "grpo", "options": {"preset": "mimo"}}], group_size=1, accept={"max": 2})
    ((place, said),) = check_hooks(alone).found
    assert place == ("sources", 0, "hooks")
    assert "advantages of a group of group_size 1 are all zero" in said
    for fine in (
        run_of([{"kind": "grpo", "options": {"preset": "mimo"}}], group_size=2),
        run_of(["grpo"], group_size=1, accept={"max": 2}),
        run_of(["dr_grpo"], group_size=1, accept={"max": 2, "drop_all_zero": False}),
        run_of(
            ["grpo"],
            *(
                {"hooks": [{"kind": kind}], "group_size": 1, "groups": 0, "evaluate": 3}
                for kind in ("dr_grpo", "rloo")
            ),
        ),
    ):
        assert check_hooks(fine).found == []


class ReadsSegments:
    stage = "advantages"
    columns = ("segments",)

    def __call__(self, signal: Signal) -> Signal:
        return signal


def test_other_peoples_hooks_are_asked_in_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    wrong = {"kind": OWN, "options": {"alpha": 2}}
    config = run_of(
        ["grpo", wrong], {"hooks": [{"kind": "absent:X"}]}, {"hooks": [{"kind": "grpo"}, {"kind": OWN}]}
    )
    assert faults(config) == [
        (("sources", 0, "hooks", 1), f"hook {OWN!r} refuses its options: alpha: Input should be less than or equal to 1"),
        (("sources", 1, "hooks", 0), f"hook 'absent:X' cannot be imported: No module named 'absent'; {REMEDY}"),
    ]  # fmt: skip


def test_a_chain_with_other_peoples_hooks_is_asked_for_when_each_of_them_is_there() -> None:
    def said(hooks: list[Any]) -> str | None:
        told = check_hooks(run_of(hooks))
        ((where, asked),) = told.fit
        assert (told.found, where) == ([], ("sources", 0, "hooks"))
        return problem(asked)

    assert said(["grpo", OWN]) is None
    assert "'segments' has no row for each token" in (said([f"{__name__}:ReadsSegments"]) or "")
    assert "make no advantages" in (said([OWN]) or "")


# A hook of one's own.


@pytest.mark.parametrize("value", [date(2026, 1, 1), math.inf, [math.nan], {"deep": time(1)}])
@pytest.mark.parametrize("section", ["hooks", "penalties", "grader"])
def test_options_that_no_event_could_hold_are_refused(section: str, value: object) -> None:
    """TOML has dates and infinite numbers; run.started, in which options stand, is JSON."""
    named = {"rule" if section == "penalties" else "kind": "mine:Own", "options": {"value": value}}
    whole = source_of([]).model_dump() | {section: named if section == "grader" else [named]}
    with pytest.raises(ValidationError, match=r"options\n.*options must be JSON values"):
        Source.model_validate(whole)


def test_the_example_weighs_unlikely_tokens_less() -> None:
    hooks = chain(source_of(["grpo", {"kind": OWN, "options": {"alpha": 0.5}}]))
    assert (hooks.columns, hooks.estimator) == (("logprobs",), "grpo")
    columns = ({"logprobs": np.log([1.0, 0.5, 0.01])}, {"logprobs": np.log([1.0, 1.0, 1.0])})
    made = hooks.run(replace(signal(1.0, 0.0), columns=columns))
    first, second = made.tokens
    assert first is not None
    assert second is not None
    np.testing.assert_allclose(first / first[0], [1.0, 0.75, 0.505], rtol=1e-6)
    np.testing.assert_allclose(second, made.made()[1], rtol=1e-6)
