"""An engine whose queue is measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeline.engines.base import Engine, Generation, ImageItem, Watch
from pipeline.engines.wire import SamplingParams
from pipeline.hosts.waits import Waits


class MeasuredEngine:
    """Another engine, of whose calls the time until the first token counts as `engine`: with `watch`, where tokens come as
    they are sampled; without, until the answer, for nobody sees its first token. The streams of a call stay as they are."""

    def __init__(self, engine: Engine, waits: Waits) -> None:
        self._engine = engine
        self._waits = waits

    async def generate(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        request_id: str,
        session_id: str,
        *,
        watch: Watch | None = None,
        images: Sequence[ImageItem] = (),
        routed_from: int = 0,
        within: float | None = None,
    ) -> Generation:
        """As of `Engine`."""
        begun: float | None = self._waits.begin("engine")

        def first() -> None:
            nonlocal begun
            if begun is not None:
                self._waits.end("engine", begun)
                begun = None

        def watched(tokens: Sequence[int]) -> int | None:
            first()
            assert watch is not None
            return watch(tokens)

        try:
            return await self._engine.generate(
                token_ids,
                params,
                request_id,
                session_id,
                watch=None if watch is None else watched,
                images=images,
                routed_from=routed_from,
                within=within,
            )
        finally:
            first()

    async def version(self) -> int:
        return await self._engine.version()

    async def healthy(self) -> bool:
        return await self._engine.healthy()

    async def close(self) -> None:
        await self._engine.close()
