"""What graders need of a group, read from the log and the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.engines.policies import BESIDE_WEIGHTS, policy_dir
from pipeline.graders.base import Material, Need
from pipeline.graders.transcripts import COLUMNS, Transcript, transcript
from pipeline.log import Log
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.config import RunConfig, Source
from schemas.facts import (
    Artefact,
    SampleCompleted,
    SequenceDispatched,
    SequenceFinished,
    SequenceOpened,
    SequenceVerified,
)
from schemas.names import attempt_id


class Reader:
    """Reads groups of a run. Raises PolicyMissing where there is no tokenizer for those whose graders read text."""

    def __init__(self, config: RunConfig, log: Log, store: ObjectStore, text: bool) -> None:
        self._sources = {source.name: source for source in config.sources}
        self._log = log
        self._store = store
        self._tokenizer = (
            PolicyTokenizer.load(policy_dir(config.engine.policy, BESIDE_WEIGHTS)) if text else None
        )

    async def read(self, completed: SampleCompleted, needs: frozenset[Need]) -> Material:
        """Raises StoreError, LookupError for a fact that is not in the log; waits while the broker is away."""
        if not needs:
            return Material(completed)
        members = await asyncio.gather(*[self._finished(completed, each) for each in completed.sequences])
        said = await asyncio.gather(*[self._transcript(member) for member in members])
        if "artefacts" not in needs:
            return Material(completed, tuple(said))
        source = self._sources[completed.source]
        left = await asyncio.gather(*[self._artefacts(source, member) for member in members])
        by = {member.sequence: artefacts for member, artefacts in zip(members, left, strict=True)}
        task = await self._task(source, completed, members)
        return Material(completed, tuple(said), task, by, lambda artefact: self._store.get(artefact.ref))

    async def _finished(self, completed: SampleCompleted, sequence: str) -> SequenceFinished:
        event = await self._log.last("sequence.finished", completed.source, sequence)
        if event is None or not isinstance(event.fact, SequenceFinished):
            raise LookupError(
                f"sequence {sequence} of {completed.sample} has no sequence.finished in the log"
            )
        return event.fact

    async def _transcript(self, finished: SequenceFinished) -> Transcript:
        assert self._tokenizer is not None
        columns = await read_columns(self._store, finished.payload, COLUMNS)
        return await asyncio.to_thread(transcript, finished, columns, self._tokenizer)

    async def _artefacts(self, source: Source, finished: SequenceFinished) -> tuple[Artefact, ...]:
        attempt = attempt_id(finished.sequence, finished.attempt)
        opened = await self._log.last("sequence.opened", source.pool, attempt)
        if opened is None or not isinstance(opened.fact, SequenceOpened):
            return ()
        # The verdict is addressed to the agent-loop host that opened the session.
        verified = await self._log.last("sequence.verified", opened.fact.host, attempt)
        return verified.fact.artefacts if verified and isinstance(verified.fact, SequenceVerified) else ()

    async def _task(
        self, source: Source, completed: SampleCompleted, members: Sequence[SequenceFinished]
    ) -> dict[str, object]:
        first = (
            await self._log.last("sequence.dispatched", source.name, members[0].sequence) if members else None
        )
        index = first.fact.task_index if first and isinstance(first.fact, SequenceDispatched) else None
        return {
            "source": source.name,
            "sample": completed.sample,
            "task_index": index,
            "environment": source.environment.model_dump(mode="json"),
        }
