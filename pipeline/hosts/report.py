"""What a host says of itself every other second: one small value in the run's KV bucket, the last one only.

Promises:
- a broker that is away costs a report, never a host's time;
- `reports` gives every host's newest report and how old it is; one that cannot be read (a newer version's, a stranger's) is
  counted and left out.
"""

# nats-py's signatures hold untyped dictionaries and keyword arguments; values are typed where they enter our code.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Literal

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError
from nats.js.kv import KeyValue
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from pipeline.hosts.waits import Window
from pipeline.log.log import Log
from pipeline.log.snapshot import bucket_name, open_bucket
from schemas.names import Name

_LOG = logging.getLogger("packtrain.host")
EVERY_S = 2.0
SILENT_S = 10.0
"""A host whose newest report is older is silent: dead, blocked, or out of the broker's reach."""
_PREFIX = "host."
"""Of a report's key, `host.<service>.<host>`: the broker lets each service write its own."""
_AT_ONCE = 64
_PUT_S = 1.0


State = Literal["serving", "draining", "stopped"]


class HostReport(BaseModel):
    """One host at one moment. Lags in seconds, of the last minute; `waits` in seconds, of the last `wall_s`."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    host: Name
    service: Name
    pool: Name | Literal[""] = ""
    machine: str = ""
    pid: int = 0
    time: AwareDatetime
    up_s: float = 0.0
    state: State = "serving"
    tenants: int = Field(0, ge=0)
    capacity: int = Field(1, ge=1)
    done: int = Field(0, ge=0)
    pending: int = Field(0, ge=0)
    oldest: str = ""
    oldest_s: float = 0.0
    lag_p50_s: float = 0.0
    lag_p99_s: float = 0.0
    blocks: dict[str, int] = {}
    threads: int = 0
    busy_threads: int = 0
    cpu: float = 0.0
    rss_bytes: int = 0
    metrics: str = ""
    wall_s: float = 0.0
    tenant_s: float = 0.0
    waits: dict[str, float] = {}

    def window(self) -> Window:
        return Window(self.wall_s, self.tenant_s, self.waits)

    def age_s(self, now: datetime | None = None) -> float:
        return ((datetime.now(UTC) if now is None else now) - self.time).total_seconds()


class Reporter:
    """Keeps one host's newest report in the bucket."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._bucket: KeyValue | None = None

    async def put(self, report: HostReport, within_s: float = _PUT_S) -> bool:
        """Whether it was stored."""
        try:
            async with asyncio.timeout(within_s):
                if self._bucket is None:
                    self._bucket = await open_bucket(self._log, create=True)
                assert self._bucket is not None
                await self._bucket.put(
                    f"{_PREFIX}{report.service}.{report.host}", report.model_dump_json().encode()
                )
        except (NatsError, OSError, TimeoutError) as error:
            _LOG.debug("report of %s not kept: %s", report.host, error)
            self._bucket = None
            return False
        return True


async def reports(log: Log) -> tuple[list[HostReport], int]:
    """The newest report of every host of the run, by name, and how many cannot be read."""
    bucket = await open_bucket(log, create=False)
    if bucket is None:
        return [], 0
    # Not the bucket's own list of keys, which makes a consumer.
    prefix = f"$KV.{bucket_name(log.run)}."
    info = await log.js.stream_info(f"KV_{bucket_name(log.run)}", subjects_filter=f"{prefix}{_PREFIX}>")
    keys = [subject.removeprefix(prefix) for subject in info.state.subjects or {}]
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(key: str) -> HostReport | None:
        try:
            async with slots:
                return HostReport.model_validate_json((await bucket.get(key)).value or b"")
        except (KeyNotFoundError, ValidationError):
            return None

    found = [report for report in await asyncio.gather(*map(one, keys)) if report is not None]
    return sorted(found, key=lambda report: (report.service, report.pool, report.host)), len(keys) - len(
        found
    )
