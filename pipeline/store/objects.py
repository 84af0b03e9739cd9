"""Write-once objects over obstore: any S3, a directory, or memory.

Promises:
- a key is written once: of any number of writers of different bytes one wins, the others get `ObjectExists`; a writer
  that retries after a lost answer finds its own bytes and is told that it won;
- `get` of a `Ref` returns exactly the bytes that the `Ref` was made from, or raises;
- transport errors are retried for `patience_s` seconds, then `StoreUnavailable` names the store and the remedy; nothing
  else is retried;
- at most `concurrency` requests are in flight, each with a timeout;
- an object is written from the memory that it lies in, in however many pieces, by one PUT: nothing of it is copied, and nothing
  is listed under its key until all of it is there, whatever dies meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions as refused
from obstore.store import LocalStore, MemoryStore, S3Store

from pipeline.checksum import crc32c
from pipeline.hosts.requests import Requests
from pipeline.hosts.waits import Waits
from pipeline.store.errors import BadStore, ObjectDamaged, ObjectExists, ObjectMissing, StoreUnavailable
from pipeline.store.keys import checked_key, checked_prefix
from pipeline.store.opening import open_bucket, open_directory
from pipeline.store.opening import read_credentials as read_credentials
from pipeline.store.ranges import COALESCE_GAP, Range, coalesce
from schemas.config import Store as StoreConfig
from schemas.payload import Ref

if TYPE_CHECKING:
    from obstore import ObjectMeta

CONCURRENCY = 32
PATIENCE_S = 20.0
PART = 64 << 20
"""Largest single GET: a longer range is fetched in parts at once, so that one request's timeout bounds one part."""
MAX_OBJECT = 5 << 30
"""S3's limit on a single PUT, the only kind that is conditional everywhere."""
LONG = 1 << 20
"""Bytes from which hashing or copying takes longer than a hop to a thread."""
_COMPARED = 8 << 20
"""Bytes of a stored object that are compared with ours at once."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
"""Bounds of the random wait before a try: before the first one more, and at most."""
_DENIED = "(code: AccessDenied)"
_REMOVED_AT_ONCE = 1000
"""S3's limit on the keys of one DeleteObjects."""
_Result = TypeVar("_Result")


@dataclass
class Counters:
    """Traffic since the store was opened, or the scope was made: bytes of bodies, and requests that succeeded."""

    bytes_read: int = 0
    bytes_written: int = 0
    operations: int = 0
    parent: Counters | None = None

    def count(self, read: int = 0, written: int = 0) -> None:
        self.bytes_read += read
        self.bytes_written += written
        self.operations += 1
        if self.parent is not None:
            self.parent.count(read, written)


class _Transport(Exception):
    """An attempt failed on the way; worth another."""


