"""Names that may stand in a subject, an object key or a URL.

Promises:
- a `Name` holds only `[A-Za-z0-9_-]`, 1 to 128 characters, so it is always one NATS subject token and one
  object-key component: no `.`, `*`, `>`, `/`, space or control character can pass through an id;
- `Subject.text` and `Subject.parse` are inverse to each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import StringConstraints

NAME_PATTERN = r"^[A-Za-z0-9_-]{1,128}\Z"
_NAME = re.compile(NAME_PATTERN)
_ILLEGAL = re.compile(r"[^A-Za-z0-9_-]")
_SUBJECT = re.compile(r"^rl(\.[A-Za-z0-9_-]{1,128}){5}\Z")

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,128}$")]

WILDCARD = "*"


class BadName(ValueError):
    """A token that may not stand in a subject or an object key."""


def checked_name(value: str, what: str) -> str:
    """`value` itself if it is a legal name; raises `BadName` that names `what` otherwise."""
    if not _NAME.match(value):
        raise BadName(
            f"{what} {value[:140]!r} is not a legal name: use 1 to 128 of A-Z a-z 0-9 _ - (no dots, spaces or wildcards)"
        )
    return value


def legal_name(text: str) -> str:
    """A legal name made of any text that is not empty: what may not stand in one is a hyphen, and what is too long is cut."""
    return _ILLEGAL.sub("-", text)[:128]


@dataclass(frozen=True, slots=True)
class Subject:
    """`rl.<run>.<entity>.<fact>.<scope>.<id>`; scope is the source, pool or host that the fact belongs to."""

    run: str
    entity: str
    fact: str
    scope: str
    id: str

    def __post_init__(self) -> None:
        # Made for every event that is written or read: one match of the whole, and only what fails is looked at by token.
        if not _SUBJECT.match(self.text):
            for what in ("run", "entity", "fact", "scope", "id"):
                checked_name(getattr(self, what), f"subject token {what!r}")

    @property
    def text(self) -> str:
        return f"rl.{self.run}.{self.entity}.{self.fact}.{self.scope}.{self.id}"

    @classmethod
    def parse(cls, text: str) -> Subject:
        """Inverse of `text`; raises `BadName` on anything else."""
        tokens = text.split(".")
        if len(tokens) != 6 or tokens[0] != "rl":
            raise BadName(f"subject {text[:300]!r} is not rl.<run>.<entity>.<fact>.<scope>.<id>")
        return cls(*tokens[1:])


def subject_filter(run: str, type_: str = WILDCARD, scope: str = WILDCARD, id_: str = WILDCARD) -> str:
    """The subject filter for one event type (`sequence.finished`), or all with the default; `*` matches any."""
    entity, _, fact = (f"{WILDCARD}.{WILDCARD}" if type_ == WILDCARD else type_).partition(".")
    tokens = {"run": run, "entity": entity, "fact": fact, "scope": scope, "id": id_}
    for what, token in tokens.items():
        if token != WILDCARD:
            checked_name(token, f"subject token {what!r}")
    return "rl." + ".".join(tokens.values())


def stream_name(run: str) -> str:
    """The JetStream stream of a run."""
    return f"RL_{checked_name(run, 'run')}"


def dead_letter_subject(run: str, reader: str | None = None, seq: int | None = None) -> str:
    """`dlq.<run>.<reader>.<seq>`, where the dead letter of stream message `seq` stands that `reader` could not handle; without
    them the subject that all letters of the run (or of the reader) begin with. Outside `rl.`: no fold reads letters as facts."""
    prefix = f"dlq.{checked_name(run, 'run')}"
    if reader is None:
        return prefix
    prefix = f"{prefix}.{checked_name(reader, 'reader')}"
    return prefix if seq is None else f"{prefix}.{seq}"


MALFORMED = "malformed"
"""Reader, in a dead letter's subject, of what is no event: every reader."""


def harness_work(pool: str) -> str:
    """The work consumer of a pool's hosts."""
    return f"harness-{pool}"


def teacher_work(teacher: str, source: str) -> str:
    """The work consumer of a teacher and a source. With the name's length, as both may hold the hyphen between them."""
    return f"teacher-{len(teacher)}-{teacher}-{source}"


def sample_id(source: str, index: int) -> str:
    return checked_name(f"{source}-{index:06d}", "sample id")


def sample_index(sample: str, source: str) -> int:
    """Inverse of `sample_id`; raises `BadName` on a sample that is not of the source."""
    number = sample.removeprefix(f"{source}-")
    if not (number.isascii() and number.isdigit()) or sample_id(source, int(number[:18])) != sample:
        raise BadName(f"sample {sample[:140]!r} is not {source}-<index> in six digits or more")
    return int(number)


def sequence_id(sample: str, member: int) -> str:
    return checked_name(f"{sample}-{member}", "sequence id")


def attempt_id(sequence: str, attempt: int) -> str:
    return checked_name(f"{sequence}-a{attempt}", "attempt id")
