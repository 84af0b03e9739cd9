"""One source's groups, from `sample.completed` to `sample.graded`.

Promises:
- every group gets one revision 0: the grader's answer if that comes by the deadline, which counts from the event's time, so that
  waiting for a turn counts too; else the original rewards, with the reason. Under the policy `lag` it gets them at once;
- an answer that comes after that is its revision 1. There is no third, and no revision 1 of tries that all failed;
- at most `concurrency` groups are judged at once, each try of at most `timeout_s`; between tries a group takes no place;
- where graders are slower than the run, the groups that are already decided do not grow without end, and so hold up no others
  (`Late`);
- what stands is not judged again, after whatever crash: facts first, then the answer in the store, which is written before its fact.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import ValidationError
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

from pipeline.checksum import crc32c
from pipeline.graders.base import Grader, GraderFailed, Material
from pipeline.hosts.metrics import Measures
from pipeline.log import Log, end_tasks
from pipeline.signal.grading import LAG, Answer, Graded, Unusable, graded, graded_fact, kept_fact, open_still
from pipeline.store import ObjectStore
from pipeline.store.errors import ObjectExists, ObjectMissing, StoreError, StoreUnavailable
from pipeline.store.outage import outlasting
from schemas.config import Source
from schemas.envelope import Event
from schemas.facts import SampleCompleted, SampleGraded
from schemas.keys import grading_key
from schemas.payload import Frozen, Ref
from services.grader.reading import Reader

_LOG = logging.getLogger("packtrain.grader")


@dataclass(frozen=True)
class Limits:
    """capacity: groups in hand of one process, which must hold all that are to be decided; late: those of them that are decided
    already and still tried. backoff_s: before the second try, at most; it doubles up to `longest_backoff_s`."""

    capacity: int = 4096
    late: int = 3072
    ack_wait_s: float = 10.0
    backoff_s: float = 1.0
    longest_backoff_s: float = 60.0


class Report(Frozen):
    """A grader's whole answer, as it lies in the store."""

    grader: str
    answer: Answer
    attempts: int
    seconds: float
    cost: float


@dataclass(frozen=True, slots=True)
class _Found:
    """What the tries came to: an answer, with its report if it has one, or why there is none."""

    result: Graded | None
    failed: str
    attempts: int
    seconds: float
    cost: float
    report: Ref | None = None


@dataclass
class _Spent:
    """What a group's tries took by now; `trying`: whether one is under way, in a place; `given_up`: by `Late`."""

    attempts: int = 0
    began: float = 0.0
    cost: float = 0.0
    trying: bool = False
    given_up: bool = False

    def found(self, result: Graded | None, failed: str = "") -> _Found:
        seconds = time.monotonic() - self.began if self.began else 0.0
        return _Found(result, failed, max(self.attempts, 1), seconds, self.cost)


