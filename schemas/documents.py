"""The contract as documents, for readers and writers that have none of our code: JSON Schemas and an AsyncAPI 3.0 document.

Promises:
- `documents` is a pure function of the models: the same code gives the same bytes, and what is committed under
  `schemas/published` is what it gives;
- every event type has one channel, of which the address, its parameters filled in, is the subject of the fact;
- every reference leads to something in the same document.

The schemas say what a field may hold; what must hold between fields (`schemas.facts` checks it) is said in words.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from schemas.config import RunConfig
from schemas.envelope import CLOUDEVENTS, CONTENT_TYPE, EXPECTED_LAST
from schemas.facts import ALL, FACTS, MAX_BODY, Fact
from schemas.names import NAME_PATTERN
from schemas.plan import Plan
from schemas.upcasters import UPCASTERS

CONTRACT = "3.0.0"
"""Version of the documents. Raise the first number when a fact's version is raised, the second when something is added."""
JSON_SCHEMA = "https://json-schema.org/draft/2020-12/schema"
DEAD_LETTER = "dead.letter"
"""The one channel that is no fact's."""
_HEADERS = "event.headers"
_NAME = NAME_PATTERN.replace(r"\Z", "$")

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """Who publishes a fact, and the parameters of its subject: `rl.{run}.<type>.{scope}.{id}`; scope is `all` or a parameter."""

    publisher: str
    scope: str
    id: str

    def address(self, type_: str) -> str:
        scope = ALL if self.scope == ALL else f"{{{self.scope}}}"
        return f"rl.{{run}}.{type_}.{scope}.{{{self.id}}}"

    def parameters(self) -> list[str]:
        return sorted({"run", self.scope, self.id} - {ALL})


