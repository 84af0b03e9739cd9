"""One SGLang server. Read in its source and documentation; there is no build to run it here.

Promises: as `vllm.VllmReplica`. Versions: newer servers say them per stretch of tokens; older ones say the newest of an
answer, which labels an event of a stream, and a whole answer only where it was in use when the request was sent: else its
tokens have the version of that time, the oldest that they can have.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from typing import Literal, cast

from pipeline.engines.base import EngineRefused, EngineUnavailable, Watch
from pipeline.engines.progress import Ask, BadAnswer, Progress, Prompt
from pipeline.engines.replies import scored, weight_version
from pipeline.engines.scores import Scores
from pipeline.engines.sglang_wire import Rejected, error_of, request_body, score_body, scores, take
from pipeline.engines.transport import Broken, Transport
from pipeline.engines.wire import PauseMode

GENERATE = "/generate"
_INFO = "/model_info"
_THREADED = 1 << 20
_FRESH_S = 1.0
_CONTROL_S = 10.0
_MODES = {"abort": "abort", "keep": "in_place"}
Finish = Literal["stop", "length", "abort"]


class SglangReplica:
    """One server. experts: experts that a token is routed to in a layer, whose ids are asked for; None: no routing."""

    def __init__(self, url: str, token: str | None = None, experts: int | None = None) -> None:
        self._http = Transport(url, token)
        self.url = self._http.base
        self._experts = experts
        self._version, self._version_at = 0, float("-inf")
        self._asking = asyncio.Lock()

    async def close(self) -> None:
        await self._http.close()

    async def sample(self, ask: Ask, progress: Progress, watch: Watch | None, deadline: float) -> Finish:
        """As `VllmReplica.sample`. A stream that `watch` ends is closed, by which the server drops the request; it gives
        no routing then: rows that are missing are had with the next turn, which asks from where they end."""
        floor = await self._known_version()
        progress.begin(floor)
        try:
            try:
                return await self._once(ask, progress, watch, deadline, floor)
            except EngineRefused as error:
                if self._experts is None or "routed_experts" not in str(error) or progress.received:
                    raise
                # The policy routes, but the server was started without --enable-return-routed-experts.
                self._experts = None
                return await self._once(ask, progress, watch, deadline, floor)
        except BadAnswer as error:
            raise EngineUnavailable(f"{self.url} answered {error}") from error

    async def score(
        self,
        token_ids: Prompt,
        top_k: int,
        request_id: str,
        session_id: str,
        deadline: float,
    ) -> Scores:
        """As `VllmReplica.score`."""
        body = score_body(token_ids, top_k, request_id)
        data = await self._http.whole(GENERATE, body, {"X-Session-ID": session_id}, deadline)
        return await scored(self._http, data, token_ids, top_k, scores)

    async def version(self, within: float = _CONTROL_S) -> int:
        """The weight version that is sampled under now. Raises EngineUnavailable when it cannot be had."""
        self._version = await weight_version(self._http, _INFO, within)
        self._version_at = time.monotonic()
        return self._version

    async def healthy(self, within: float = 5.0) -> bool:
        """Whether the server answers. Not /health, which samples a token and so fails while sampling is paused."""
        return await self._http.answers(_INFO, within)

    async def paused(self, within: float = 5.0) -> bool:
        """False: SGLang does not say."""
        return False

    async def pause(self, mode: PauseMode = "abort", within: float = 600.0) -> None:
        """As `VllmReplica.pause`. Raises ValueError for `wait`, which SGLang has not."""
        if mode not in _MODES:
            raise ValueError(f"SGLang has no pause mode {mode!r}: use one of {', '.join(_MODES)}")
        await self._http.control("POST", "/pause_generation", within, json={"mode": _MODES[mode]})

    async def resume(self) -> None:
        """As `VllmReplica.resume`."""
        await self._http.control("POST", "/continue_generation", _CONTROL_S, json={})

    async def rename(self, version: int) -> None:
        """As `VllmReplica.rename`. Requests under way go on: by default they would be aborted."""
        new = {"new_version": str(version), "abort_all_requests": False}
        await self._http.control("POST", "/update_weight_version", _CONTROL_S, json=new)

    async def update(
        self, directory: str, version: int, mode: PauseMode = "abort", within: float = 600.0
    ) -> None:
        """As `VllmReplica.update`; only `abort` lets SGLang empty its cache."""
        await self.pause(mode, within)
        load = {"model_path": directory, "weight_version": str(version), "flush_cache": True}
        answer = await self._http.control("POST", "/update_weights_from_disk", within, json=load)
        if answer.get("success") is False:
            raise EngineUnavailable(f"{self.url} did not load {directory}: {answer.get('message')}")
        await self.resume()
        self._version, self._version_at = version, time.monotonic()

    async def _once(
        self, ask: Ask, progress: Progress, watch: Watch | None, deadline: float, floor: int
    ) -> Finish:
        body = request_body(ask, self._experts is not None)
        headers = {"X-Session-ID": ask.session_id}

        async def read(data: bytes) -> tuple[list[int], str | None]:
            try:
                if len(data) < _THREADED:
                    return take(data, progress, ask, self._experts, floor)
                return await asyncio.to_thread(take, data, progress, ask, self._experts, floor)
            except Rejected as error:
                raise self._http.refuse(error.error) from error

        if not ask.stream:
            _, reason = await read(await self._http.whole(GENERATE, body, headers, deadline))
            if reason is None:
                raise BadAnswer("a generation without a finish reason")
            return cast(Finish, reason)
        async with aclosing(self._http.events(GENERATE, body, headers, deadline)) as events:
            async for data in events:
                error = error_of(data)
                if error is not None:
                    raise self._http.refuse(error)
                token_ids, reason = await read(data)
                kept = watch(token_ids) if watch is not None and token_ids else None
                if kept is not None:
                    progress.keep(kept, len(token_ids))
                    return "stop"
                if reason is not None:
                    with suppress(Broken):
                        async for _ in events:
                            pass
                    return cast(Finish, reason)
        return "abort"

    async def _known_version(self) -> int:
        # Those who ask at once wait for one answer.
        async with self._asking:
            if time.monotonic() - self._version_at > _FRESH_S:
                # An engine that is away is told of by the request; one that does not say its version has the last known.
                with suppress(EngineUnavailable):
                    await self.version(2.0)
                self._version_at = time.monotonic()
        return self._version
