"""The bytes of vLLM's token-in/token-out wire (`POST /inference/v1/generate`, read in 0.32 and 0.33). Pure.

Promises: a prompt of a million tokens is written and an answer read without a model of each token; what an answer lacks
is refused (`BadAnswer`), never filled in; routed experts never pass through a JSON parser.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import orjson

from pipeline.engines.base import ImageItem
from pipeline.engines.progress import Ask, BadAnswer, Progress, Prompt, answered, collapsed, plain
from pipeline.engines.routing import from_npy
from pipeline.engines.scores import Scores, of_numbers

_EXPERTS = b'"routed_experts":"'
FINISHED = frozenset({"stop", "length", "abort"})


def request_body(ask: Ask, known: Callable[[str], bool]) -> bytes:
    """The request as JSON. `known`: whether the engine has an image of this digest; such go by their digest alone."""
    sampling = ask.params.model_dump(exclude_none=True) | {"logprobs": 0}
    if ask.routed_from:
        sampling["routed_experts_prompt_start"] = ask.routed_from
    body: dict[str, Any] = {
        "token_ids": collapsed(ask.token_ids, ask.images),
        "sampling_params": sampling,
        "request_id": ask.request_id,
        "stream": ask.stream,
    }
    if ask.images:
        body["content_parts"] = [_part(image, known(image.digest)) for image in ask.images]
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def score_body(token_ids: Prompt, top_k: int, request_id: str) -> bytes:
    """A request that scores its prompt. One token is sampled, as none cannot be asked for; `top_k`, since a server that
    returns sampling masks answers nothing without it."""
    params = {"max_tokens": 1, "temperature": 0.0, "top_k": 1, "prompt_logprobs": top_k}
    body = {"token_ids": plain(token_ids), "sampling_params": params, "request_id": request_id}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


@answered()
def take(data: bytes, progress: Progress, checked: bool = True) -> tuple[list[int], str | None]:
    """Read a whole answer, or one event of a stream, into `progress`: its tokens, and why it ended (None: it goes on).

    checked: whether the number of routing rows must fit the tokens (not where the engine alone knows how many an image has).
    Raises BadAnswer.
    """
    data, experts = _without_experts(data)
    choice = _choice(data)
    if choice is None:
        return [], None
    token_ids = cast("list[int]", choice.get("token_ids") or [])
    logprobs = cast("dict[str, Any]", choice.get("logprobs") or {})
    content = cast("list[dict[str, Any]]", logprobs.get("content") or [])
    for token, entry in zip(token_ids, content, strict=False):
        if entry.get("token_id", token) != token:
            raise BadAnswer(f"the logprob of token {entry['token_id']} for token {token}")
    masks = choice.get("sampling_mask")
    progress.add(
        token_ids,
        [entry["logprob"] for entry in content],
        cast("list[list[int]] | None", masks),
    )
    reason = choice.get("finish_reason")
    if reason is not None and reason not in FINISHED:
        raise BadAnswer(f"unknown finish reason {reason!r}")
    spans = choice.get("weight_versions")
    if spans:
        progress.label(cast("list[dict[str, Any]]", spans))
    if experts is None and choice.get("routed_experts"):
        experts = memoryview(str(choice["routed_experts"]).encode())
    if experts is not None:
        rows = from_npy(experts)
        if checked and progress.next_row + len(rows) != progress.reached - 1:
            raise BadAnswer(
                f"{len(rows)} rows of routed experts from {progress.next_row} for {progress.reached} tokens"
            )
        progress.route(rows)
    return token_ids, reason


def error_of(data: bytes) -> Mapping[str, Any] | None:
    """The error that an event of a stream is, if it is one."""
    # Every other event says "choices"; this spares a second parse of each.
    if b'"error"' not in data[:64]:
        return None
    error = _object(data).get("error")
    return cast("dict[str, Any]", error) if isinstance(error, dict) else {"message": str(error)}


@answered()
def scores(data: bytes, token_ids: Prompt, top_k: int) -> Scores:
    """The log-probabilities of a prompt. Raises BadAnswer when a token or a place among the first `top_k` is missing."""
    answer = _object(data)
    entries = cast("list[dict[str, dict[str, Any]] | None]", answer.get("prompt_logprobs") or [])
    count = len(token_ids)
    if len(entries) != count:
        raise BadAnswer(f"prompt log-probabilities for {len(entries)} of {count} tokens")
    own = np.zeros(count, np.float32)
    ids = np.full((count, top_k), -1, np.int32)
    top = np.full((count, top_k), -np.inf, np.float32)
    for row in range(1, count):
        entry = entries[row] or {}
        mine = entry.get(str(int(token_ids[row])))
        if mine is None:
            raise BadAnswer(f"no log-probability for prompt token {row}")
        own[row] = mine["logprob"]
        if top_k:
            # The prompt's own token is among them whatever its rank; without ranks the likeliest are the first.
            ranked = sorted(entry.items(), key=lambda item: -item[1]["logprob"])[:top_k]
            if len(ranked) < top_k:
                raise BadAnswer(
                    f"{len(ranked)} log-probabilities for prompt token {row}, {top_k} were asked for"
                )
            ids[row] = [int(token) for token, _ in ranked]
            top[row] = [value["logprob"] for _, value in ranked]
    return of_numbers(Scores(own, ids, top))


def _part(image: ImageItem, known: bool) -> dict[str, str | None]:
    url = None
    if not known:
        url = f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
    return {"type": "image_url", "url": url, "uuid": image.digest}


def _without_experts(data: bytes) -> tuple[bytes, memoryview | None]:
    """Cut the routed experts out: tens of megabytes that need no parsing."""
    begin = data.find(_EXPERTS)
    if begin < 0:
        return data, None
    first = begin + len(_EXPERTS)
    end = data.find(b'"', first)
    if end < 0:
        raise BadAnswer("routed experts without an end")
    return data[:first] + data[end:], memoryview(data)[first:end]


def _choice(data: bytes) -> dict[str, Any] | None:
    """The one choice; None for an event that carries none (usage)."""
    choices = _object(data).get("choices")
    if not isinstance(choices, list):
        raise BadAnswer("something else than a generation")
    found = cast("list[dict[str, Any]]", choices)
    if len(found) > 1:
        raise BadAnswer(f"{len(found)} choices, one was asked for")
    return found[0] if found else None


def _object(data: bytes) -> dict[str, Any]:
    try:
        answer: object = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadAnswer(f"no JSON: {error}") from error
    if not isinstance(answer, dict):
        raise BadAnswer("no JSON object")
    return cast("dict[str, Any]", answer)
