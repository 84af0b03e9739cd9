"""Snapshots: what a fold knew at a stream sequence, kept in a JetStream KV bucket, so that a start need not read it all.

Promises:
- `load` gives the newest snapshot of this log, of this state version, whole; or None, and the reason is logged: it is
  then thrown away by the next one, and the log refolded;
- a snapshot is seen whole or not at all: its chunks are written first, then the one key that names them, by
  compare-and-set; of two processes that save at once the one that knows more stands;
- a broker that is away or full costs a snapshot, never the fold.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import logging
import uuid
import zlib
from dataclasses import dataclass
from typing import Any

import orjson
from nats.errors import Error as NatsError
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import APIError, BucketNotFoundError, KeyNotFoundError
from nats.js.kv import KeyValue
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.checksum import crc32c
from pipeline.log.log import Log

_LOG = logging.getLogger("packtrain.snapshot")
_CHUNK = 512 * 1024
"""Bytes: under the broker's usual limit for a message, 1 MiB."""
_AWAY = (NatsError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a fold knew after the message `seq`."""

    seq: int
    state: dict[str, Any]


class _Head(BaseModel):
    """The one key that names a snapshot's chunks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    log: str
    seq: int
    id: str
    chunks: int
    crc32c: int


def bucket_name(run: str) -> str:
    """The run's KV bucket; its JetStream stream is `KV_` and this."""
    return f"RL_{run}"


async def open_bucket(log: Log, create: bool) -> KeyValue | None:
    """The run's KV bucket; None: there is none. `create`: makes it, which only a user that makes the run's stream may."""
    name = bucket_name(log.run)
    try:
        return await log.js.key_value(name)
    except BucketNotFoundError:
        if not create:
            return None
        config = KeyValueConfig(bucket=name, history=1, storage=StorageType.FILE, replicas=log.replicas)
        return await log.js.create_key_value(config)


class Snapshots:
    """The snapshots of one fold, by its name; see the module's promises. `version`: the state version of its code."""

    def __init__(self, log: Log, name: str, version: int) -> None:
        self._log = log
        self._name = name
        self._version = version
        self._bucket: KeyValue | None = None

    async def load(self) -> Snapshot | None:
        """The newest snapshot that may be used. Waits while the broker is away."""
        return await self._log.patiently(self._load, f"look for a snapshot of {self._name}")

    async def save(self, seq: int, state: dict[str, Any]) -> int:
        """Keeps the state after message `seq`, unless a newer one is kept. Bytes written, 0 when it was not."""
        body = zlib.compress(orjson.dumps(state), 1)
        try:
            return await self._save(seq, body)
        except _AWAY as error:
            _LOG.warning(
                "snapshot of %s at %d not kept: %s", self._name, seq, str(error) or type(error).__name__
            )
            return 0

    async def _load(self) -> Snapshot | None:
        bucket = await self._open(create=False)
        found = await self._head(bucket) if bucket is not None else None
        if bucket is None or found is None:
            return None
        head, _ = found
        if head is None:
            return self._refuse("its head cannot be read")
        if head.version != self._version:
            return self._refuse(f"it is of state version {head.version}, this code has {self._version}")
        info = await self._log.info()
        if head.log != _identity(info.created) or head.seq > info.state.last_seq:
            return self._refuse("it is of another log of the same name")
        try:
            parts = [await bucket.get(self._chunk(head.id, i)) for i in range(head.chunks)]
        except KeyNotFoundError:
            return self._refuse("a chunk is missing")
        body = b"".join(part.value or b"" for part in parts)
        if crc32c(body) != head.crc32c:
            return self._refuse("its checksum does not match")
        return Snapshot(head.seq, orjson.loads(zlib.decompress(body)))

    def _refuse(self, reason: str) -> None:
        _LOG.warning("snapshot of %s is not used, the log is refolded: %s", self._name, reason)

    async def _save(self, seq: int, body: bytes) -> int:
        bucket = await self._open(create=True)
        assert bucket is not None
        found = await self._head(bucket)
        old, revision = found if found is not None else (None, 0)
        identity = _identity((await self._log.info()).created)
        if old is not None and old.log == identity and old.version == self._version and old.seq >= seq:
            return 0
        id_ = uuid.uuid4().hex
        chunks = [body[at : at + _CHUNK] for at in range(0, len(body), _CHUNK)]
        for number, chunk in enumerate(chunks):
            await bucket.put(self._chunk(id_, number), chunk)
        head = _Head(
            version=self._version,
            log=identity,
            seq=seq,
            id=id_,
            chunks=len(chunks),
            crc32c=crc32c(body),
        )
        stale = old
        try:
            await bucket.update(f"{self._name}.head", head.model_dump_json().encode(), last=revision)
        except APIError:
            # Another process of this service was faster; what it knows is as good.
            stale = head
        for number in range(stale.chunks if stale is not None else 0):
            await bucket.purge(self._chunk(stale.id if stale is not None else "", number))
        return 0 if stale is head else len(body)

    async def _head(self, bucket: KeyValue) -> tuple[_Head | None, int] | None:
        """(head, revision); no head when it cannot be read; None when there was never one."""
        try:
            entry = await bucket.get(f"{self._name}.head")
        except KeyNotFoundError:
            return None
        try:
            return _Head.model_validate_json(entry.value or b""), entry.revision or 0
        except ValidationError:
            return None, entry.revision or 0

    async def _open(self, create: bool) -> KeyValue | None:
        if self._bucket is None:
            self._bucket = await open_bucket(self._log, create)
        return self._bucket

    def _chunk(self, id_: str, number: int) -> str:
        return f"{self._name}.{id_}.{number}"


def _identity(created: Any) -> str:
    """When the stream was made: another stream of the name has another."""
    return str(created)
