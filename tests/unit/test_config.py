"""Run configuration: every fault is told with its place, value and remedy; what is read can be written back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.config import ConfigError, Override, dumps, line_of, load, loads
from schemas.config import Behaviour, RunConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = (EXAMPLES / "demo.toml").read_text()


def faults(text: str, *overrides: Override) -> str:
    with pytest.raises(ConfigError) as caught:
        loads(text, "f.toml", overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_every_example_is_valid_and_survives_a_round_trip(path: Path) -> None:
    config = load(path)
    assert loads(dumps(config), "again") == config


def test_the_demo_has_two_sources_in_one_batch_of_two_ranks() -> None:
    config = loads(DEMO, "demo")
    assert [(s.name, s.groups, s.group_size) for s in config.sources] == [
        ("arithmetic", 4, 8),
        ("calculator", 4, 8),
    ]
    assert (config.steps, config.batch.dp) == (5, 2)


def test_learn_holds_out_tasks_of_a_seed_that_is_never_trained() -> None:
    config = load(EXAMPLES / "learn.toml")
    (held_out,) = [s for s in config.sources if s.evaluate]
    trained = {
        s.environment.seed
        for s in config.sources
        if s.groups and s.environment.kind == held_out.environment.kind
    }
    assert held_out.evaluate == 200
    assert held_out.environment.seed not in trained


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "steps = 5",
            "steps = 0",
            "f.toml:3: steps = 0: input should be greater than or equal to 1 (optimizer steps)",
        ),
        ("steps = 5", "steps = true", "f.toml:3: steps = True: input should be a valid integer"),
        ("steps = 5", 'steps = "5"', "f.toml:3: steps = '5': input should be a valid integer"),
        ("steps = 5", "stebs = 5", "f.toml:3: unknown key stebs; did you mean 'steps'?"),
        ("lr = 1e-4", "lr = nan", "trainer.lr = nan: input should be a finite number (AdamW learning rate)"),
        (
            "dp = 2",
            "dp = 2\nzzz = 1",
            "f.toml:10: unknown key batch.zzz; known keys here: adaptive_cp, ahead, cp, dp,",
        ),
        ('run = "demo"', 'run = "a.b"', "f.toml:2: run = 'a.b'"),
        ('pool = "tool"', 'pool = "tol"', "source 'calculator' is bound to pool 'tol', which does not exist"),
        (
            "token_budget = 4096",
            "token_budget = 512",
            "batch.token_budget 512 is below engine.max_context 1024",
        ),
        (
            'kind = "arithmetic"',
            'kinds = "arithmetic"',
            "sources[0].environment.kind is missing; give arithmetic",
        ),
        ("max_turns = 4", "max_turns = 0", "sources[1].behaviour.max_turns = 0"),
    ],
)
def test_a_fault_is_told_with_place_value_and_remedy(old: str, new: str, said: str) -> None:
    assert old in DEMO
    assert said in faults(DEMO.replace(old, new))


def test_all_faults_are_told_at_once_and_only_real_ones() -> None:
    told = faults(DEMO.replace("groups = 4", "grups = 4").replace("steps = 5", "steps = -1")).splitlines()
    assert (
        len(told) == 5
    )  # the step count, and twice a missing and an unknown key; no list that "is too short"


def test_a_key_of_an_inner_table_is_found_in_the_right_element() -> None:
    line = line_of(DEMO, ("sources", 1, "environment", "seed"))
    assert line is not None
    assert DEMO.splitlines()[line - 1] == "seed = 2"


def test_an_option_replaces_the_file_and_is_named_when_it_is_wrong() -> None:
    config = loads(
        DEMO,
        "f.toml",
        [Override("--steps", ("steps",), 9), Override("--nats", ("broker", "url"), "nats://h:1")],
    )
    assert (config.steps, config.broker.url) == (9, "nats://h:1")
    assert faults(DEMO, Override("--steps", ("steps",), -1)).startswith("--steps: steps = -1")


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"steps = ", "is not TOML"), (b"\xff\xfe", "is not UTF-8"), (None, "cannot be read: No such file")],
)
def test_a_file_that_is_no_configuration_is_one_line(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load(path)
    assert len(caught.value.faults) == 1
    assert str(path) in caught.value.faults[0]


@given(st.text(max_size=200))
def test_no_text_raises_anything_but_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        loads(text, "f.toml")


def test_what_is_no_kind_of_request_cannot_be_left_out() -> None:
    assert Behaviour(exclude=("subagent", "title")).exclude == ("subagent", "title")
    with pytest.raises(ValidationError, match="'fork' cannot be left out"):
        Behaviour(exclude=("title", "fork"))


def test_every_field_is_described() -> None:
    undescribed: list[str] = []

    def walk(schema: dict, definitions: dict, path: str) -> None:
        for name, field in schema.get("properties", {}).items():
            inner = field.get("items", field)
            reference = inner.get("$ref") or next(
                (a["$ref"] for a in inner.get("allOf", []) if "$ref" in a), None
            )
            if reference:
                target = definitions[reference.rsplit("/", 1)[1]]
                assert target.get("description"), f"{path}{name} is a section without a docstring"
                walk(target, definitions, f"{path}{name}.")
            elif "description" not in field:
                undescribed.append(path + name)

    whole = RunConfig.model_json_schema()
    walk(whole, whole["$defs"], "")
    assert undescribed == []


def test_a_share_of_no_host_budget_is_refused() -> None:
    pools = [{"name": "chat", "harness": "chat", "share": 3.0}]
    source = {"name": "sums", "pool": "chat", "groups": 2, "environment": {"kind": "arithmetic"}}
    with pytest.raises(ValidationError, match="share 3 of no host_budget"):
        RunConfig.model_validate({"pools": pools, "sources": [source]})
    RunConfig.model_validate({"pools": pools, "sources": [source], "host_budget": 2})
