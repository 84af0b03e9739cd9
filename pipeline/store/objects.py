"""Write-once objects over obstore: any S3, a directory, or memory.

Promises:
- a key is written once: of any number of writers of different bytes one wins, the others get `ObjectExists`; a writer
  that retries after a lost answer finds its own bytes and is told that it won;
- `get` of a `Ref` returns exactly the bytes that the `Ref` was made from, or raises;
- transport errors are retried for `patience_s` seconds, then `StoreUnavailable` names the store and the remedy; nothing
  else is retried;
- at most `concurrency` requests are in flight, each with a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import obstore
import orjson
from obstore import exceptions as refused
from obstore.store import LocalStore, MemoryStore, S3Store
from pydantic import BaseModel, Field, ValidationError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from pipeline.checksum import crc32c
from pipeline.hosts.waits import Waits
from pipeline.store.errors import BadStore, ObjectDamaged, ObjectExists, ObjectMissing, StoreUnavailable
from pipeline.store.keys import BadKey, checked_key, checked_prefix
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
_REMOVED_AT_ONCE = 1000
"""S3's limit on the keys of one DeleteObjects."""
_TIMEOUT = timedelta(seconds=60)
_CONNECT_TIMEOUT = timedelta(seconds=5)

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


class _Credentials(BaseModel):
    access_key: str = Field(min_length=1)
    secret_key: str = Field(min_length=1)


class _Transport(Exception):
    """An attempt failed on the way; worth another."""


class ObjectStore:
    """See the module. Made by `open` or `in_memory`; belongs to one event loop. `waits` measures how long requests take, with
    their tries and for a slot, as `store`."""

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
        if url.scheme == "file" and url.netloc in ("", "localhost") and url.path.startswith("/"):
            client, remedy = (
                _directory(Path(unquote(url.path)), config.url),
                "check its disk space and permissions",
            )
        elif url.scheme == "s3" and url.netloc:
            client = _bucket(config, url.netloc, url.path.strip("/"))
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
        checked_key(key)
        data = memoryview(data).cast("B")
        size = len(data)
        if size > MAX_OBJECT:
            raise ValueError(f"object {key} is {size} bytes, limit {MAX_OBJECT} (one S3 PUT); split it")
        ref = Ref(key=key, bytes=size, crc32c=await off_loop(size, crc32c, data))
        attempts = itertools.count()

        async def put() -> None:
            again = next(attempts) > 0
            try:
                await obstore.put_async(self._client, key, data, mode="create")
            except refused.AlreadyExistsError as taken:
                found = await self._head(key)
                if found is None:
                    # S3's 409: another conditional PUT was under way and did not succeed. The key is still free.
                    raise _Transport(str(taken)) from taken
                # Our own earlier PUT may have arrived although its answer did not.
                if not (again and found == size and await self._holds(key, data)):
                    raise ObjectExists(key, self.url) from None
            except FileNotFoundError as missing:
                raise StoreUnavailable(
                    self.url, "the bucket or directory does not exist", self._remedy
                ) from missing

        await self._persist(put)
        self.counters.count(written=size)
        return ref

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
        starts = np.asarray([start for start, _ in gets], np.int64)
        for start, end in ranges:
            home = int(np.searchsorted(starts, start, side="right")) - 1
            first = start - gets[home][0]
            views.append(bodies[home][first : first + end - start])
        return views

    async def size(self, key: str) -> int | None:
        """Bytes of the object, None if there is none. Raises BadKey, StoreUnavailable."""
        checked_key(key)
        return await self._persist(lambda: self._head(key))

    async def list(self, prefix: str = "") -> AsyncIterator[tuple[str, int]]:
        """(key, bytes) of every object under the prefix, a whole number of components; in no given order."""
        under = checked_prefix(prefix) or None

        async def collect() -> Sequence[ObjectMeta]:
            # Whole, because a listing that broke in the middle cannot be resumed: it would end early without a word.
            return await obstore.list(self._client, prefix=under).collect_async()  # pyright: ignore[reportUnknownMemberType]  # its Arrow overloads are untyped

        found = await self._persist(collect)
        self.counters.count()
        for meta in found:
            yield meta["path"], meta["size"]

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

        await self._persist(copy)
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

            await self._persist(delete)
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
            return await self._persist(lambda: self._range(key, start, end, size))
        whole = memoryview(bytearray(end - start))

        async def fill(first: int) -> None:
            last = min(first + PART, end)
            whole[first - start : last - start] = await self._persist(
                lambda: self._range(key, first, last, size)
            )

        await asyncio.gather(*[fill(first) for first in range(start, end, PART)])
        return whole.toreadonly()

    async def _holds(self, key: str, data: memoryview) -> bool:
        size = len(data)
        body = await self._range(key, 0, size, size) if size else memoryview(b"")
        # Not memoryview's own ==, which compares byte by byte.
        return await off_loop(size, np.array_equal, np.asarray(body), np.asarray(data))

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
        return body

    async def _persist(self, attempt: Callable[[], Awaitable[_Result]]) -> _Result:
        """Runs the attempt in a slot, again on transport errors, until the patience is spent."""

        async def once() -> _Result:
            async with self._slots:
                try:
                    return await attempt()
                except refused.GenericError as error:
                    raise _Transport(str(error)) from error
                except (refused.PermissionDeniedError, refused.UnauthenticatedError) as error:
                    raise StoreUnavailable(
                        self.url, f"access denied ({_brief(error)})", self._remedy
                    ) from error

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Transport),
            stop=stop_after_delay(self._patience_s),
            wait=wait_random_exponential(multiplier=0.1, max=2.0),
            reraise=True,
        )
        try:
            with self.waits.waiting("store"):
                return await retrying(once)
        except _Transport as error:
            raise StoreUnavailable(
                self.url, f"no success in {self._patience_s:g} s ({_brief(error)})", self._remedy
            ) from error


