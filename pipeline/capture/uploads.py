"""A host's images on their way into the store.

Promises: an image is uploaded once in a run, however many turns, siblings and hosts show it (what this host forgets, and what
other hosts have, the store's conditional create tells); nobody waits for it but the end of an attempt that shows it; when
`settle` returns, it is in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterable

from pipeline.capture.messages import Image
from pipeline.store import ObjectExists, ObjectMissing, ObjectStore
from schemas.keys import image_key

REMEMBERED = 1 << 17
"""Images that are known to be stored. One that was forgotten costs a request, and no upload."""


class Uploads:
    """Of one event loop."""

    def __init__(self, store: ObjectStore, run: str, remembered: int = REMEMBERED) -> None:
        self._store = store
        self._run = run
        self._remembered = remembered
        self._stored: OrderedDict[str, None] = OrderedDict()
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def see(self, image: Image) -> None:
        """Begins its upload, if that is not under way or over. One that failed begins anew."""
        if image.digest in self._stored:
            self._stored.move_to_end(image.digest)
        elif image.digest not in self._under_way:
            task = self._under_way[image.digest] = asyncio.create_task(self._upload(image))
            # A failure is told to whoever settles, and nobody else: there may be no such.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def settle(self, digests: Iterable[str]) -> None:
        """Returns once they are all in the store, wherever they were seen. Raises ObjectMissing for one that is not and was not
        seen here, StoreUnavailable."""
        for digest in digests:
            task = self._under_way.get(digest)
            if task is not None:
                # Another's wait for it may be cancelled; its upload is not.
                await asyncio.shield(task)
            if digest in self._stored:
                continue
            key = image_key(self._run, digest)
            if await self._store.size(key) is None:
                raise ObjectMissing(key, self._store.url)
            self._remember(digest)

    async def close(self) -> None:
        """Gives up what is under way."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _upload(self, image: Image) -> None:
        try:
            key = image_key(self._run, image.digest)
            # Asked for first: another host's is worth a small request, not the bytes. Whoever wrote it wrote the same.
            if await self._store.size(key) is None:
                with contextlib.suppress(ObjectExists):
                    await self._store.create(key, image.data)
            self._remember(image.digest)
        finally:
            del self._under_way[image.digest]

    def _remember(self, digest: str) -> None:
        self._stored[digest] = None
        while len(self._stored) > self._remembered:
            self._stored.popitem(last=False)