class ObjectStore:
    """See the module. Made by `open` or `in_memory`; belongs to one event loop. `waits` measures how long requests take, with
    their tries and for a slot, as `store`; `requests` counts them."""

    def __init__(
        self,
        client: S3Store | LocalStore | MemoryStore,
        url: str,
        *,
        remedy: str,
        patience_s: float = PATIENCE_S,
        concurrency: int = CONCURRENCY,
    ) -> None:
        self.url = url
        self.counters = Counters()
        self.waits = Waits()
        self.requests = Requests()
        self._client = client
        self._remedy = remedy
        self._patience_s = patience_s
        self._slots = asyncio.Semaphore(concurrency)

    @classmethod
    def open(
        cls, config: StoreConfig, *, patience_s: float = PATIENCE_S, concurrency: int = CONCURRENCY
    ) -> ObjectStore:
        """The store of a configuration; contacts no server, but makes a file store's directory.

        Raises BadStore on a URL that is neither file:// nor s3://, StoreUnavailable on a directory that cannot be
        written or credentials that cannot be read.
        """
        url = urlsplit(config.url)
        if url.query or url.fragment or "@" in url.netloc:
            raise BadStore("store.url may hold no credentials, query or fragment; use store.credentials_file")
        if (directory := directory_of(config.url)) is not None:
            client, remedy = open_directory(directory, config.url), "check its disk space and permissions"
        elif url.scheme == "s3" and url.netloc:
            client = open_bucket(config, url.netloc, url.path.strip("/"))
            remedy = f"check that {config.endpoint or 'the provider'} is up, the bucket exists and store.credentials_file is right"
        else:
            raise BadStore(
                f"store.url {config.url!r} is neither file:///path nor s3://bucket/prefix; set it to one of them"
            )
        return cls(client, config.url, remedy=remedy, patience_s=patience_s, concurrency=concurrency)

    @classmethod
    def in_memory(cls) -> ObjectStore:
        """A store that lives as long as the object, for tests and pure tools."""
        return cls(MemoryStore(), "memory:", remedy="it is in this process")

    def scope(self) -> ObjectStore:
        """The same store with counters of its own, which also count in this one's: the traffic of one piece of work."""
        scoped = object.__new__(ObjectStore)
        scoped.__dict__.update(self.__dict__)
        scoped.counters = Counters(parent=self.counters)
        return scoped

    async def create(self, key: str, data: bytes | memoryview) -> Ref:
        """Writes the object once. Raises ObjectExists if the key holds other bytes than a lost answer of ours left,
        ValueError over 5 GiB, BadKey, StoreUnavailable."""
        data = memoryview(data).cast("B")
        size = await self.put(key, [data])
        return Ref(key=key, bytes=size, crc32c=await off_loop(size, crc32c, data))

    async def put(self, key: str, pieces: Sequence[memoryview]) -> int:
        """`create` of an object that lies in pieces, none of which is copied or may change meanwhile; its size in bytes."""
        checked_key(key)
        size = sum(len(piece) for piece in pieces)
        if size > MAX_OBJECT:
            raise ValueError(f"object {key} is {size} bytes, limit {MAX_OBJECT} (one S3 PUT); split it")
        body = [piece for piece in pieces if len(piece)] or b""
        attempts = itertools.count()

        async def put() -> None:
            again = next(attempts) > 0
            try:
                await obstore.put_async(self._client, key, body, mode="create")
            except refused.AlreadyExistsError as taken:
                found = await self._head(key)
                if found is None:
                    # S3's 409: another conditional PUT was under way and did not succeed. The key is still free.
                    raise _Transport(str(taken)) from taken
                # Our own earlier PUT may have arrived although its answer did not.
                if not (again and found == size and await self._holds(key, pieces, size)):
                    raise ObjectExists(key, self.url) from None
            except FileNotFoundError as missing:
                raise StoreUnavailable(
                    self.url, "the bucket or directory does not exist", self._remedy
                ) from missing

        await self._persist("put", put)
        self.counters.count(written=size)
        self.requests.bytes["put"] += size
        return size

    async def get(self, what: str | Ref) -> bytes:
        """The whole object, given a `Ref` verified. Raises ObjectMissing, ObjectDamaged, BadKey, StoreUnavailable."""
        key = checked_key(what.key if isinstance(what, Ref) else what)
        size = what.bytes if isinstance(what, Ref) else await self.size(key)
        if size is None:
            raise ObjectMissing(key, self.url)
        data = bytes(await self._part(key, 0, size, size)) if size else await self._empty(key)
        if isinstance(what, Ref) and (found := await off_loop(size, crc32c, data)) != what.crc32c:
            raise ObjectDamaged(key, f"CRC32C {found:08x}, its reference says {what.crc32c:08x}")
        return data

    async def get_ranges(
        self, key: str, ranges: Sequence[Range], *, size: int | None = None, gap: int = COALESCE_GAP
    ) -> list[memoryview]:
        """The bytes of each [start, end), in the order asked, as read-only views of the coalesced GETs (gap in bytes).

        `size`, if given, is the size that the object must have. Raises ObjectMissing, ObjectDamaged when the object
        ends before a range or has another size, ValueError on an empty range, BadKey, StoreUnavailable.
        """
        checked_key(key)
        gets = coalesce(ranges, gap)
        bodies = await asyncio.gather(*[self._part(key, start, end, size) for start, end in gets])
        views: list[memoryview] = []
        for start, end in ranges:
            home = bisect_right(gets, start, key=lambda get: get[0]) - 1
            first = start - gets[home][0]
            views.append(bodies[home][first : first + end - start])
        return views

    async def size(self, key: str) -> int | None:
        """Bytes of the object, None if there is none. Raises BadKey, StoreUnavailable."""
        checked_key(key)
        return await self._persist("head", lambda: self._head(key))

    async def list(self, prefix: str = "") -> AsyncIterator[tuple[str, int]]:
        """(key, bytes) of every object under the prefix, a whole number of components; in no given order."""
        async for key, size, _ in self.list_dated(prefix):
            yield key, size

    async def list_dated(self, prefix: str = "") -> AsyncIterator[tuple[str, int, datetime]]:
        """`list` with the time at which the store has each object from."""
        under = checked_prefix(prefix) or None

        async def collect() -> Sequence[ObjectMeta]:
            # Whole, because a listing that broke in the middle cannot be resumed: it would end early without a word.
            return await obstore.list(self._client, prefix=under).collect_async()  # pyright: ignore[reportUnknownMemberType]  # its Arrow overloads are untyped

        found = await self._persist("list", collect)
        self.counters.count()
        for meta in found:
            yield meta["path"], meta["size"], meta["last_modified"]

    async def copy(self, key: str, to: str) -> None:
        """Makes the object one of `to` too, in the store itself: no byte of it passes here. What stands there already must be the
        same object: it is written over. Raises ObjectMissing, BadKey, StoreUnavailable."""
        checked_key(key)
        checked_key(to)

        async def copy() -> None:
            try:
                await obstore.copy_async(self._client, key, to)
            except FileNotFoundError:
                raise ObjectMissing(key, self.url) from None

        await self._persist("copy", copy)
        self.counters.count()

    async def remove(self, keys: Sequence[str]) -> None:
        """Removes objects, those that are there: for a run that is given up as a whole, after which nothing names them.

        Raises BadKey, StoreUnavailable.
        """
        for first in range(0, len(keys), _REMOVED_AT_ONCE):
            some = [checked_key(key) for key in keys[first : first + _REMOVED_AT_ONCE]]

            async def delete(some: list[str] = some) -> None:
                try:
                    await obstore.delete_async(self._client, some)
                except FileNotFoundError:
                    # A store of files stops at the first that is not there.
                    for key in some:
                        with contextlib.suppress(FileNotFoundError):
                            await obstore.delete_async(self._client, key)

            await self._persist("delete", delete)
            self.counters.count()

    async def _head(self, key: str) -> int | None:
        try:
            found = await obstore.head_async(self._client, key)
        except FileNotFoundError:
            return None
        self.counters.count()
        return found["size"]

    async def _empty(self, key: str) -> bytes:
        """An object that should be empty: no range can be asked of it."""
        if (found := await self.size(key)) != 0:
            raise (
                ObjectMissing(key, self.url)
                if found is None
                else ObjectDamaged(key, f"{found} bytes, expected none")
            )
        return b""

    async def _part(self, key: str, start: int, end: int, size: int | None) -> memoryview:
        if end - start <= PART:
            return await self._persist("get", lambda: self._range(key, start, end, size))
        whole = memoryview(bytearray(end - start))

        async def fill(first: int) -> None:
            last = min(first + PART, end)
            whole[first - start : last - start] = await self._persist(
                "get", lambda: self._range(key, first, last, size)
            )

        await asyncio.gather(*[fill(first) for first in range(start, end, PART)])
        return whole.toreadonly()

    async def _holds(self, key: str, pieces: Sequence[memoryview], size: int) -> bool:
        ours = theirs = 0
        for piece in pieces:
            ours = await off_loop(len(piece), crc32c, piece, ours)
        # Piece by piece, so that no second copy of the object is in memory.
        for first in range(0, size, _COMPARED):
            body = await self._range(key, first, min(first + _COMPARED, size), size)
            theirs = await off_loop(len(body), crc32c, body, theirs)
        return theirs == ours

    async def _range(self, key: str, start: int, end: int, size: int | None) -> memoryview:
        try:
            answer = await obstore.get_async(self._client, key, options={"range": (start, end)})
            found = answer.meta["size"]
            body = memoryview(await answer.bytes_async()) if found >= end else memoryview(b"")
        except FileNotFoundError:
            raise ObjectMissing(key, self.url) from None
        except refused.GenericError as error:
            # A range that starts past the end is refused in words of the store's own; its size tells.
            head = await self._head(key)
            if head is None or head > start:
                raise _Transport(str(error)) from error
            found, body = head, memoryview(b"")
        if found < end or (size is not None and found != size):
            raise ObjectDamaged(
                key, f"it is {found} bytes, expected {size if size is not None else f'at least {end}'}"
            )
        if len(body) != end - start:
            raise _Transport(f"{len(body)} of {end - start} bytes arrived of {key}")
        self.counters.count(read=len(body))
        self.requests.bytes["get"] += len(body)
        return body

    async def _persist(self, operation: str, attempt: Callable[[], Awaitable[_Result]]) -> _Result:
        """Runs the attempt in a slot, again on transport errors, until the patience is spent."""

        async def once() -> _Result:
            async with self._slots:
                try:
                    return await attempt()
                except refused.GenericError as error:
                    # Of several objects that were to go at once, one may be refused in an answer that says 200.
                    if _DENIED in str(error):
                        raise StoreUnavailable(
                            self.url, f"access denied ({_brief(error)})", self._remedy
                        ) from error
                    raise _Transport(str(error)) from error
                except (refused.PermissionDeniedError, refused.UnauthenticatedError) as error:
                    raise StoreUnavailable(
                        self.url, f"access denied ({_brief(error)})", self._remedy
                    ) from error

        # Not by tenacity, which looks at its own callbacks so often that a small read takes half as long again.
        give_up, longest = time.monotonic() + self._patience_s, _FIRST_WAIT_S
        with self.requests.during(operation), self.waits.waiting("store"):
            while True:
                try:
                    return await once()
                except _Transport as error:
                    if time.monotonic() >= give_up:
                        raise StoreUnavailable(
                            self.url, f"no success in {self._patience_s:g} s ({_brief(error)})", self._remedy
                        ) from error
                self.requests.retries[operation] += 1
                # By chance, so that clients of a server that comes back come apart.
                await asyncio.sleep(random.uniform(0, longest))  # noqa: S311
                longest = min(2 * longest, _LONGEST_WAIT_S)


async def off_loop(size: int, work: Callable[..., _Result], *arguments: Any) -> _Result:
    """`work(*arguments)`, which walks over `size` bytes: in a thread when that is long, as the loop carries other tenants."""
    return await asyncio.to_thread(work, *arguments) if size > LONG else work(*arguments)


def directory_of(url: str) -> Path | None:
    """The directory of this machine that a store's URL names; None of one that names none."""
    parts = urlsplit(url)
    local = parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/")
    return Path(unquote(parts.path)) if local else None


def _brief(error: Exception) -> str:
    """An obstore message without its debug dump and response body."""
    return " ".join(str(error).split("Debug source")[0].split("<?xml")[0].split())[:300]
