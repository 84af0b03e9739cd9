"""The published contract: complete, fresh, and true of every message that a run really wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from jsonschema import Draft7Validator, Draft202012Validator
from pydantic import BaseModel
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7, DRAFT202012
from typer.testing import CliRunner

from schemas.config import RunConfig
from schemas.documents import DEAD_LETTER, ROUTES, asyncapi, documents, events_schema, rendered
from schemas.envelope import EXPECTED_LAST, encode, new_event
from schemas.facts import (
    FACTS,
    BatchReplanned,
    Fact,
    LimitChanged,
    SequenceFailed,
    SequenceQuarantined,
    SequenceScored,
)
from schemas.names import BadName, dead_letter_subject
from schemas.plan import Plan
from services.cli.main import app
from tests.recorded import demo_messages
from tests.unit.test_envelope import ANY_FACT

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "schemas" / "published"
ASYNCAPI, EVENTS = asyncapi(), events_schema()
REGISTRY = Registry().with_resources(
    [
        ("urn:asyncapi", Resource(contents=ASYNCAPI, specification=DRAFT7)),
        ("urn:events", Resource(contents=EVENTS, specification=DRAFT202012)),
    ]
)


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type, and those in their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models(field.annotation)
    for each in get_args(annotation):
        yield from models(each)


def message_validator(type_: str) -> tuple[Draft7Validator, Draft7Validator]:
    """(headers, body) of the AsyncAPI document's message."""
    at = f"urn:asyncapi#/components/messages/{type_}"
    head, body = ({"$ref": f"{at}/{part}"} for part in ("headers", "payload"))
    return Draft7Validator(head, registry=REGISTRY), Draft7Validator(body, registry=REGISTRY)


HEADERS, BODIES = {}, {}
for _type in (*FACTS, DEAD_LETTER):
    HEADERS[_type], BODIES[_type] = message_validator(_type)
EVENT_BODIES = {
    type_: Draft202012Validator({"$ref": f"urn:events#/$defs/{type_}"}, registry=REGISTRY) for type_ in FACTS
}


@pytest.mark.parametrize("root", [*FACTS.values(), Plan, RunConfig], ids=lambda model: model.__name__)
def test_every_field_is_described(root: type[BaseModel]) -> None:
    # A section of the configuration is described by its own docstring.
    bare = {
        f"{model.__name__}.{name}"
        for model in models(root)
        for name, field in model.model_fields.items()
        if not field.description and not (root is RunConfig and next(models(field.annotation), None))
    }
    assert bare == set()
    assert [model.__name__ for model in models(root) if not model.__doc__] == []


@pytest.mark.parametrize("name", sorted(documents()))
def test_the_published_documents_are_those_of_this_code(name: str) -> None:
    file = PUBLISHED / name
    assert file.exists(), "run: packtrain schema write schemas/published"
    assert file.read_text(encoding="utf-8") == rendered(documents()[name]), (
        f"{file.relative_to(ROOT)} is stale; run: packtrain schema write schemas/published"
    )


def test_nothing_else_is_published() -> None:
    assert {file.name for file in PUBLISHED.iterdir()} == set(documents())


def test_commands_print_and_write_the_documents(tmp_path: Path) -> None:
    commands = {"asyncapi": "asyncapi.json", **{n: f"{n}.schema.json" for n in ("events", "plan", "config")}}
    assert set(commands.values()) == set(documents())
    for command, name in commands.items():
        printed = CliRunner().invoke(app, ["schema", command])
        assert (printed.exit_code, printed.stdout) == (0, rendered(documents()[name]))
    written = CliRunner().invoke(app, ["schema", "write", str(tmp_path / "new" / "place")])
    assert written.exit_code == 0
    assert {f.name for f in (tmp_path / "new" / "place").iterdir()} == set(documents())
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, ["schema", "write", str(tmp_path / "file")])
    assert refused.exit_code == 2
    assert "cannot be written" in refused.stderr


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "$ref" and isinstance(each, str):
                yield each
            else:
                yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


@pytest.mark.parametrize("name", sorted(documents()))
def test_every_reference_leads_to_something_in_the_same_document(name: str) -> None:
    document = documents()[name]
    found = set(references(document))
    assert found
    for reference in found:
        at: Any = document
        assert reference.startswith("#/")
        for token in reference[2:].split("/"):
            at = at[token]


