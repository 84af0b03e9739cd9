"""The bytes of SGLang's `/generate` (read in 0.5.23). Pure.

Two things differ from vLLM and are settled here. The lists of a stream's events hold all tokens so far, or the new ones
with `--incremental-streaming-output`, some lists so and others so: `completion_tokens` says which. And log-probabilities
are after temperature but before top-k and top-p: where those leave tokens out, the sampler's own are asked for.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import orjson

from pipeline.engines.progress import Ask, BadAnswer, Progress, Prompt, answered, collapsed, plain
from pipeline.engines.routing import from_raw
from pipeline.engines.scores import Scores, of_numbers
from pipeline.engines.wire import SamplingParams

_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_OURS = frozenset({"logprobs", "prompt_logprobs", "seed"})


def request_body(ask: Ask, routing: bool) -> bytes:
    """The request as JSON. routing: whether routed experts are asked for."""
    body: dict[str, Any] = {
        "input_ids": collapsed(ask.token_ids, ask.images),
        "sampling_params": sampling(ask.params),
        "rid": ask.request_id,
        "return_logprob": True,
        # Of the output only.
        "logprob_start_len": -1,
        "stream": ask.stream,
    }
    if restricted(ask.params):
        body["return_sampling_mask"] = True
    if routing:
        body |= {"return_routed_experts": True, "routed_experts_start_len": ask.routed_from}
    if ask.images:
        body["image_data"] = [
            f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}" for image in ask.images
        ]
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def score_body(token_ids: Prompt, top_k: int, request_id: str) -> bytes:
    body = {
        "input_ids": plain(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "rid": request_id,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top_k,
    }
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def sampling(params: SamplingParams) -> dict[str, Any]:
    """The parameters under SGLang's names. Without `max_tokens` the context is filled: its own default is 128."""
    given = params.model_dump(exclude_none=True)
    out = {_RENAMED.get(name, name): value for name, value in given.items() if name not in _OURS}
    out.setdefault("max_new_tokens", None)
    out["top_k"] = params.top_k if params.top_k > 0 else -1
    if params.seed is not None:
        # Heeded with --enable-deterministic-inference.
        out["sampling_seed"] = params.seed % 2**31
    return out


def restricted(params: SamplingParams) -> bool:
    """Whether top-k or top-p leaves tokens out."""
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)


@answered()
def take(
    data: bytes, progress: Progress, ask: Ask, k: int | None, floor: int
) -> tuple[list[int], str | None]:
    """Read a whole answer, or one event of a stream, into `progress`: its tokens, and why it ended (None: it goes on).

    k: experts of a token in a layer, None where no routing was asked for. floor: the version when it was sent.
    Raises BadAnswer, and Rejected for a request that the engine ended for a reason of its own.
    """
    meta = _meta(data)
    counted = meta.get("prompt_tokens")
    if ask.images and all(image.tokens for image in ask.images) and counted not in (None, len(ask.token_ids)):
        raise BadAnswer(
            f"{counted} tokens of the prompt where engine.vision makes {len(ask.token_ids)} of it: set that as the engine's processor is"
        )
    total = cast(int, meta.get("completion_tokens") or 0)
    new = total - progress.received
    if new < 0:
        raise BadAnswer(f"{total} tokens after {progress.received}")
    entries = _new(meta, "output_token_logprobs", total, new)
    token_ids = [cast(int, entry[1]) for entry in entries]
    logprobs = [cast(float, entry[0]) for entry in entries]
    masks = None
    if restricted(ask.params):
        logprobs = cast("list[float]", _new(meta, "output_token_sampling_logprobs", total, new))
        masks = cast("list[list[int]]", _new(meta, "output_token_sampling_mask", total, new))
    progress.add(token_ids, logprobs, masks)
    reason = cast("dict[str, Any]", meta.get("finish_reason") or {})
    kind = reason.get("type")
    _label(meta, progress, new, ask.stream, floor)
    if kind is None:
        return token_ids, None
    if kind not in ("stop", "length", "abort"):
        raise BadAnswer(f"unknown finish reason {kind!r}")
    if kind == "abort" and reason.get("status_code"):
        raise Rejected(reason)
    experts = meta.get("routed_experts")
    rows = progress.reached - 1 - progress.next_row
    if experts and k is not None and rows > 0:
        progress.route(from_raw(str(experts).encode(), rows, k))
    return token_ids, cast(str, kind)


