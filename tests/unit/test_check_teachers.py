"""Teachers that could not score are refused before anything starts; what scores depend on stays what it was in a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import dumps, load
from pipeline.engines.policies import TINY, policy_dir
from schemas.config import Engine, RunConfig, Teacher
from services.cli.check import Place, faults
from services.cli.runs import differences, unit_arguments
from services.cli.teachers import resolved

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


def taught(*teachers: Teacher, engine: dict[str, Any] | None = None) -> RunConfig:
    config = load(DEMO)
    return config.model_copy(
        update={
            "teachers": teachers,
            "engine": config.engine.model_copy(update=engine or {}),
            "batch": config.batch.model_copy(update={"token_budget": 9000}),
        }
    )


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A copy of the tiny policy, to be changed."""
    return shutil.copytree(policy_dir(TINY), tmp_path / "large")


def test_teachers_that_can_score_have_no_fault(tmp_path: Path, policy: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    served = Teacher(
        name="far",
        kind="sglang",
        url="http://h:1",
        replicas=("https://h:2/x",),
        token_file=str(tmp_path / "token"),
        top_k=512,
    )
    # Rows are no longer than the engine's context, so that a tiny teacher is never asked about its own default.
    assert faults(taught(Teacher(name="own"), Teacher(name="other", policy=str(policy)), served)) == []
    assert (
        faults(taught(Teacher(name="own", max_context=2049, overlap=64), engine={"max_context": 9000})) == []
    )


FAR = {"name": "far", "kind": "vllm", "url": "http://h:1"}


@pytest.mark.parametrize(
    ("teacher", "engine", "path", "said"),
    [
        ({**FAR, "url": "h:1"}, {}, ("url",), "teachers[0].url 'h:1' is not http://host:port"),
        ({**FAR, "replicas": ["h"]}, {}, ("replicas", 0), "teachers[0].replicas[0] 'h' is not http"),
        ({**FAR, "token_file": "/absent"}, {}, ("token_file",), "teachers.far.token_file '/absent' cannot"),
        ({"name": "t", "policy": "absent"}, {}, ("policy",), "policy 'absent' is not a directory"),
        (
            {"name": "t"},
            {"max_context": 2100},
            ("policy",),
            "set max_context to at most 2049 and overlap below it",
        ),
        ({"name": "t", "top_k": 413}, {}, ("policy",), "has 412 tokens, fewer than top_k 413"),
    ],
)
def test_a_teacher_that_cannot_score_is_told_at_its_key(
    teacher: dict[str, Any], engine: dict[str, Any], path: Place, said: str
) -> None:
    ((where, what),) = faults(taught(Teacher.model_validate(teacher), engine=engine))
    assert where == ("teachers", 0, *path)
    assert said in what


@pytest.mark.parametrize("where", ["vocab", "added"])
def test_a_teacher_of_another_vocabulary_is_refused(policy: Path, where: str) -> None:
    file = policy / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    if where == "vocab":
        token = min(tokenizer["model"]["vocab"])
        tokenizer["model"]["vocab"][token] += 1000
    else:
        tokenizer["added_tokens"][0]["id"] += 1000
    file.write_text(json.dumps(tokenizer))
    ((_, what),) = faults(taught(Teacher(name="t", policy=str(policy))))
    assert "has another vocabulary than engine.policy 'tiny'" in what


def test_a_policy_without_a_models_configuration_is_refused(policy: Path) -> None:
    (policy / "config.json").write_text("[]")
    ((_, what),) = faults(taught(Teacher(name="t", policy=str(policy))))
    assert "its config.json is of no tiny engine" in what


def test_a_runs_own_configuration_names_no_relative_path(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = (
        Teacher(name="tiny"),
        Teacher(name="t", policy=policy.name),
        Teacher.model_validate({**FAR, "token_file": "token", "policy": "not looked at"}),
    )
    tiny, other, far = resolved(given, tmp_path)
    assert (tiny.policy, other.policy) == (TINY, str(policy))
    assert (far.policy, far.token_file) == ("not looked at", str(tmp_path / "token"))


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"url": "http://elsewhere:1", "concurrency": 3, "timeout_s": 9.0}, []),
        ({"top_k": 4}, ["teachers"]),
        ({"overlap": 7}, ["teachers"]),
        ({"policy": "other"}, ["teachers"]),
    ],
)
def test_an_unfinished_run_goes_on_only_with_the_teachers_scores_that_it_has(
    tmp_path: Path, change: dict[str, Any], differing: list[str]
) -> None:
    config = taught(Teacher.model_validate(FAR))
    config = config.model_copy(update={"directory": str(tmp_path), "engine": Engine()})
    config = config.model_copy(
        update={"store": config.store.model_copy(update={"url": (tmp_path / "objects").as_uri()})}
    )
    record = tmp_path / "config.toml"
    record.write_text(dumps(config))
    changed = config.model_copy(update={"teachers": (config.teachers[0].model_copy(update=change),)})
    assert differences(changed, None, record, tmp_path) == differing


def test_the_service_is_started_where_a_source_has_a_teacher() -> None:
    config = taught(Teacher(name="own"))
    assert "teacher" not in [name for name, _ in unit_arguments(config)]
    sources = [source.model_copy(update={"teachers": ("own",)}) for source in config.sources]
    assert "teacher" in [
        name for name, _ in unit_arguments(config.model_copy(update={"sources": tuple(sources)}))
    ]
