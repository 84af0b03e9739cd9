"""What a grader may answer of a group, and what becomes of the group's rewards.

Promises:
- an answer names every finished sequence of the group exactly once and no other, with a quality in (0, 1]; anything else is
  `Unusable`, whose message says what is wrong in one line, and changes no reward;
- a confirmed hack has reward 0, every other sequence keeps its verifier's; qualities change no reward, they ride along for the hooks
  (advantage redistribution, MiMo Eq. 3);
- every text, whatever a model or a program made of it, becomes a fact that is valid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, cast

from pydantic import Field, ValidationError, field_validator

from schemas.facts import MAX_REWARD, SampleCompleted, SampleGraded
from schemas.names import legal_name
from schemas.payload import Frozen, Ref

MAX_ANSWER = 1 << 20
"""Bytes of an answer as text."""
MAX_REASON = 4000
LAG = "lag: decided on the original rewards"


class Unusable(ValueError):
    """An answer that says nothing about the group; the message is one line."""


class Verdict(Frozen):
    """On one sequence."""

    sequence: str = Field(max_length=256, description="the sequence's id")
    quality: float = Field(
        gt=0, le=1, description="how good it is among those that passed: above 0, up to 1 for the best"
    )
    hack: bool = Field(
        description="whether it is beyond doubt that it got its reward without solving the task"
    )
    reason: str = Field(max_length=MAX_REASON, description="why, in a sentence or two")

    @field_validator("reason")
    @classmethod
    def _text(cls, value: str) -> str:
        value.encode()  # half a surrogate pair, which a Python grader may give, fits in no report
        return value


class Answer(Frozen):
    """On a whole group: what judges and programs write as JSON."""

    sequences: tuple[Verdict, ...] = Field(
        max_length=1024, description="one verdict on each sequence of the group"
    )


ANSWER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sequences": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "sequence": {"type": "string"},
                    "quality": {"type": "number", "description": "over 0, up to 1"},
                    "hack": {"type": "boolean"},
                    "reason": {"type": "string"},
                },
                "required": ["sequence", "quality", "hack", "reason"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["sequences"],
    "additionalProperties": False,
}
"""Of `Answer`, in the subset of JSON Schema that servers take as a response format. It bounds no number and no length, as not
every server knows how to: what is out of bounds is refused here."""


@dataclass(frozen=True, slots=True)
class Graded:
    """What a grader made of a group of n sequences: rewards [n], and where its answer is one, qualities and hacks [n]."""

    rewards: tuple[float, ...]
    quality: tuple[float, ...] = ()
    hacks: tuple[bool, ...] = ()
    answer: Answer | None = None


def parse(text: str | bytes) -> Answer:
    """The answer that a judge or a program wrote: JSON of exactly `Answer`, nothing around it. Raises Unusable."""
    size = len(text)
    if size > MAX_ANSWER:
        raise Unusable(f"it is longer than {MAX_ANSWER} bytes")
    try:
        return Answer.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise Unusable(_told(error)) from None


def graded(completed: SampleCompleted, answer: Answer) -> Graded:
    """The group by the answer. Raises Unusable."""
    named = Counter(verdict.sequence for verdict in answer.sequences)
    for sequence, times in named.items():
        if times > 1:
            raise Unusable(f"it judges sequence {sequence[:100]!r} {times} times")
        if sequence not in completed.sequences:
            raise Unusable(f"it judges {sequence[:100]!r}, which is no sequence of the group")
    missing = [sequence for sequence in completed.sequences if sequence not in named]
    if missing:
        raise Unusable(
            f"it does not judge {missing[0]!r}, one of {len(missing)} sequences that it leaves out"
        )
    by = {verdict.sequence: verdict for verdict in answer.sequences}
    verdicts = [by[sequence] for sequence in completed.sequences]
    return Graded(
        tuple(0.0 if v.hack else r for v, r in zip(verdicts, completed.rewards, strict=True)),
        tuple(v.quality for v in verdicts),
        tuple(v.hack for v in verdicts),
        answer,
    )


def understood(completed: SampleCompleted, said: object) -> Graded:
    """The group by what a Python grader returned: an `Answer`, the same as a dictionary, or its rewards in member order.

    Raises Unusable.
    """
    if isinstance(said, Mapping):
        try:
            said = Answer.model_validate(said)
        except ValidationError as error:
            raise Unusable(_told(error)) from None
    if isinstance(said, Answer):
        return graded(completed, said)
    try:
        # Text is a row of characters: not meant as rewards, whatever the group's size.
        if isinstance(said, (str, bytes)):
            raise TypeError("text is no list of rewards")
        # No more than one too many of them: a generator may have no end.
        given = islice(cast("Iterable[Any]", said), len(completed.rewards) + 1)
        rewards = tuple(float(reward) for reward in given)
    # Its items may raise anything, being a plug-in's.
    except Exception as error:
        raise Unusable(f"it gave no rewards: {type(error).__name__}: {error}") from None
    if len(rewards) != len(completed.rewards):
        most = len(completed.rewards)
        count = f"more than {most}" if len(rewards) > most else str(len(rewards))
        raise Unusable(f"gave {count} rewards for {most} sequences")
    try:
        SampleGraded(source=completed.source, sample=completed.sample, grader="x", rewards=rewards)
    except ValidationError:
        raise Unusable(
            f"gave rewards that are not finite numbers of at most {MAX_REWARD:g}: {list(rewards)[:8]}"
        ) from None
    return Graded(rewards)


def graded_fact(
    grader: str,
    completed: SampleCompleted,
    result: Graded,
    revision: int = 0,
    *,
    report: Ref | None = None,
    attempts: int = 0,
    seconds: float = 0.0,
    cost: float = 0.0,
) -> SampleGraded:
    """`sample.graded` with an answer; `grader` is a kind as configured, `seconds` and `cost` what its tries took."""
    return SampleGraded(
        source=completed.source, sample=completed.sample, revision=revision, grader=legal_name(grader), rewards=result.rewards,
        quality=result.quality, hacks=result.hacks, report=report, attempts=attempts, seconds=seconds, cost=cost,
    )  # fmt: skip


def kept_fact(
    grader: str,
    completed: SampleCompleted,
    reason: str,
    *,
    attempts: int = 0,
    seconds: float = 0.0,
    cost: float = 0.0,
) -> SampleGraded:
    """`sample.graded` with the original rewards, and why. attempts: 0 says that an answer may yet come (`open_still`)."""
    return SampleGraded(
        source=completed.source, sample=completed.sample, grader=legal_name(grader), rewards=completed.rewards,
        fallback=line(reason), attempts=attempts, seconds=seconds, cost=cost,
    )  # fmt: skip


def open_still(standing: SampleGraded) -> bool:
    """Whether a group with this revision 0 may yet get an answer: it went on without one, and no try's failure decided that."""
    return standing.fallback is not None and standing.attempts == 0


