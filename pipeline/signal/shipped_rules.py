"""The rules that ship. See `pipeline.signal.rules`.

Promises: each takes time linear in what it sees; of a message that follows a turn it sees the first and the last 8 Ki
characters, where tools say how they ended.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pipeline.signal.rules import Judged, Results, Turn

_EDGE = 8 << 10


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class MalformedCall:
    """A tool call that does not parse."""

    judges: Judged = "turn"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        _Options.model_validate(options or {})

    def __call__(self, seen: Turn) -> bool:
        return seen.malformed > 0


class UnknownTool:
    """A call of a tool that the request did not offer."""

    judges: Judged = "turn"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        _Options.model_validate(options or {})

    def __call__(self, seen: Turn) -> bool:
        return any(call.name not in seen.offered for call in seen.calls)


class RepetitionOptions(_Options):
    """Options of repetition."""

    n: int = Field(16, ge=1, le=64, description="tokens of the longest n-gram that is looked for")
    times: int = Field(8, ge=2, description="times that it occurs, at least")
    tokens: int = Field(64, ge=2, description="in a row: tokens that the repetitions take together, at least")
    share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="anywhere: the part of the turn's tokens that one n-gram of n tokens takes, above which it is flagged; 1: never",
    )


class Repetition:
    """One n-gram of up to `n` sampled tokens over and over: `times` times in a row and over `tokens` tokens, or, one of `n`
    tokens, `times` times anywhere and in more than `share` of the turn. Occurrences do not overlap."""

    judges: Judged = "turn"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = RepetitionOptions.model_validate(options or {})

    def __call__(self, seen: Turn) -> bool:
        ids = np.ascontiguousarray(seen.tokens, np.int32)
        return self._in_a_row(ids) or self._anywhere(ids)

    def _in_a_row(self, ids: npt.NDArray[np.int32]) -> bool:
        given = self._options
        for period in range(1, min(given.n, len(ids) // given.times) + 1):
            # What repeats with this period is equal to what stands a period before it.
            breaks = np.flatnonzero(ids[period:] != ids[:-period])
            longest = int(np.diff(breaks, prepend=-1, append=len(ids) - period).max()) - 1
            if longest >= max(period * (given.times - 1), given.tokens - period):
                return True
        return False

    def _anywhere(self, ids: npt.NDArray[np.int32]) -> bool:
        given = self._options
        n, least = given.n, max(given.times, int(given.share * len(ids) / given.n) + 1)
        if given.share == 1 or least * n > len(ids):
            return False
        tokens: list[int] = ids.tolist()
        # An n-gram is no more frequent than what it begins with: most turns end here.
        begins = {token for token, count in Counter(tokens).items() if count >= least}
        data, width = ids.tobytes(), ids.itemsize
        counts: dict[bytes, tuple[int, int]] = {}
        for at in (at for at in range(len(ids) - n + 1) if tokens[at] in begins):
            gram = data[at * width : (at + n) * width]
            count, end = counts.get(gram, (0, 0))
            if end <= at:
                counts[gram] = (count + 1, at + n)
                if count + 1 >= least:
                    return True
        return False


class GarbledOptions(_Options):
    """Options of garbled."""

    share: float = Field(
        0.05,
        ge=0,
        le=1,
        description="part of the characters that nobody writes, above which a turn is flagged",
    )
    least: int = Field(8, ge=1, description="such characters that a flagged turn has, at least")
    run: int = Field(
        256, ge=1, description="signs in a row, neither letters, digits nor white space, that are flagged"
    )


class Garbled:
    """Replacement, control and private-use characters and lone surrogates in what was shown, thought or given to a tool; or an
    endless row of signs."""

    judges: Judged = "turn"
    _BAD = re.compile(
        "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ue000-\uf8ff\ufffd\U000f0000-\U0010ffff]+"
    )
    _SIGNS = re.compile(r"[^\w\s]+")

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = GarbledOptions.model_validate(options or {})

    def __call__(self, seen: Turn) -> bool:
        texts = [seen.text, seen.reasoning, *(call.arguments for call in seen.calls)]
        bad = sum(len(text) - len(self._BAD.sub("", text)) for text in texts)
        if bad >= self._options.least and bad > self._options.share * sum(map(len, texts)):
            return True
        return any(self._signs(text) for text in texts)

    def _signs(self, text: str) -> bool:
        """Whether so many signs stand in a row. Such a row has one of every `run` characters: the others are not looked at
        but around a sign."""
        run = self._options.run
        return any(
            len(row) >= run
            for at in range(run - 1, len(text), run)
            if self._SIGNS.match(text, at)
            for row in self._SIGNS.findall(text, at - run + 1, at + run)
        )


class NonzeroExitOptions(_Options):
    """Options of nonzero_exit. The pattern that ships knows what the shell harness, mini-swe-agent, OpenHands, Claude Code, Codex
    and pi tell."""

    pattern: str = Field(
        r"(?:\[exit status |<returncode>|\"(?:returncode|exit_code)\": ?|[Ee]xit code:? |exited with code )-?0*[1-9]",
        max_length=4096,
        description="found in a message that tells of a status other than 0; it is searched in what agents write, so let it be linear",
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is no pattern: {error}") from None
        return value


class NonzeroExit:
    """A program that the turn ran ended with a status other than 0."""

    judges: Judged = "results"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._pattern = re.compile(NonzeroExitOptions.model_validate(options or {}).pattern)

    def __call__(self, seen: Results) -> bool:
        return any(self._pattern.search(_edges(text)) is not None for text in seen.texts)


class InfraFailureOptions(_Options):
    """Options of infra_failure."""

    phrases: tuple[str, ...] = Field(
        (
            "no space left on device",
            "disk quota exceeded",
            "read-only file system",
            "input/output error",
            "cannot allocate memory",
            "resource temporarily unavailable",
            "temporary failure in name resolution",
            "could not resolve host",
            "network is unreachable",
            "failed to establish a new connection",
            "connection broken by",
            "cannot connect to the docker daemon",
        ),
        min_length=1,
        description="texts of which one, without regard to case, is in a message that tells of a failure; yours stand for all that ship",
    )

    @field_validator("phrases")
    @classmethod
    def _some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(phrase.strip() for phrase in value):
            raise ValueError("an empty phrase would be in every message")
        return tuple(phrase.lower() for phrase in value)


class InfraFailure:
    """The sandbox failed the turn: its disk, its memory, its network, the package index."""

    judges: Judged = "results"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._phrases = InfraFailureOptions.model_validate(options or {}).phrases

    def __call__(self, seen: Results) -> bool:
        return any(phrase in text for text in map(_lowered, seen.texts) for phrase in self._phrases)


def _lowered(text: str) -> str:
    return _edges(text).lower()


def _edges(text: str) -> str:
    return text if len(text) <= 2 * _EDGE else f"{text[:_EDGE]}\n{text[-_EDGE:]}"
