"""One engine that speaks vLLM's token-in/token-out wire: vLLM itself, or the tiny engine.

Promises: `sample` puts every token into the `Progress` that it is given as soon as it is read, so that whatever happens
then, the tokens that came are kept; an image's bytes are sent once, and again when the engine has forgotten them; new
weights are sampled under the new version only, and an engine whose weights may be half loaded stays paused.

Versions: vLLM says them at the end of a request. A stream that the watcher ends is aborted by its id and read to that
end; a stream that breaks keeps the version that was known when it was sent: the oldest that its tokens can have.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Literal, cast

from pipeline.engines.base import EngineRefused, EngineUnavailable, ImageItem, Watch
from pipeline.engines.progress import Ask, BadAnswer, Progress, Prompt
from pipeline.engines.replies import scored, weight_version
from pipeline.engines.scores import Scores
from pipeline.engines.transport import Broken, Transport
from pipeline.engines.vllm_wire import error_of, request_body, score_body, scores, take
from pipeline.engines.wire import PauseMode

GENERATE = "/inference/v1/generate"
_ABORT = "/inference/v1/abort_requests"
_THREADED = 1 << 20
"""Bytes of an answer from which on it is read on a thread."""
_FRESH_S = 1.0
"""How old the version may be that tokens carry whose own version is never said."""
_ABORT_S = 2.0
_CONTROL_S = 10.0
_IMAGES = 4096
"""Images that one engine is remembered to have."""
Finish = Literal["stop", "length", "abort"]


class VllmReplica:
    """One server. token: its bearer token. See `replicas.Replica` for what `sample` promises its caller."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._http = Transport(url, token)
        self.url = self._http.base
        self._images: OrderedDict[str, None] = OrderedDict()
        self._version, self._version_at = 0, float("-inf")
        self._asking = asyncio.Lock()

    async def close(self) -> None:
        await self._http.close()

    async def sample(self, ask: Ask, progress: Progress, watch: Watch | None, deadline: float) -> Finish:
        """Send one request and put what it brings into `progress`; why it ended.

        A stream that `watch` ends is `stop`. Raises Broken, EngineRefused, EngineUnavailable; the tokens that came before
        are in `progress`.
        """
        progress.begin(await self._known_version())
        leaned = [image.digest for image in ask.images if image.digest in self._images]
        try:
            try:
                reason = await self._once(ask, progress, watch, deadline)
            except EngineRefused:
                if not leaned or progress.received:
                    raise
                # The engine may have forgotten an image, which looks like a bad request: only now is it the request's fault.
                self._forget(leaned)
                reason = await self._once(ask, progress, watch, deadline)
        except Broken:
            self._forget(leaned)
            raise
        except BadAnswer as error:
            raise EngineUnavailable(f"{self.url} answered {error}") from error
        self._remember(ask.images)
        return reason

    async def score(
        self,
        token_ids: Prompt,
        top_k: int,
        request_id: str,
        session_id: str,
        deadline: float,
    ) -> Scores:
        """Log-probabilities of a sequence's own tokens and the `top_k` likeliest at each place (at most the server's
        `--max-logprobs`). Raises Broken, EngineRefused, EngineUnavailable."""
        body = score_body(token_ids, top_k, request_id)
        data = await self._http.whole(GENERATE, body, {"X-Session-ID": session_id}, deadline)
        return await scored(self._http, data, token_ids, top_k, scores)

    async def version(self, within: float = _CONTROL_S) -> int:
        """The weight version that is sampled under now. Raises EngineUnavailable when it cannot be had."""
        self._version = await weight_version(self._http, "/weight_info", within)
        self._version_at = time.monotonic()
        return self._version

    async def healthy(self, within: float = 5.0) -> bool:
        """Whether /health answers 200 in time."""
        return await self._http.answers("/health", within)

    async def paused(self, within: float = 5.0) -> bool:
        """Whether it says that it is paused."""
        try:
            return (await self._http.control("GET", "/is_paused", within)).get("is_paused") is True
        except EngineUnavailable:
            # Not in the development mode in which it can be paused; or away, which its health tells.
            return False

    async def pause(self, mode: PauseMode = "abort", within: float = 600.0) -> None:
        """Stop sampling: `abort` answers requests with what they have, `wait` lets them end, `keep` freezes them.
        Idempotent. Raises EngineUnavailable."""
        await self._http.control("POST", "/pause", within, params={"mode": mode})

    async def resume(self) -> None:
        """Sample again. Idempotent. Raises EngineUnavailable."""
        await self._http.control("POST", "/resume", _CONTROL_S)

    async def rename(self, version: int) -> None:
        """Call the weights in use `version`. Raises EngineUnavailable."""
        new = {"new_version": str(version)}
        await self._http.control("POST", "/update_weight_version", _CONTROL_S, json=new)

    async def update(
        self, directory: str, version: int, mode: PauseMode = "abort", within: float = 600.0
    ) -> None:
        """Take over the weights of a directory that the engine reads, as `version`.

        `abort`: requests under way end, and their callers continue them from their own tokens. `keep`: they are frozen,
        and vLLM computes them anew under the new weights up to where they are. Either way nothing stays cached of the old
        ones, as a pause empties the caches. When anything fails the engine stays paused, as its weights may be half
        loaded: repeat the update. Raises EngineUnavailable. Needs VLLM_SERVER_DEV_MODE=1.
        """
        await self.pause(mode, within)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        await self._http.control("POST", "/collective_rpc", within, json=reload)
        await self.rename(version)
        await self.resume()
        self._version, self._version_at = version, time.monotonic()

    async def _once(self, ask: Ask, progress: Progress, watch: Watch | None, deadline: float) -> Finish:
        body = request_body(ask, self._images.__contains__)
        headers = {"X-Session-ID": ask.session_id}
        checked = _expanded(ask)
        if not ask.stream:
            _, reason = await _read(
                await self._http.whole(GENERATE, body, headers, deadline), progress, checked
            )
            if reason is None:
                raise BadAnswer("a generation without a finish reason")
            return cast(Finish, reason)
        async with aclosing(self._http.events(GENERATE, body, headers, deadline)) as events:
            async for data in events:
                error = error_of(data)
                if error is not None:
                    raise self._http.refuse(error)
                token_ids, reason = await _read(data, progress, checked)
                kept = watch(token_ids) if watch is not None and token_ids else None
                if kept is not None:
                    progress.keep(kept, len(token_ids))
                    if not progress.labelled:
                        await self._abort(ask, progress, events)
                    return "stop"
                if reason is not None:
                    # The end of the stream is not needed, but the connection is used again once it is read.
                    with suppress(Broken):
                        async for _ in events:
                            pass
                    return cast(Finish, reason)
        # vLLM before 0.30 says nothing more when a request is aborted before its next token.
        return "abort"

    async def _abort(self, ask: Ask, progress: Progress, events: AsyncGenerator[bytes, None]) -> None:
        """End a stream so that its last event is given: with the versions, and the routing. Without it the tokens keep
        the version that was known at the start; the request ends with its connection in any case."""
        with suppress(EngineUnavailable, Broken, TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                await self._http.control(
                    "POST", _ABORT, _ABORT_S, json={"request_ids": [f"generate-tokens-{ask.request_id}"]}
                )
                async for data in events:
                    if error_of(data) is None:
                        token_ids, _ = await _read(data, progress, _expanded(ask))
                        progress.keep(0, len(token_ids))

    async def _known_version(self) -> int:
        # Those who ask at once wait for one answer.
        async with self._asking:
            if time.monotonic() - self._version_at > _FRESH_S:
                # An engine that is away is told of by the request; one that does not say its version has the last known.
                with suppress(EngineUnavailable):
                    await self.version(_ABORT_S)
                self._version_at = time.monotonic()
        return self._version

    def _remember(self, images: Sequence[ImageItem]) -> None:
        for image in images:
            self._images[image.digest] = None
            self._images.move_to_end(image.digest)
        while len(self._images) > _IMAGES:
            self._images.popitem(last=False)

    def _forget(self, digests: Sequence[str]) -> None:
        for digest in digests:
            self._images.pop(digest, None)


def _expanded(ask: Ask) -> bool:
    """Whether the prompt has as many tokens here as in the engine."""
    return all(image.tokens for image in ask.images)


async def _read(data: bytes, progress: Progress, checked: bool) -> tuple[list[int], str | None]:
    if len(data) < _THREADED:
        return take(data, progress, checked)
    return await asyncio.to_thread(take, data, progress, checked)