def line(text: str, most: int = 500) -> str:
    """One printable line of at most so many characters: what others write may hold control characters, and half a
    surrogate pair, which no JSON holds."""
    plain = "".join(c if c.isprintable() else " " for c in text[: 4 * most].encode(errors="replace").decode())
    return " ".join(plain.split())[:most] or "no reason"


def cut(turns: list[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """(role, text) of each turn, shortened to `most` characters by leaving out the middle of the whole, which is said in its
    place as a turn of role `omitted`.

    What is left is the first `most - most // 2` and the last `most // 2` characters.
    """
    ends = list(accumulate(len(text) for _, text in turns))
    total = ends[-1] if ends else 0
    if total <= most:
        return turns
    first, last = most - most // 2, total - most // 2
    head: list[tuple[str, str]] = []
    tail: list[tuple[str, str]] = []
    for (role, text), end in zip(turns, ends, strict=True):
        start = end - len(text)
        if start < first:
            head.append((role, text[: first - start]))
        if end > last:
            tail.append((role, text[max(0, last - start) :]))
    told = f"[{last - first} characters of {total} are left out here]"
    return [*head, ("omitted", told), *tail]


def _told(error: ValidationError) -> str:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    said = "; ".join(
        f"{'.'.join(map(str, one['loc']))}: {one['msg']}".removeprefix(": ") for one in errors[:3]
    )
    more = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
    return line(f"it is no answer: {said}{more}")
