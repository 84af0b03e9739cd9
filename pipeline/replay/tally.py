"""What a run's decisions came to: the outcome of every group, its advantages, what was dispatched, and each batch."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.batch.sampler import SamplerCore
from pipeline.decision import Core
from pipeline.signal.groups import Group
from pipeline.signal.sampling import staleness
from schemas.envelope import Event
from schemas.facts import (
    BatchYielded,
    RunStopped,
    SampleAccepted,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
)


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """One batch: where it stands, and the message that it was decided on (`through`). `staleness`: policy versions that
    the oldest token of a group is behind, by group, smallest first. `mean_reward` is over the batch's sequences."""

    seq: int
    through: int
    samples: tuple[str, ...]
    sequences: int
    tokens: int
    loss_tokens: int
    microbatches: int
    mean_reward: float
    staleness: tuple[int, ...]


class Tally:
    """Counts as the events are folded. `see` comes before the core folds the event: a batch has its members until then."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}
        """By sample: (source, "accepted" or "rejected: reason"); the last one stands."""
        self.advantages: dict[str, tuple[float, ...]] = {}
        self.batches: dict[int, BatchFigures] = {}
        self.dispatched: dict[str, str] = {}
        """By sequence its source."""
        self.stopped: int | None = None

    def see(self, core: Core, event: Event) -> None:
        match event.fact:
            case SequenceDispatched(source=source, sequence=sequence):
                self.dispatched[sequence] = source
            case SampleAccepted(source=source, sample=sample):
                self.outcomes[sample] = (source, "accepted")
            case SampleRejected(source=source, sample=sample, reason=reason):
                self.outcomes[sample] = (source, f"rejected: {reason}")
            case SampleShaped(sample=sample, advantages=advantages) if _in_play(core, sample):
                self.advantages[sample] = advantages
            case BatchYielded() as fact if isinstance(core, SamplerCore):
                self.batches[fact.step] = _figures(fact, core.members(fact), event.seq)
            case RunStopped():
                self.stopped = event.seq
            case _:
                pass


def _in_play(core: Core, sample: str) -> bool:
    """Whether advantages of the sample count: not those that come after its batch."""
    return not isinstance(core, SamplerCore) or core.groups.get(sample) is not None


def _figures(fact: BatchYielded, groups: list[Group], seq: int) -> BatchFigures:
    shares = fact.sources.values()
    sequences = sum(share.sequences for share in shares)
    return BatchFigures(
        seq=seq,
        through=fact.through,
        samples=tuple(group.sample for group in groups),
        sequences=sequences,
        tokens=sum(share.tokens for share in shares),
        loss_tokens=sum(share.loss_tokens for share in shares),
        microbatches=fact.microbatches,
        mean_reward=sum(share.mean_reward * share.sequences for share in shares) / max(sequences, 1),
        staleness=tuple(sorted(max(0, staleness(group, fact.step)) for group in groups)),
    )