class Rejected(Exception):
    """The engine ended a request for a reason with a status: `error` has it as `code`, with its `message`."""

    def __init__(self, reason: Mapping[str, Any]) -> None:
        super().__init__(str(reason.get("message")))
        self.error = {"code": int(reason["status_code"]), "message": reason.get("message")}


def error_of(data: bytes) -> Mapping[str, Any] | None:
    """The error that an event of a stream is, if it is one. Without a code it blames the request: SGLang answers only
    what a request did wrong so."""
    if b'"error"' not in data[:64]:
        return None
    error = _object(data).get("error")
    shown = cast("dict[str, Any]", error) if isinstance(error, dict) else {"message": str(error)}
    return {"code": 400} | shown


@answered()
def scores(data: bytes, token_ids: Prompt, top_k: int) -> Scores:
    """The log-probabilities of a prompt. Raises BadAnswer."""
    meta = _meta(data)
    count = len(token_ids)
    own = np.zeros(count, np.float32)
    ids = np.full((count, top_k), -1, np.int32)
    top = np.full((count, top_k), -np.inf, np.float32)
    entries = cast("list[list[Any]]", meta.get("input_token_logprobs") or [])
    ranked = cast("list[list[list[Any]] | None]", meta.get("input_top_logprobs") or [])
    if len(entries) != count or (top_k and len(ranked) != count):
        raise BadAnswer(f"prompt log-probabilities for {len(entries)} of {count} tokens")
    for row in range(1, count):
        if entries[row][1] != token_ids[row]:
            raise BadAnswer(f"the log-probability of {entries[row][1]} for prompt token {token_ids[row]}")
        own[row] = entries[row][0]
        if top_k:
            first = (ranked[row] or [])[:top_k]
            if len(first) < top_k:
                raise BadAnswer(
                    f"{len(first)} log-probabilities for prompt token {row}, {top_k} were asked for"
                )
            ids[row] = [entry[1] for entry in first]
            top[row] = [entry[0] for entry in first]
    return of_numbers(Scores(own, ids, top))


def _label(meta: Mapping[str, Any], progress: Progress, new: int, stream: bool, floor: int) -> None:
    spans = meta.get("weight_versions")
    if spans:
        progress.label(cast("list[dict[str, Any]]", spans))
    elif stream:
        progress.mark(meta.get("weight_version"), new)
    elif str(meta.get("weight_version")) == str(floor) or meta.get("weight_version") == "default":
        # One version for a whole answer is the newest: true of all its tokens only if it was in use at the start.
        progress.mark(meta.get("weight_version"), new)


def _new(meta: Mapping[str, Any], name: str, total: int, new: int) -> list[Any]:
    """What a list says of the new tokens."""
    values = cast("list[Any]", meta.get(name) or [])
    if len(values) == total:
        return values[total - new :]
    if len(values) == new:
        return values
    raise BadAnswer(f"{len(values)} of {name} for {new} new tokens of {total}")


def _meta(data: bytes) -> Mapping[str, Any]:
    meta = _object(data).get("meta_info")
    if not isinstance(meta, dict):
        raise BadAnswer("something else than a generation")
    return cast("dict[str, Any]", meta)


def _object(data: bytes) -> dict[str, Any]:
    try:
        answer: object = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadAnswer(f"no JSON: {error}") from error
    if not isinstance(answer, dict):
        raise BadAnswer("no JSON object")
    return cast("dict[str, Any]", answer)
