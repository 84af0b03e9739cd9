"""The documents name what the code has: every event, every option of a run, and no file that is not there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from pipeline.batch.layouts import LAYOUTS
from pipeline.batch.windows import PACKED
from pipeline.config import loads
from pipeline.graders import base as graders
from pipeline.retention.core import REASONS
from pipeline.signal import hooks, rules
from pipeline.store.policies import KINDS
from pipeline.vision.owners import IMAGE_ARRAYS
from schemas.config import Batch, Packer, Retention, Vision
from schemas.facts import FACTS
from schemas.payload import COLUMNS
from schemas.signal import Grader, Mixer, Teacher
from schemas.sources import Accept
from services.cli.check import faults
from services.cli.main import _OPTIONS
from services.process import SERVICES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SIGNAL = ROOT / "docs" / "signal.md"


def test_every_event_is_in_the_table_and_no_other() -> None:
    table = re.findall(r"^\| `([a-z]+\.[a-z]+)` \|", (ROOT / "docs" / "events.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(FACTS)


def test_every_option_and_service_is_described() -> None:
    text = (ROOT / "docs" / "running.md").read_text()
    assert [option for option, _ in _OPTIONS if option not in text] == []
    assert [name for name in SERVICES if name not in text] == []


def test_the_configuration_of_the_signal_is_one() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", SIGNAL.read_text(), re.DOTALL)
    assert faults(loads(text, "docs/signal.md")) == []


@pytest.mark.parametrize("page", ["porter.md", "images.md"])
def test_the_configurations_of_pages_are_ones(page: str) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert faults(loads(text, page)) == []


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("porter.md", {*LAYOUTS, *PACKED, *COLUMNS, *Batch.model_fields, *Packer.model_fields}),
        ("images.md", {*IMAGE_ARRAYS, *Vision.model_fields}),
        ("retention.md", {*Retention.model_fields, *REASONS}),
        ("store.md", set(KINDS)),
    ],
)
def test_layouts_arrays_and_sections_are_described(page: str, names: set[str]) -> None:
    text = (ROOT / "docs" / page).read_text()
    told = {*re.findall(r"`([\w.-]+)`", text), *re.findall(r"^(\w+) = ", text, re.MULTILINE)}
    # A key may be told with its section.
    told |= {each.rpartition(".")[2] for each in told if not each.startswith("images.")}
    assert sorted(names - told) == []


def test_every_option_of_the_signal_is_described() -> None:
    text = SIGNAL.read_text()
    names = {*hooks.BUILT_IN, *rules.BUILT_IN, graders.NONE, *graders.BUILT_IN}
    modules = {
        target.partition(":")[0] for each in (hooks, rules, graders) for target in each.BUILT_IN.values()
    }
    options = {
        field
        for module in map(importlib.import_module, sorted(modules))
        for model in vars(module).values()
        if isinstance(model, type) and issubclass(model, BaseModel) and model.__module__ == module.__name__
        for field in model.model_fields
        if not model.__name__.startswith("_")
    }
    keys = {field for section in (Grader, Mixer, Teacher, Accept) for field in section.model_fields}
    told = set(re.findall(r"`(?:accept\.)?(\w+)(?: = [^`]+)?`", text))
    assert sorted((names | options | keys) - {"name"} - told) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_test_that_a_page_names_is_there() -> None:
    named = [
        (page.name, file, test)
        for page in PAGES
        for file, test in re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", page.read_text())
    ]
    assert named
    missing = [
        one for one in named if not re.search(rf"def {one[2]}\(", (ROOT / "tests" / one[1]).read_text())
    ]
    assert missing == []