class Late:
    """The groups of a process, of all sources, whose answer is to come after their revision 0. Of more than `most` the oldest that is
    not being tried is given up: it is the likeliest to be in a batch already, and would else hold a slot that others wait for."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._groups: dict[asyncio.Task[_Found], _Spent] = {}

    def add(self, finding: asyncio.Task[_Found], spent: _Spent) -> None:
        self._groups[finding] = spent
        finding.add_done_callback(lambda ended: self._groups.pop(ended, None))
        if len(self._groups) > self._most:
            waiting = (task for task, each in self._groups.items() if not each.trying)
            if (oldest := next(waiting, None)) is not None:
                self._groups.pop(oldest).given_up = True
                oldest.cancel()


class Judging:
    """See the module's promises. Belongs to one event loop."""

    def __init__(
        self,
        source: Source,
        grader: Grader,
        log: Log,
        store: ObjectStore,
        reader: Reader,
        measures: Measures,
        limits: Limits,
        late: Late,
    ) -> None:
        self._source = source.name
        self._measures = measures
        self._settings = source.grader
        self._grader = grader
        self._log = log
        self._store = store
        self._reader = reader
        self._limits = limits
        self._late = late
        self._places = asyncio.Semaphore(source.grader.concurrency)

    async def grade(self, event: Event) -> None:
        """Publishes what the group of a `sample.completed` still lacks."""
        completed = event.fact
        assert isinstance(completed, SampleCompleted)
        standing = await self._standing(completed, 0)
        if standing is not None and await self._settled(completed, standing):
            return
        spent = _Spent()
        finding = asyncio.create_task(self._find(completed, spent))
        try:
            if standing is None:
                standing = await self._by_deadline(event, completed, finding)
            if standing is not None and not open_still(standing):
                return
            if standing is not None:
                self._late.add(finding, spent)
            await asyncio.wait({finding})
            found = spent.found(None, "too many others wait") if spent.given_up else finding.result()
            outcome = "failed" if found.result is None else "answer" if standing is None else "late"
            self._measures.graded(self._source, outcome, found.seconds, found.cost)
            if standing is None:
                published = await self._log.publish(self._fact(completed, found, 0), event)
                standing = published.event.fact
                assert isinstance(standing, SampleGraded)
                if published.won or not open_still(standing):
                    return
            # Another grader, which is lost or not, was the first to go on without.
            if found.result is None:
                _LOG.warning("group %s gets no late answer: %s", completed.sample, found.failed)
                return
            await self._log.publish(self._fact(completed, found, 1), event)
        finally:
            await end_tasks([finding])

    async def _by_deadline(
        self, event: Event, completed: SampleCompleted, finding: asyncio.Task[_Found]
    ) -> SampleGraded | None:
        """The revision 0 without an answer that now stands; None where the tries are over in time."""
        if self._settings.policy == "lag":
            reason = LAG
        else:
            # A publisher whose clock is ahead of ours gives its group no more time than others have.
            waited = max(0.0, (datetime.now(UTC) - event.time).total_seconds())
            left = max(0.0, self._settings.deadline_s - waited)
            if (await asyncio.wait({finding}, timeout=left))[0]:
                return None
            reason = f"deadline of {self._settings.deadline_s:g} s passed"
        published = await self._log.publish(kept_fact(self._settings.kind, completed, reason), event)
        assert isinstance(published.event.fact, SampleGraded)
        return published.event.fact

    async def _standing(self, completed: SampleCompleted, revision: int) -> SampleGraded | None:
        asked = SampleGraded(
            source=completed.source, sample=completed.sample, revision=revision, grader="any", rewards=()
        )
        event = await self._log.last(asked.type, completed.source, asked.id())
        return event.fact if event is not None and isinstance(event.fact, SampleGraded) else None

    async def _settled(self, completed: SampleCompleted, standing: SampleGraded) -> bool:
        return not open_still(standing) or await self._standing(completed, 1) is not None

    def _fact(self, completed: SampleCompleted, found: _Found, revision: int) -> SampleGraded:
        kind, spent = self._settings.kind, {
            "attempts": found.attempts, "seconds": found.seconds, "cost": found.cost,
        }  # fmt: skip
        if found.result is None:
            return kept_fact(kind, completed, found.failed, **spent)
        return graded_fact(kind, completed, found.result, revision, report=found.report, **spent)

    async def _find(self, completed: SampleCompleted, spent: _Spent) -> _Found:
        """The answer that is in the store, or that of the tries, then in the store."""
        kept = await outlasting(lambda: self._kept(completed), _LOG)
        if kept is not None:
            return kept
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._settings.attempts),
            wait=self._wait,
            retry=retry_if_exception(lambda error: isinstance(error, GraderFailed) and error.again),
            reraise=True,
        )
        try:
            result = await retrying(self._try, completed, spent)
        except GraderFailed as error:
            tries = f"{spent.attempts} tries failed, the last: " if spent.attempts > 1 else ""
            return spent.found(None, f"{tries}{error}")
        found = spent.found(result)
        return (
            found if result.answer is None else await outlasting(lambda: self._keep(completed, found), _LOG)
        )

    async def _try(self, completed: SampleCompleted, spent: _Spent) -> Graded:
        """One try. A store that is away costs time, and no try."""
        async with self._places:
            spent.began, spent.trying = spent.began or time.monotonic(), True
            try:
                group = await outlasting(lambda: self._reader.read(completed, self._grader.needs), _LOG)
                spent.attempts += 1
                result, cost = await outlasting(lambda: self._judged(group), _LOG)
            except GraderFailed as error:
                spent.cost, spent.trying = spent.cost + error.cost, False
                raise
            except (StoreError, LookupError, ValueError) as error:
                raise GraderFailed(f"its sequences cannot be read: {error}", again=False) from error
            spent.cost += cost
            return result

    async def _judged(self, group: Material) -> tuple[Graded, float]:
        """Raises GraderFailed, and StoreUnavailable for what the grader reads of the group."""
        limit = asyncio.timeout(self._settings.timeout_s)
        try:
            async with limit:
                return await self._grader.judge(group)
        except (GraderFailed, StoreUnavailable):
            raise
        except Exception as error:
            said = (
                f"no answer within {self._settings.timeout_s:g} s"
                if limit.expired()
                else f"{type(error).__name__}: {error}"
            )
            raise GraderFailed(said) from error

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        backoff = wait_random_exponential(self._limits.backoff_s, self._limits.longest_backoff_s)(state)
        return max(backoff, error.after if isinstance(error, GraderFailed) else 0.0)

    def _key(self, completed: SampleCompleted) -> str:
        return grading_key(self._log.run, completed.source, completed.sample)

    async def _keep(self, completed: SampleCompleted, found: _Found) -> _Found:
        assert found.result is not None
        assert found.result.answer is not None
        report = Report(
            grader=self._settings.kind, answer=found.result.answer, attempts=found.attempts, seconds=found.seconds,
            cost=found.cost,
        )  # fmt: skip
        try:
            ref = await self._store.create(self._key(completed), report.model_dump_json().encode())
        except ObjectExists:
            # Of another grader at the same group, or of one that was lost before its fact: the first stands.
            kept = await self._kept(completed)
            assert kept is not None
            return kept
        return _Found(found.result, "", found.attempts, found.seconds, found.cost, ref)

    async def _kept(self, completed: SampleCompleted) -> _Found | None:
        """The answer that is in the store already, if there is one."""
        key = self._key(completed)
        try:
            data = await self._store.get(key)
        except ObjectMissing:
            return None
        try:
            report = Report.model_validate_json(data)
            result = graded(completed, report.answer)
        except (ValidationError, Unusable) as error:
            return _Found(None, f"object {key} is no report on this group: {error}", 1, 0.0, 0.0)
        ref = Ref(key=key, bytes=len(data), crc32c=crc32c(data))
        return _Found(result, "", report.attempts, report.seconds, report.cost, ref)