ROUTES: dict[str, Route] = {
    "run.started": Route("launcher", ALL, "run"),
    "sequence.dispatched": Route("dispatcher or launcher", "source", "sequence"),
    "sequence.opened": Route("agent-loop host", "pool", "attempt"),
    "sequence.verified": Route("harness host", "host", "attempt"),
    "sequence.finished": Route("agent-loop host or launcher", "source", "sequence"),
    "sequence.failed": Route("agent-loop host or launcher", "source", "sequence"),
    "sequence.scored": Route("teacher", "source", "scored"),
    "sequence.quarantined": Route("packer", "source", "sequence"),
    "sample.completed": Route("sampler", "source", "sample"),
    "sample.graded": Route("grader", "source", "graded"),
    "sample.accepted": Route("sampler", "source", "sample"),
    "sample.rejected": Route("sampler or hook", "source", "sample"),
    "sample.shaped": Route("sampler or hook", "source", "graded"),
    "batch.yielded": Route("sampler", ALL, "step"),
    "batch.replanned": Route("sampler", ALL, "replan"),
    "window.packed": Route("packer", ALL, "window"),
    "batch.consumed": Route("trainer rank 0", ALL, "step"),
    "step.trained": Route("trainer rank 0", ALL, "step"),
    "policy.published": Route("trainer rank 0", ALL, "step"),
    "run.stopped": Route("dispatcher", ALL, "run"),
    "limit.changed": Route("command line", "limited", "change"),
}
_PARAMETERS: dict[str, tuple[str, str]] = {
    "run": ("run id, 1 to 128 of A-Z a-z 0-9 _ -, as every parameter here", "demo"),
    "source": ("source id: a task distribution of the run's configuration", "arithmetic"),
    "pool": ("pool id: harness hosts of one codebase", "chat"),
    "host": ("name of an agent-loop host process", "agent-loop-0"),
    "limited": ("pool id or source id, as the body's name", "chat"),
    "change": ("<of>-<number>, of the body's fields", "pool-1"),
    "sample": ("sample id: <source>-<index in six digits or more>", "arithmetic-000012"),
    "graded": ("sample id; -r<revision> follows where the body's revision is above 0", "arithmetic-000012-r1"),
    "sequence": ("sequence id: <sample>-<member>", "arithmetic-000012-3"),
    "attempt": ("attempt id: <sequence>-a<attempt>, of the body's sequence and attempt", "arithmetic-000012-3-a1"),
    "scored": ("<sequence>-<teacher>, of the body's fields", "arithmetic-000012-3-large"),
    "step": ("number of the batch, six digits or more with leading zeros", "000004"),
    "replan": ("<step>-r<revision>, of the body's fields", "000004-r1"),
    "window": ("<step>-d<dp>-c<cp>-p<pp>-m<microbatch>, of the body's fields", "000004-d0-c0-p0-m2"),
    "reader": ("name of the work consumer that gave the message up, or `malformed`", "grader"),
    "position": ("stream sequence of the original message", "1207"),
}  # fmt: skip
_READING = f"""
The event log of a run is one JetStream stream, `RL_<run>`: facts on `rl.<run>.<type>.<scope>.<id>`, dead letters on
`dlq.<run>.>`. It keeps everything: a consumer that joins late, or after the run has ended, sees all of it. `x-jetstream`
of a channel has the stream and the subject filter of all its events. Streams `KV_RL_<run>` are services' own.

**Reading in order**, without a trace on the server: create a pull consumer on the stream with
`{{"deliver_policy": "all", "ack_policy": "none", "filter_subject": "rl.<run>.>", "inactive_threshold": 60000000000, "mem_storage": true, "num_replicas": 1}}`
(`filter_subjects` for several; `"deliver_policy": "by_start_sequence", "opt_start_seq": N` or `"by_start_time"` to begin later)
and pull. The consumer sequence in each message's reply subject counts up by one: at a gap, or when the server has
forgotten the consumer, make a new one from the last stream sequence + 1. NATS clients call this an ordered consumer.
Where the server has users, come as `reader`, with the inbox prefix `_INBOX.reader`, and give the consumer a `name`.

**Reading with a place that is kept**: `{{"durable_name": "mine", "deliver_policy": "all", "ack_policy": "explicit", "ack_wait": 30000000000, "filter_subject": ...}}`.
Acknowledge when the work on a message is done. Delivery is at least once: the same `ce-id` may come again. Two
processes with one durable name share the messages, so take a name of your own; `nats consumer ls RL_<run>` lists those in use.

**The end**: `run.stopped` is the last decision of a run, but not always its last message. A reader has all when
it has seen that event and the message's `num_pending` is 0.

Rules that a reader must keep:
- a `ce-type` that this document does not have, or a `ce-typeversion` above the newest here: skip it and count it, never guess;
- a message without `{EXPECTED_LAST}` was not checked by the broker and may be a copy: it is no event;
- the first valid event on a subject stands, whatever comes there later;
- a message is valid when its headers and body fit the schemas here and its subject is the channel's address with what
  the body says. Others are skipped and counted; the run's own services copy them to the dead letters;
- headers that are not described are ignored, and a malformed `traceparent` too;
- `key`s lead into the run's object store, relative to its root; `crc32c` says whether what came is what was meant.
  Payloads are safetensors files.
"""
_PUBLISHING = f"""
**Publishing.** Each fact is decided once, by the service that its channel names; whoever replaces that service (a grader
in another language) publishes on the subject of the channel's address, with `{EXPECTED_LAST}: 0`, `Nats-Msg-Id` = `ce-id`,
and `Nats-Expected-Stream: RL_<run>`, and waits for the acknowledgement. Error 10071 or 10164, or `duplicate` in the
acknowledgement: something stands there. Read it: an event with your `ce-id` is your own (the acknowledgement was lost);
another event is the winner, and you go on with that; a message that is no event does not count, so publish again with
its stream sequence in the header. No acknowledgement: publish again, with the same `ce-id`. Publish before you
acknowledge what you decided upon, and name that event in `ce-causationid`. A body is at most {MAX_BODY} bytes.
"""
_HERE = {name: name for name in ("source", "pool", "host", "sample", "sequence")} | {"limited": "name"}
"""Parameters that are fields of the body, and which."""


def documents() -> dict[str, Document]:
    """All documents, by file name."""
    return {
        "asyncapi.json": asyncapi(),
        "events.schema.json": events_schema(),
        "plan.schema.json": _alone(Plan, "The plan of a batch, the object that `batch.yielded` refers to."),
        "config.schema.json": _alone(RunConfig, "The configuration of a run, TOML."),
    }


def rendered(document: Document) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def events_schema() -> Document:
    """One JSON Schema: `$defs` has the body of every event under its type, and what they share under its name.

    Against the whole document, the body of any event validates.
    """
    definitions = _definitions("#/$defs/")
    return {
        "$schema": JSON_SCHEMA,
        "title": "Bodies of the events of a run",
        "description": f"JSON, at most {MAX_BODY} bytes. The `ce-type` header names the definition.",
        "anyOf": [{"$ref": f"#/$defs/{type_}"} for type_ in FACTS],
        "$defs": definitions,
    }