def test_no_reference_of_the_asyncapi_document_hides_its_neighbours() -> None:
    def crowded(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            if "$ref" in value and len(value) > 1:
                yield value
            for each in value.values():
                yield from crowded(each)
        elif isinstance(value, list):
            for each in value:
                yield from crowded(each)

    assert list(crowded(ASYNCAPI)) == []
    assert list(crowded(EVENTS)), "pydantic writes none any more: this test and _draft_07 may go"


def test_every_fact_has_one_channel_a_publisher_and_a_reader() -> None:
    assert set(ROUTES) == set(FACTS)
    channels, operations = ASYNCAPI["channels"], ASYNCAPI["operations"]
    assert set(channels) == {*FACTS, DEAD_LETTER}
    assert set(operations) == {
        *(f"read.{t}" for t in FACTS), *(f"publish.{t}" for t in FACTS), f"read.{DEAD_LETTER}",
    }  # fmt: skip
    for channel in channels.values():
        assert set(re.findall(r"{(\w+)}", channel["address"])) == set(channel["parameters"])
    for type_ in FACTS:
        assert operations[f"publish.{type_}"]["action"] == "send"
        assert operations[f"read.{type_}"]["action"] == "receive"


@given(fact=ANY_FACT)
def test_an_address_filled_from_the_body_is_the_subject(fact: Fact) -> None:
    channel, body = ASYNCAPI["channels"][fact.type], fact.model_dump(mode="json")
    # What the body does not hold under the parameter's name is what the event is about.
    filled = {name: fact.id() for name in channel["parameters"]} | {"run": body.get("run", "r")}
    for name in channel["parameters"]:
        location = ASYNCAPI["components"]["parameters"][name].get("location")
        if location:
            filled[name] = body[location.removeprefix("$message.payload#/")]
    try:
        subject = fact.subject(filled["run"]).text
    except BadName:
        return  # two names of full length make an id that is none: `encode` refuses it
    assert channel["address"].format(**filled) == subject


def test_the_address_of_dead_letters_is_their_subject() -> None:
    address = ASYNCAPI["channels"][DEAD_LETTER]["address"]
    assert address.format(run="r", reader="grader", position=7) == dead_letter_subject("r", "grader", 7)


def test_every_recorded_message_fits_its_channel() -> None:
    types = set()
    for message in demo_messages():
        type_ = message.headers["ce-type"]
        types.add(type_)
        body = json.loads(message.body)
        HEADERS[type_].validate(message.headers)
        BODIES[type_].validate(body)
        EVENT_BODIES[type_].validate(body)
    # The recorded run went well.
    rare = (LimitChanged, SequenceFailed, SequenceScored, SequenceQuarantined, BatchReplanned)
    assert types == set(FACTS) - {fact.type for fact in rare}


@given(fact=ANY_FACT)
def test_whatever_is_published_fits_the_documents(fact: Fact) -> None:
    try:
        message = encode(new_event(fact, "test"), "r")
    except ValueError:
        return  # too large, or an id too long: not published
    HEADERS[fact.type].validate(message.headers)
    BODIES[fact.type].validate(json.loads(message.body))
    EVENT_BODIES[fact.type].validate(json.loads(message.body))


def test_what_a_reader_refuses_does_not_fit_the_documents() -> None:
    message = next(m for m in demo_messages() if m.headers["ce-type"] == "sequence.finished")
    body, headers = json.loads(message.body), message.headers
    for name in ("ce-id", "ce-typeversion", EXPECTED_LAST):
        assert not HEADERS["sequence.finished"].is_valid({k: v for k, v in headers.items() if k != name})
    assert not HEADERS["sequence.finished"].is_valid({**headers, "ce-type": "sample.graded"})
    assert not HEADERS["sequence.finished"].is_valid({**headers, "ce-typeversion": "4"})
    wrong = [
        {**body, "reward": "much"},
        {**body, "more": 1},
        {**body, "sequence": "a.b"},
        {**body, "payload": {**body["payload"], "key": "../x"}},
        {**body, "contexts": [{**body["contexts"][0], "tokens": 0}]},
        {k: v for k, v in body.items() if k != "payload"},
    ]
    for each in wrong:
        assert not BODIES["sequence.finished"].is_valid(each)
        assert not EVENT_BODIES["sequence.finished"].is_valid(each)


def test_the_page_and_the_document_say_the_same() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    table = re.findall(r"^\| `([a-z]+\.[a-z]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    named = {"agent-loop host": "host", "pool or source": "limited"}
    said = {type_: (named.get(scope, scope), who) for type_, scope, _, who in table}
    assert said == {type_: (route.scope, route.publisher) for type_, route in ROUTES.items()}
