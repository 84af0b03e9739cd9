"""A client of token-in/token-out engines, vLLM or ours, that gives whole generations.

Promises: a generation's ``token_ids``, ``logprobs`` and ``versions`` have one entry per sampled token, whatever happened in
between; a generation that a weight update aborted is continued from its own tokens, which keep their log-probabilities
and versions (nothing is recomputed); trouble that is not the request's fault is retried until the caller's deadline and
then is ``EngineUnavailable``; a request that the engine refuses is ``EngineRefused`` at once, and nothing else is.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

import aiohttp
from pydantic import ValidationError
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_before_delay,
    wait_random_exponential,
)

from pipeline.engines.wire import Choice, GenerateRequest, GenerateResponse, SamplingParams

# Statuses of an engine that is starting, paused, overloaded or behind a proxy that cannot reach it.
_RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
# Statuses that blame the request. Others (401, 403, 404) blame the deployment: infrastructure, though not worth a retry.
_REFUSALS = frozenset({400, 413, 422})


class EngineUnavailable(RuntimeError):
    """Infrastructure trouble: the attempt may be repeated elsewhere or later, and is never the policy's fault."""


class EngineRefused(ValueError):
    """The engine rejected the request itself (400, 413, 422); repeating it cannot help."""


class _Retry(Exception):
    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


@dataclass(frozen=True, slots=True)
class Generation:
    """One continuation. ``logprobs`` in nats, float32 precision; ``versions`` the weight version of each token.

    candidates: the ids that top-k and top-p left open, per token; empty where the whole vocabulary was.
    resumed: how often the generation was aborted and continued.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    candidates: tuple[tuple[int, ...], ...] = ()
    resumed: int = 0


@dataclass(slots=True)
class _Partial:
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    candidates: list[list[int]] = field(default_factory=list[list[int]])


class EngineClient:
    """Connections to one engine; shared by every tenant of a host. Use as an async context manager, or ``close`` it.

    timeout: seconds that one ``generate`` may take, retries and continuations included, unless the call gives its own.
    token: bearer token; it is sent as a header and never part of an error message.
    """

    def __init__(self, base_url: str, token: str | None = None, timeout: float = 600.0) -> None:
        self._base = base_url.rstrip("/")
        self._timeout = timeout
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        session_id: str,
        within: float | None = None,
    ) -> Generation:
        """Sample one continuation of ``token_ids``.

        session_id: sent as ``X-Session-ID``, by which routers keep a session on the replica that has its prefix cached.
        within: seconds for the whole generation; default: the client's ``timeout``.
        Raises EngineRefused, or EngineUnavailable when the deadline passes first (the last reason is in the message).
        """
        deadline = time.monotonic() + (self._timeout if within is None else within)
        params = params.model_copy(update={"logprobs": 0})
        partial, resumed = _Partial(), 0
        while True:
            sampled = len(partial.token_ids)
            asked = GenerateRequest(
                token_ids=(*token_ids, *partial.token_ids),
                sampling_params=_continued(params, sampled),
                request_id=request_id if not resumed else f"{request_id}-r{resumed}",
            )
            choice = await self._until(deadline, asked, session_id)
            _extend(partial, choice, self._base)
            if choice.finish_reason in ("stop", "length"):
                return _whole(partial, choice.finish_reason, resumed)
            if choice.finish_reason != "abort":
                raise EngineUnavailable(
                    f"{self._base} ended a generation with unknown reason {choice.finish_reason!r}"
                )
            if params.max_tokens is not None and len(partial.token_ids) >= params.max_tokens:
                return _whole(partial, "length", resumed)
            resumed += 1
            if len(partial.token_ids) == sampled:
                # Aborted before its first token: give the engine time to finish its update.
                await asyncio.sleep(min(0.05 * resumed, 1.0))

    async def version(self) -> int:
        """The weight version that the engine samples under now. Raises EngineUnavailable when it cannot be had."""
        try:
            async with self._session().get(
                f"{self._base}/weight_info", timeout=aiohttp.ClientTimeout(total=10)
            ) as response:
                if response.status != 200:
                    raise EngineUnavailable(f"{self._base}/weight_info answered {response.status}")
                version = (await response.json())["weight_version"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise EngineUnavailable(f"{self._base}/weight_info: {error!r}") from error
        return _version_number(version, self._base)

    async def healthy(self) -> bool:
        """Whether /health answers 200 within five seconds."""
        try:
            async with self._session().get(
                f"{self._base}/health", timeout=aiohttp.ClientTimeout(total=5)
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _session(self) -> aiohttp.ClientSession:
        # Made at first use: aiohttp binds a session to the running loop.
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        return self._http

    async def _until(self, deadline: float, asked: GenerateRequest, session_id: str) -> Choice:
        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            return max(backoff(state), error.after if isinstance(error, _Retry) else 0.0)

        backoff = wait_random_exponential(multiplier=0.1, max=5.0)
        left = deadline - time.monotonic()
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Retry),
            wait=wait,
            stop=stop_before_delay(max(left, 0.0)),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    return await self._once(deadline, asked, session_id)
        except _Retry as error:
            raise EngineUnavailable(
                f"{self._base}: no generation before the deadline; last: {error}"
            ) from error
        raise AssertionError("tenacity ends by returning or raising")

    async def _once(self, deadline: float, asked: GenerateRequest, session_id: str) -> Choice:
        left = deadline - time.monotonic()
        if left <= 0:
            raise _Retry("the deadline has passed")
        try:
            async with self._session().post(
                f"{self._base}/inference/v1/generate",
                data=asked.model_dump_json(exclude_none=True),
                headers={"Content-Type": "application/json", "X-Session-ID": session_id},
                timeout=aiohttp.ClientTimeout(total=left, sock_connect=min(left, 10.0)),
            ) as response:
                body = await response.read()
                status, after = response.status, response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Retry(repr(error)) from error
        if status == 200:
            return _only_choice(body, self._base)
        reason = f"status {status}: {body[:500].decode(errors='replace')}"
        if status in _RETRYABLE:
            raise _Retry(reason, after=float(after) if after.isdigit() else 0.0)
        raise (EngineRefused if status in _REFUSALS else EngineUnavailable)(f"{self._base}: {reason}")


def _continued(params: SamplingParams, sampled: int) -> SamplingParams:
    """The parameters for the rest of a generation of which ``sampled`` tokens are there.

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