def asyncapi() -> Document:
    """The AsyncAPI 3.0.0 document; see the module's promises."""
    schemas = {name: _draft_07(each) for name, each in _definitions("#/components/schemas/").items()}
    channels = {type_: _channel(type_) for type_ in FACTS}
    operations: Document = {}
    for type_ in FACTS:
        operations[f"read.{type_}"] = _operation(type_, "receive", "Any consumer; see the rules of readers.")
        operations[f"publish.{type_}"] = _operation(
            type_, "send", f"Published by: {ROUTES[type_].publisher}."
        )
    channels[DEAD_LETTER] = {
        "address": "dlq.{run}.{reader}.{position}",
        "title": "Dead letters",
        "description": "Messages that no reader could use, each with its reason. In the run's stream too; they are no facts.",
        "messages": {DEAD_LETTER: {"$ref": f"#/components/messages/{DEAD_LETTER}"}},
        "parameters": {name: {"$ref": f"#/components/parameters/{name}"} for name in ("run", "reader", "position")},
        "x-jetstream": {"stream": "RL_{run}", "filter_subject": "dlq.{run}.>"},
    }  # fmt: skip
    operations[f"read.{DEAD_LETTER}"] = _operation(DEAD_LETTER, "receive", "Whoever looks after the run.")
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Events of a packtrain run",
            "version": CONTRACT,
            "description": f"{_READING.strip()}\n\n{_PUBLISHING.strip()}",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "servers": {"broker": _SERVER},
        "channels": channels,
        "operations": operations,
        "components": {
            "parameters": {name: _parameter(name) for name in _PARAMETERS},
            "messages": {**{type_: _message(type_) for type_ in FACTS}, DEAD_LETTER: _LETTER},
            "schemas": {_HEADERS: _every_header(), **schemas},
            "securitySchemes": {
                "token": {
                    "type": "apiKey",
                    "in": "password",
                    "description": "The server's token, sent as `auth_token` when a client connects; whoever runs the server has it in a file.",
                }
            },
        },
    }


def _channel(type_: str) -> Document:
    route = ROUTES[type_]
    return {
        "address": route.address(type_),
        "title": type_,
        "description": f"{_words(FACTS[type_])} Each subject holds one such event at most.",
        "messages": {type_: {"$ref": f"#/components/messages/{type_}"}},
        "parameters": {name: {"$ref": f"#/components/parameters/{name}"} for name in route.parameters()},
        "x-jetstream": {"stream": "RL_{run}", "filter_subject": f"rl.{{run}}.{type_}.>"},
    }


def _operation(type_: str, action: str, description: str) -> Document:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{type_}"},
        "description": description,
        "messages": [{"$ref": f"#/channels/{type_}/messages/{type_}"}],
        # JetStream consumers share work by their name; core NATS's queue groups are not used.
        "bindings": {"nats": {"bindingVersion": "0.1.0"}},
    }


def _message(type_: str) -> Document:
    fact, versions = FACTS[type_], [str(version) for version in range(1, FACTS[type_].version + 1)]
    older = [
        f"{version}: {inspect.getdoc(UPCASTERS[type_, int(version)]) or ''}" for version in versions[:-1]
    ]
    return {
        "name": type_,
        "title": fact.__name__,
        "summary": _words(fact),
        "description": " ".join([f"Version {versions[-1]}.", *(f"Older: version {each}" for each in older)]),
        "contentType": CONTENT_TYPE,
        "correlationId": {"location": "$message.header#/ce-correlationid"},
        "headers": _headers(type_, versions),
        "payload": {"$ref": f"#/components/schemas/{type_}"},
    }  # fmt: skip


def _headers(type_: str, versions: list[str]) -> Document:
    own = {"ce-type": {"const": type_}, "ce-typeversion": {"enum": versions}}
    return {"allOf": [{"$ref": f"#/components/schemas/{_HEADERS}"}, {"type": "object", "properties": own}]}


def _every_header() -> Document:
    """The headers of every event; what else stands there (the broker's own) may be ignored."""
    required: Document = {
        "content-type": _text("media type of the body", const=CONTENT_TYPE),
        "ce-specversion": _text("version of CloudEvents", const=CLOUDEVENTS),
        "ce-id": _text("id of the event, unique in the run", minLength=1),
        "ce-type": _text("event type"),
        "ce-source": _text("the process that published it"),
        "ce-time": _text("when it was decided, RFC 3339 with a time zone", format="date-time"),
        "ce-subject": _text("id of what it is about: the last token of the NATS subject", pattern=_NAME),
        "ce-typeversion": _text("version of the body, a whole number from 1"),
        EXPECTED_LAST: _text(
            "compare-and-set, kept by the broker: 0, or the stream sequence of the last message on the subject when no event stands there",
            pattern="^[0-9]+$",
        ),
    }
    optional: Document = {
        "ce-causationid": _text("`ce-id` of the event that it was decided on; missing on the first of a run"),
        "ce-correlationid": _text("the sample, or the step, whose life it belongs to"),
        "traceparent": _text("W3C Trace Context; ignore one that is malformed"),
        "Nats-Msg-Id": _text("the same as `ce-id`: the broker's short-term duplicate detection"),
    }
    return {
        "type": "object",
        "description": "Headers of every event. Others may stand there too.",
        "properties": {**required, **optional},
        "required": list(required),
    }


