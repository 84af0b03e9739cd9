"""A sequence as vLLM answers it: whole, or the tokens that are new. Pure.

One thing is more than vLLM's: every event of a stream has the weight versions of all tokens so far, not only the last, so
that a client that loses the connection knows them.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import Any

from pipeline.engines.progress import spans_of
from pipeline.engines.tiny.scheduler import Sequence

Scored = tuple[Ids[float], Ids[Ids[int]], Ids[Ids[float]]]


def whole(sequence: Sequence) -> dict[str, Any]:
    """The one choice of an answer."""
    return _choice(sequence, 0, spans_of(sequence.versions))


class Stream:
    """The events of one sequence as it grows: `new` is the choice of the next one."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence, self._sent = sequence, 0
        self._spans: list[dict[str, Any]] = []

    def new(self) -> dict[str, Any]:
        for span in spans_of(self._sequence.versions[self._sent :]):
            start, end = self._sent + span["start"], self._sent + span["end"]
            if self._spans and self._spans[-1]["version"] == span["version"]:
                self._spans[-1]["end"] = end
            else:
                self._spans.append({"version": span["version"], "start": start, "end": end})
        choice = _choice(self._sequence, self._sent, self._spans)
        self._sent = len(self._sequence.output)
        return choice


def prompt_logprobs(token_ids: Ids[int], scored: Scored) -> list[dict[str, dict[str, Any]] | None]:
    """One entry a prompt token, keyed by id: its own first, then the likeliest. The first token has none."""
    entries: list[dict[str, dict[str, Any]] | None] = [None]
    for token, own, ids, values in zip(token_ids[1:], *scored, strict=True):
        entry = {str(token): {"logprob": own}}
        entry |= {
            str(i): {"logprob": value, "rank": rank}
            for rank, (i, value) in enumerate(zip(ids, values, strict=True), 1)
        }
        entries.append(entry)
    return entries


def _choice(sequence: Sequence, start: int, spans: list[dict[str, Any]]) -> dict[str, Any]:
    token_ids = sequence.output[start:]
    content = None
    if sequence.params.logprobs is not None:
        # JSON has no -inf or NaN; a sampled token's log-probability is finite (`sampling.draw`), so none needs replacing.
        pairs = zip(token_ids, sequence.logprobs[start:], strict=True)
        content = {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]}
    masks = sequence.candidates[start:]
    return {
        "index": 0,
        "token_ids": token_ids,
        "finish_reason": sequence.finish_reason,
        "stop_reason": token_ids[-1] if sequence.finish_reason == "stop" and token_ids else None,
        "logprobs": content,
        "weight_versions": spans,
        "sampling_mask": masks if any(masks) else None,
    }
