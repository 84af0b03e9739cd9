"""What a generation has so far, over however many requests: the pure half of continuing from one's own tokens.

Promises: a token enters once, with its log-probability and a version, and is never changed afterwards; a log-probability
that no sampled token can have is refused; the continuation asks for what is missing and no more, with a seed of its own;
rows of routing join without a gap and without a row twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from pipeline.engines.base import Generation, ImageItem, Routing
from pipeline.engines.wire import SamplingParams

Rows = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
Prompt = Sequence[int] | npt.NDArray[np.int32]


class BadAnswer(ValueError):
    """An engine's answer that holds no usable generation. Its message goes on from "the engine at URL answered"."""


@contextmanager
def answered() -> Generator[None, None, None]:
    """Around the reading of an answer: one that has another form than it should is a BadAnswer. Any other exception would
    count as a mistake of ours, and the turn as the policy's."""
    try:
        yield
    except BadAnswer:
        raise
    except (TypeError, LookupError, AttributeError, ValueError, OverflowError) as error:
        raise BadAnswer(f"something of another form: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to one engine. `routed_from`: rows of routing before it are not wanted. `stream`: tokens as they come."""

    token_ids: Prompt
    params: SamplingParams
    request_id: str
    session_id: str
    images: Sequence[ImageItem] = ()
    routed_from: int = 0
    stream: bool = False


@dataclass(slots=True)
class Progress:
    """The tokens of one generation as they gather. `begin` opens each request; `add`, `label` and `route` take what it
    brings; `keep` drops the end of what came last."""

    prompt: Prompt
    params: SamplingParams
    routed_from: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    candidates: list[Sequence[int]] = field(default_factory=list[Sequence[int]])
    resumed: int = 0
    _rows: list[Rows] = field(default_factory=list[Rows])
    _start: int = 0
    _received: int = 0
    _labelled: int = 0
    _floor: int = 0

    def begin(self, floor: int = 0) -> None:
        """A request is sent. `floor`: the weight version that is known to be in use; tokens carry it until they are
        labelled, and for good where the answer ends before it says more: the oldest version that they can have."""
        self._start, self._received, self._labelled, self._floor = len(self.token_ids), 0, 0, floor

    @property
    def received(self) -> int:
        """Tokens that the request under way has brought, dropped ones included."""
        return self._received

    @property
    def labelled(self) -> bool:
        """Whether the engine has said the version of every token that the request under way has brought."""
        return self._labelled == self._received

    @property
    def reached(self) -> int:
        """Tokens of prompt and output that the engine has, dropped ones included."""
        return len(self.prompt) + self._start + self._received

    def add(
        self, token_ids: list[int], logprobs: list[float], candidates: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Append tokens. Raises BadAnswer for a count that does not fit, what is no token id, or a log-probability that
        cannot be."""
        count = len(token_ids)
        if len(logprobs) != count:
            raise BadAnswer(f"{len(logprobs)} logprobs for {count} tokens")
        wrong = next((token for token in token_ids if type(token) is not int or not 0 <= token < 2**31), None)
        if wrong is not None:
            raise BadAnswer(f"{wrong!r} where a token id stands")
        # vLLM writes -9999 where it has -inf or NaN; neither can be the log-probability of a sampled token. NaN fails too.
        if not all(-9999.0 < logprob < 1e-3 for logprob in logprobs):
            at = next(i for i, logprob in enumerate(logprobs) if not -9999.0 < logprob < 1e-3)
            raise BadAnswer(f"log-probability {logprobs[at]} for sampled token {token_ids[at]}")
        if candidates is not None:
            if len(candidates) != count:
                raise BadAnswer(f"{len(candidates)} candidate sets for {count} tokens")
            # Requests before this one may have brought none.
            self.candidates += [()] * (len(self.token_ids) - len(self.candidates))
            self.candidates += candidates
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.versions += [self._floor] * count
        self._received += count

    def label(self, spans: Iterable[Mapping[str, Any]]) -> None:
        """Versions of all tokens that the request under way has brought, as spans {version, start, end} over them."""
        labels: list[int] = []
        for span in spans:
            start, end = span["start"], span["end"]
            if not len(labels) == start <= end <= self._received:
                raise BadAnswer(
                    f"weight version span [{start}, {end}) after {len(labels)} of {self._received} tokens"
                )
            labels += [version_number(span["version"])] * (end - start)
        if len(labels) != self._received:
            raise BadAnswer(f"weight versions for {len(labels)} of {self._received} tokens")
        self.versions[self._start :] = labels[: len(self.versions) - self._start]
        self._labelled = self._received

    def mark(self, version: object, count: int) -> None:
        """The version of the `count` tokens that came last, from an engine that says one for each event."""
        if count:
            self.versions[-count:] = [version_number(version)] * count
        self._labelled += count

    def route(self, rows: Rows) -> None:
        """Rows from `next_row` on. Without images there is one for every token that was an input, and none more. Raises
        BadAnswer."""
        if self._rows and rows.shape[1:] != self._rows[0].shape[1:]:
            (layers, k), (others, other) = self._rows[0].shape[1:], rows.shape[1:]
            raise BadAnswer(f"routed experts of {others} layers of {other} after {layers} layers of {k}")
        self._rows.append(rows)

    @property
    def next_row(self) -> int:
        """The first row of routing that is not there yet."""
        return self.routed_from + sum(map(len, self._rows))

    def keep(self, kept: int, of_last: int) -> None:
        """Of the `of_last` tokens that came last, drop all but the first `kept`."""
        if not 0 <= kept <= of_last:
            raise ValueError(f"kept {kept} of {of_last} tokens")
        end = len(self.token_ids) - (of_last - kept)
        for column in (self.token_ids, self.logprobs, self.versions):
            del column[end:]
        del self.candidates[end:]

    def full(self) -> bool:
        """Whether as many tokens are there as were asked for."""
        return self.params.max_tokens is not None and len(self.token_ids) >= self.params.max_tokens

    def stopped(self) -> bool:
        """Whether the last token is one that ends a turn: an answer that broke off there misses nothing."""
        return bool(self.token_ids) and self.token_ids[-1] in self.params.stop_token_ids

    def ask(
        self, request_id: str, session_id: str, images: Sequence[ImageItem] = (), stream: bool = False
    ) -> Ask:
        """The request for the rest."""
        sampled = len(self.token_ids)
        if not sampled:
            prompt = self.prompt
        elif isinstance(self.prompt, np.ndarray):
            prompt = np.concatenate((self.prompt, np.array(self.token_ids, self.prompt.dtype)))
        else:
            prompt = [*self.prompt, *self.token_ids]
        return Ask(
            prompt,
            continued(self.params, sampled),
            request_id,
            session_id,
            images,
            min(self.next_row, len(prompt)),
            stream,
        )

    def generation(self, reason: Literal["stop", "length"]) -> Generation:
        if self.candidates:
            self.candidates += [()] * (len(self.token_ids) - len(self.candidates))
        routing = None
        if self._rows:
            rows = self._rows[0] if len(self._rows) == 1 else cast(Rows, np.concatenate(self._rows))
            # A turn that was cut has rows of tokens that were dropped.
            routing = Routing(
                self.routed_from, rows[: len(self.prompt) + len(self.token_ids) - 1 - self.routed_from]
            )
        return Generation(
            tuple(self.token_ids),
            tuple(self.logprobs),
            tuple(self.versions),
            reason,
            tuple(map(tuple, self.candidates)),
            self.resumed,
            routing,
        )


def plain(token_ids: Prompt) -> Sequence[int] | npt.NDArray[np.int32]:
    """As a JSON writer takes them at once."""
    if isinstance(token_ids, np.ndarray):
        return np.ascontiguousarray(token_ids)
    return token_ids if isinstance(token_ids, list | tuple) else list(token_ids)


def collapsed(token_ids: Prompt, images: Sequence[ImageItem]) -> Sequence[int] | npt.NDArray[np.int32]:
    """The prompt, as `plain`, with one placeholder for each image: engines expand them by themselves."""
    if not any(image.tokens > 1 for image in images):
        return plain(token_ids)
    kept = np.ones(len(token_ids), np.bool_)
    for image in images:
        kept[image.start + 1 : image.start + image.tokens] = False
    return np.asarray(token_ids, np.int32)[kept]


def continued(params: SamplingParams, sampled: int) -> SamplingParams:
    """The parameters for the rest of a generation of which `sampled` tokens are there.

    The seed is derived anew: the same seed would draw for the rest the very numbers that drew the beginning.
    """
    if sampled == 0:
        return params
    seed = params.seed
    if seed is not None:
        digest = hashlib.blake2b(f"{seed}/{sampled}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
    limit = None if params.max_tokens is None else params.max_tokens - sampled
    return params.model_copy(update={"seed": seed, "max_tokens": limit})


def version_number(version: object) -> int:
    """Engines' versions are strings, and "default" before the first update; ours are step numbers."""
    if version is None or version == "default":
        return 0
    if isinstance(version, int) or (isinstance(version, str) and version.isascii() and version.isdigit()):
        return int(version)
    raise BadAnswer(f"weight version {version!r}: publish whole numbers")


def spans_of(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Runs of equal versions as they go over the wire: {version, start, end} over the tokens."""
    edges = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
    return [
        {"version": str(versions[start]), "start": start, "end": end}
        for start, end in pairwise((*edges, len(versions)))
    ]