def _text(description: str, **more: Any) -> Document:
    return {"type": "string", "description": description, **more}


def _parameter(name: str) -> Document:
    description, example = _PARAMETERS[name]
    where = {"location": f"$message.payload#/{_HERE[name]}"} if name in _HERE else {}
    return {"description": description, "examples": [example], **where}


_SERVER: Document = {
    "host": "{host}:{port}",
    "protocol": "nats",
    "description": "nats-server with JetStream. `packtrain demo` and `run` start one on a free loopback port unless one is given.",
    "variables": {
        "host": {"description": "the server's address", "default": "127.0.0.1"},
        "port": {"description": "its client port", "default": "4222"},
    },
    "security": [{"$ref": "#/components/securitySchemes/token"}],
}
_LETTER: Document = {
    "name": DEAD_LETTER,
    "title": "Dead letter",
    "summary": "A message that a reader could not use: its body, and its headers but for those that begin with `Nats-`.",
    "description": "The last message on the subject is the letter's state. `packtrain dlq` lists letters, retries and drops them.",
    "headers": {
        "type": "object",
        "properties": {
            "dlq-state": _text("what has become of it", enum=["buried", "retried", "dropped"]),
            "dlq-change": _text("id of the change that made this the letter's state"),
            "dlq-reason": _text("why"),
            "dlq-subject": _text("NATS subject of the original, at most 500 bytes"),
            "dlq-seq": _text("stream sequence of the original", pattern="^[0-9]+$"),
            "dlq-deliveries": _text("how often the reader was given it", pattern="^[0-9]+$"),
            "dlq-bytes": _text("size of the original's body; the letter's is cut when the whole would not fit", pattern="^[0-9]+$"),
        },
        "required": ["dlq-state", "dlq-reason", "dlq-subject", "dlq-seq", "dlq-deliveries", "dlq-bytes"],
    },
    "payload": {"description": "The original's body, whatever it was.", "contentEncoding": "binary"},
}  # fmt: skip


def _words(model: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(model) or "").split())


def _alone(model: type[BaseModel], description: str) -> Document:
    schema = _plain(model.model_json_schema())
    return {"$schema": JSON_SCHEMA, **schema, "description": description}


def _definitions(prefix: str) -> Document:
    """Every fact's body under its type, and the models in them under their names; references begin with `prefix`."""
    models: list[type[Fact]] = list(FACTS.values())
    # What a reader accepts, not what a writer gives: a field with a default may be missing.
    _, whole = models_json_schema(
        [(model, "validation") for model in models], ref_template=prefix + "{model}"
    )
    types = {model.__name__: type_ for type_, model in FACTS.items()}
    named = cast("dict[str, Document]", whole["$defs"])
    found = {types.get(name, name): _plain(each) for name, each in named.items()}
    return {name: found[name] for name in [*FACTS, *(n for n in sorted(found) if n not in FACTS)]}


def _plain(schema: Document) -> Document:
    """Without the titles that repeat a property's name, and with descriptions on one line."""
    plain: Document = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs"):
            named = cast("dict[str, Document]", value)
            plain[key] = {name: _plain(each) for name, each in named.items()}
            if key == "properties":
                for each in plain[key].values():
                    each.pop("title", None)
        elif key == "description":
            plain[key] = " ".join(value.split())
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            plain[key] = _plain(cast("Document", value))
        elif key in ("anyOf", "allOf", "oneOf"):
            plain[key] = [_plain(each) for each in cast("list[Document]", value)]
        else:
            plain[key] = value
    return plain


def _draft_07(schema: Any) -> Any:
    """The same for JSON Schema draft 7, which AsyncAPI builds on: there, a `$ref` hides what stands beside it."""
    if isinstance(schema, list):
        return [_draft_07(each) for each in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    given = {key: _draft_07(value) for key, value in cast("Document", schema).items()}
    if "$ref" in given and len(given) > 1:
        return {"allOf": [{"$ref": given.pop("$ref")}], **given}
    return given