def _only_choice(body: bytes, base: str) -> Choice:
    try:
        answer = GenerateResponse.model_validate_json(body)
    except ValidationError as error:
        raise EngineUnavailable(
            f"{base} answered something else than a generation: {error.errors()[0]['msg']}"
        ) from error
    if len(answer.choices) != 1:
        raise EngineUnavailable(f"{base} answered {len(answer.choices)} choices, one was asked for")
    return answer.choices[0]


def _extend(partial: _Partial, choice: Choice, base: str) -> None:
    """Append one answer's tokens; EngineUnavailable when a token lacks a usable log-probability or version."""
    count = len(choice.token_ids)
    content = (choice.logprobs.content if choice.logprobs else None) or []
    if len(content) != count:
        raise EngineUnavailable(f"{base} answered {len(content)} logprobs for {count} tokens")
    for token, entry in zip(choice.token_ids, content, strict=True):
        if entry.token_id is not None and entry.token_id != token:
            raise EngineUnavailable(
                f"{base} answered the logprob of token {entry.token_id} for token {token}"
            )
        # vLLM writes -9999 where it has -inf or NaN; neither can be the log-probability of a sampled token.
        if not math.isfinite(entry.logprob) or entry.logprob <= -9999.0:
            raise EngineUnavailable(
                f"{base} answered log-probability {entry.logprob} for sampled token {token}"
            )
    versions = [0] * count
    covered = 0
    for span in choice.weight_versions or ():
        if not covered == span.start <= span.end <= count:
            raise EngineUnavailable(
                f"{base} answered weight version span [{span.start}, {span.end}) after {covered} of {count} tokens"
            )
        versions[span.start : span.end] = [_version_number(span.version, base)] * (span.end - span.start)
        covered = span.end
    if choice.weight_versions and covered != count:
        raise EngineUnavailable(f"{base} answered weight versions for {covered} of {count} tokens")
    masks = choice.sampling_mask or [[] for _ in range(count)]
    if len(masks) != count:
        raise EngineUnavailable(f"{base} answered {len(masks)} candidate sets for {count} tokens")
    partial.token_ids += choice.token_ids
    partial.logprobs += [entry.logprob for entry in content]
    partial.versions += versions
    partial.candidates += masks


def _whole(partial: _Partial, reason: Literal["stop", "length"], resumed: int) -> Generation:
    return Generation(
        tuple(partial.token_ids),
        tuple(partial.logprobs),
        tuple(partial.versions),
        reason,
        tuple(map(tuple, partial.candidates)),
        resumed,
    )


def _version_number(version: str | int, base: str) -> int:
    """vLLM's versions are strings and "default" before the first update; ours are step numbers."""
    if version == "default":
        return 0
    try:
        return int(version)
    except ValueError:
        raise EngineUnavailable(f"{base} has weight version {version!r}: publish whole numbers") from None