async def off_loop(size: int, work: Callable[..., _Result], *arguments: Any) -> _Result:
    """`work(*arguments)`, which walks over `size` bytes: in a thread when that is long, as the loop carries other tenants."""
    return await asyncio.to_thread(work, *arguments) if size > LONG else work(*arguments)


def _brief(error: Exception) -> str:
    """An obstore message without its debug dump and response body."""
    return " ".join(str(error).split("Debug source")[0].split("<?xml")[0].split())[:300]


def _directory(path: Path, url: str) -> LocalStore:
    remedy = f"make {path} a directory that this user can write, or set store.url"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(url, f"cannot make the directory ({error.strerror})", remedy) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StoreUnavailable(url, "the directory is not writable", remedy)
    return LocalStore(path)


def _bucket(config: StoreConfig, bucket: str, prefix: str) -> S3Store:
    if config.endpoint and urlsplit(config.endpoint).scheme not in ("http", "https"):
        raise BadStore(f"store.endpoint {config.endpoint!r} is not http(s)://host:port")
    try:
        under = checked_prefix(prefix) or None
    except BadKey as error:
        raise BadStore(f"store.url {config.url!r}: its prefix cannot be used: {error}") from error
    options: dict[str, Any] = {"region": config.region}
    if config.endpoint:
        options["endpoint"] = config.endpoint
    if config.credentials_file:
        access, secret = read_credentials(config)
        options |= {"access_key_id": access, "secret_access_key": secret}
    return S3Store(
        bucket,
        prefix=under,
        client_options={
            "allow_http": config.endpoint.startswith("http://"),
            "connect_timeout": _CONNECT_TIMEOUT,
            "timeout": _TIMEOUT,
        },
        # Retries are ours: a repeated conditional PUT must know that it is one.
        retry_config={"max_retries": 0, "retry_timeout": _TIMEOUT},
        **options,
    )


def read_credentials(config: StoreConfig) -> tuple[str, str]:
    """(access key, secret key) of the credentials file; raises StoreUnavailable that names the file, never its content."""
    path = Path(config.credentials_file)
    remedy = f'write {path} as {{"access_key": "...", "secret_key": "..."}}'
    try:
        content = orjson.loads(path.read_bytes())
    except OSError as error:
        raise StoreUnavailable(
            config.url, f"cannot read store.credentials_file {path} ({error.strerror})", remedy
        ) from None
    except orjson.JSONDecodeError:
        raise StoreUnavailable(config.url, f"store.credentials_file {path} is not JSON", remedy) from None
    try:
        keys = _Credentials.model_validate(content)
    except ValidationError:
        raise StoreUnavailable(
            config.url, f"store.credentials_file {path} lacks access_key or secret_key", remedy
        ) from None
    return keys.access_key, keys.secret_key
