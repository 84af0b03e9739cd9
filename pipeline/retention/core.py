"""Which objects of a run may go, and why: a fold over its log.

Promises:
- nothing goes that a batch may still need: no object of a group that is undecided, accepted, or shaped and in no batch, or
  in a batch that is not trained; whatever the log's continuation, no plan names what was taken before;
- of the trained batches those of the last `consumed_steps` steps are whole, with their plans; of the checkpoints the last
  `checkpoint_steps` are, always the newest trained, and the weights that engines may be loading; the initial policy is no object;
- what a rejected group, a failed sequence or a superseded attempt left goes `rejected_steps` trained steps later;
- an image may be of any sequence that is still to come, whose host would not send it again: none goes while the run goes on,
  and then only those that no sequence shows that has not gone;
- members of a batch are recomputed as the sampler does. Where they are not what the batch says, or a message of the log cannot
  be read, nothing more goes: `unreadable` says why;
- state is bounded by what is in flight and what waits to go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pipeline.batch.sampler import SamplerCore
from pipeline.retention.names import Owner, owner
from pipeline.signal.groups import Group
from schemas.config import Retention
from schemas.envelope import Event, Invalid, Unknown
from schemas.facts import (
    FACTS,
    RULES,
    BatchYielded,
    PolicyPublished,
    RunStarted,
    RunStopped,
    SampleGraded,
    SampleRejected,
    SampleShaped,
    SequenceDispatched,
    SequenceFailed,
    SequenceFinished,
    SequenceOpened,
    SequenceScored,
    SequenceVerified,
    StepTrained,
)
from schemas.keys import image_key, payload_key
from schemas.names import attempt_id
from schemas.payload import PayloadHeader, Ref

REJECTED, FAILED, SUPERSEDED, LATE, CONSUMED, CHECKPOINT = (
    "rejected",
    "failed",
    "superseded",
    "late",
    "consumed",
    "checkpoint",
)
REASONS = {
    REJECTED: "of groups that were rejected",
    FAILED: "of sequences that failed",
    SUPERSEDED: "of attempts beside the one that ended its sequence",
    LATE: "made of a group when it was gone",
    CONSUMED: "of trained batches, with their plans",
    CHECKPOINT: "weights and optimizer states of earlier steps",
}
_LOADED = 2
"""Weights of the newest published steps that stay whatever the policy: engines may be loading the one before the newest."""


@dataclass(slots=True)
class Held:
    """What the store holds of one sample, while some of it may be needed or has not gone."""

    objects: dict[str, None] = field(default_factory=dict[str, None])
    attempts: dict[str, dict[int, list[str]]] = field(default_factory=dict[str, dict[int, list[str]]])
    """By sequence that has not ended: the attempts that were begun, each with its artefacts."""
    ended: dict[str, int] = field(default_factory=dict[str, int])
    """By sequence: the attempt that finished it; 0: it failed."""
    images: dict[str, None] = field(default_factory=dict[str, None])
    end: str = ""
    """rejected, consumed (in a batch, trained or not), or empty: undecided."""
    at: int = 0
    """Steps that were trained when it was rejected; or its batch."""


class RetentionCore:
    """See the module's promises. `take` is what it decides: it is told the policy, which is no part of the state."""

    STATE_VERSION: ClassVar[int] = 100 * 1 + SamplerCore.STATE_VERSION
    """The sampler's state is a part of this one."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.unreadable = ""
        self.over = False
        self.published = 0
        self._sampler = SamplerCore(run)
        self._held: dict[str, Held] = {}
        self._loose: dict[str, tuple[str, int]] = {}
        """By key what no sample holds: why it may go, and the steps that were trained when that was known."""
        self._plans: dict[int, str] = {}
        self._weights: dict[int, str] = {}
        self._optimizers: dict[int, str] = {}

    @property
    def trained(self) -> int:
        return self._sampler.trained

    @property
    def yielded(self) -> int:
        return self._sampler.yielded

    def read(self, found: Event | Unknown | Invalid) -> None:
        """Folds an event. Of a fact that this code cannot read nobody knows here what it says about members of a batch; what stands
        on no fact's subject says nothing."""
        match found:
            case Event():
                self.fold(found)
            case Unknown(type=type_, version=version):
                self._stop(found.seq, f"{type_} version {version} is not known to this release")
            case Invalid(subject=subject, reason=reason):
                if any(subject.startswith(f"rl.{self.run}.{type_}.") for type_ in FACTS):
                    self._stop(found.seq, reason)

    def _stop(self, seq: int, reason: str) -> None:
        self.unreadable = self.unreadable or f"message {seq} of the log cannot be read: {reason}"

    def fold(self, event: Event) -> None:
        fact = event.fact
        if isinstance(fact, BatchYielded):
            self._batch(fact)
        self._sampler.fold(event)
        match fact:
            case RunStarted(rules=rules) if rules > RULES:
                self._stop(event.seq, f"the run has decision rules {rules}, this release knows {RULES}")
            case SequenceDispatched(sample=sample):
                self._held.setdefault(sample, Held())
            case SequenceOpened():
                self._attempt(fact.sample, fact.source, fact.sequence, fact.attempt, [])
            case SequenceVerified():
                keys = [artefact.ref.key for artefact in fact.artefacts]
                self._attempt(fact.sample, fact.source, fact.sequence, fact.attempt, keys)
            case SequenceFinished():
                self._finished(fact)
            case SequenceFailed():
                self._failed(fact)
            case SequenceScored(scores=PayloadHeader(key=key)):
                self._of_sequence(fact.sample, fact.sequence, key)
            case SampleGraded(report=Ref(key=key)):
                self._add(fact.sample, key, "grading")
            case SampleShaped(sidecars=sidecars):
                for header in sidecars:
                    if header is not None:
                        self._add(fact.sample, header.key, "payload")
            case SampleRejected(sample=sample):
                held = self._held.get(sample)
                # One that waits for a batch which is on its way is not rejected by this: the sampler holds it still.
                if held is not None and not held.end and self._sampler.groups.get(sample) is None:
                    held.end, held.at = REJECTED, self.trained
            case StepTrained():
                self._of_step(self._weights, "weights", fact.step, fact.weights.key)
                self._of_step(self._optimizers, "optimizer", fact.step, fact.optimizer.key)
            case PolicyPublished(step=step):
                self.published = max(self.published, step)
            case RunStopped():
                self.over = True
            case _:
                pass

    def settled(self, sample: str) -> bool:
        """Whether the sample was dispatched, and is rejected or in a batch: nothing that is not in the log yet is needed of it."""
        held = self._held.get(sample)
        return held is not None and bool(held.end)

    def take(self, policy: Retention) -> dict[str, str]:
        """What goes by that policy now, by key with its reason, and is forgotten; the caller removes it. What the policy never
        removes is forgotten too: with another policy the log is to be folded anew. Empty when the log is unreadable.

        Takes time as the samples in the state are many: called when a step is trained.
        """
        if self.unreadable:
            return {}
        out: dict[str, str] = {}
        for sample, held in list(self._held.items()):
            steps = policy.rejected_steps if held.end == REJECTED else policy.consumed_steps
            if not held.end or (steps and not self._due(held.at, steps)):
                continue
            del self._held[sample]
            if steps:
                out |= dict.fromkeys(held.objects, held.end)
        for key, (reason, at) in list(self._loose.items()):
            # What a group got when it was gone, by a rule that is not remembered: only if both would remove it.
            steps = policy.rejected_steps
            if reason == LATE:
                steps = max(steps, policy.consumed_steps) if steps and policy.consumed_steps else 0
            if not steps or self._due(at, steps):
                del self._loose[key]
                if steps:
                    out[key] = reason
        for step, key in list(self._plans.items()):
            if not policy.consumed_steps or self._due(step, policy.consumed_steps):
                del self._plans[step]
                if policy.consumed_steps:
                    out[key] = CONSUMED
        return out | self._old_checkpoints(policy.checkpoint_steps)

    def images(self, policy: Retention) -> set[str] | None:
        """Keys of the images that stay, when all others may go; None while none may: the run goes on, or the policy keeps
        sequences that are forgotten."""
        if self.unreadable or not (self.over and policy.rejected_steps and policy.consumed_steps):
            return None
        return {image_key(self.run, digest) for held in self._held.values() for digest in held.images}

    def _due(self, at: int, steps: int) -> bool:
        return self.trained >= at + steps

    def _old_checkpoints(self, keep: int) -> dict[str, str]:
        out: dict[str, str] = {}
        loaded = min(self.trained, self.published) - max(keep, _LOADED)
        for kept, last in ((self._optimizers, self.trained - keep), (self._weights, loaded)):
            for step in [step for step in kept if not keep or step <= last]:
                key = kept.pop(step)
                if keep:
                    out[key] = CHECKPOINT
        return out

    def _batch(self, fact: BatchYielded) -> None:
        members = self._sampler.members(fact)
        for name, share in fact.sources.items():
            mine = [group for group in members if group.source == name]
            found = _counts(mine)
            if found != (share.groups, share.sequences, share.loss_tokens):
                self.unreadable = self.unreadable or (
                    f"batch {fact.step} has (groups, sequences, loss tokens) {(share.groups, share.sequences, share.loss_tokens)} of "
                    f"source {name}, this release makes them {found}"
                )
        for group in members:
            held = self._held.get(group.sample)
            if held is not None:
                held.end, held.at = CONSUMED, fact.step
        self._of_step(self._plans, "plan", fact.step, fact.plan.key)

    def _of_step(self, kept: dict[int, str], form: str, step: int, key: str) -> None:
        own = owner(self.run, key)
        if own is not None and (own.form, own.step) == (form, step):
            kept[step] = key

    def _attempt(self, sample: str, source: str, sequence: str, attempt: int, artefacts: list[str]) -> None:
        held = self._held.get(sample)
        if held is not None and sequence not in held.ended:
            held.attempts.setdefault(sequence, {}).setdefault(attempt, []).extend(artefacts)
        elif held is not None and held.ended[sequence] == attempt:
            for key in artefacts:
                self._add(sample, key, "artefact")
        else:
            self._supersede(source, sequence, attempt, artefacts, SUPERSEDED if held is not None else LATE)

    def _finished(self, fact: SequenceFinished) -> None:
        held = self._held.get(fact.sample)
        if held is not None and fact.sequence in held.ended:
            # It failed before, and is no member of its group.
            self._let_go(fact.payload.key, fact.sequence, SUPERSEDED)
            return
        self._add(fact.sample, fact.payload.key, "payload")
        if held is not None:
            held.images |= dict.fromkeys(item.digest for context in fact.contexts for item in context.images)
            self._end(held, fact.source, fact.sequence, fact.attempt)

    def _failed(self, fact: SequenceFailed) -> None:
        held = self._held.get(fact.sample)
        ended = held.ended.get(fact.sequence) if held is not None else None
        if fact.payload is not None and not ended:
            self._let_go(fact.payload.key, fact.sequence, FAILED if held is not None else LATE)
        if held is not None and ended is None:
            self._end(held, fact.source, fact.sequence, 0)

    def _end(self, held: Held, source: str, sequence: str, attempt: int) -> None:
        held.ended[sequence] = attempt
        for number, artefacts in held.attempts.pop(sequence, {}).items():
            if number == attempt:
                for key in artefacts:
                    if self._is(key, "artefact", sequence=sequence):
                        held.objects[key] = None
            else:
                self._supersede(source, sequence, number, artefacts, SUPERSEDED if attempt else FAILED)

    def _supersede(self, source: str, sequence: str, attempt: int, artefacts: list[str], why: str) -> None:
        """Whether it wrote a payload before it died is not known: to remove what is not there costs nothing."""
        key = payload_key(self.run, source, attempt_id(sequence, attempt))
        for each in (key, *artefacts):
            self._let_go(each, sequence, why)

    def _let_go(self, key: str, sequence: str, why: str) -> None:
        own = owner(self.run, key)
        if own is None or own.sequence != sequence:
            return
        held = self._held.get(own.sample)
        if held is None or key not in held.objects:
            self._loose.setdefault(key, (why, self.trained))

    def _of_sequence(self, sample: str, sequence: str, key: str) -> None:
        if self._is(key, "payload", sequence=sequence):
            self._add(sample, key, "payload")

    def _add(self, sample: str, key: str, form: str) -> None:
        """The key is an object of the sample; of one that is gone it is late."""
        if not self._is(key, form, sample=sample):
            return
        held = self._held.get(sample)
        if held is None:
            self._loose.setdefault(key, (LATE, self.trained))
        else:
            held.objects[key] = None
            self._loose.pop(key, None)

    def _is(self, key: str, form: str, **of: str) -> bool:
        own: Owner | None = owner(self.run, key)
        return own is not None and own.form == form and all(getattr(own, k) == v for k, v in of.items())

    def dump(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "unreadable": self.unreadable,
            "over": self.over,
            "published": self.published,
            "sampler": self._sampler.dump(),
            "held": {
                sample: [
                    list(held.objects),
                    {s: sorted(attempts.items()) for s, attempts in held.attempts.items()},
                    dict(held.ended),
                    list(held.images),
                    held.end,
                    held.at,
                ]
                for sample, held in self._held.items()
            },
            "loose": dict(self._loose),
            "plans": sorted(self._plans.items()),
            "weights": sorted(self._weights.items()),
            "optimizers": sorted(self._optimizers.items()),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.run, self.unreadable = state["run"], state["unreadable"]
        self.over, self.published = state["over"], state["published"]
        self._sampler.load(state["sampler"])
        self._held = {
            sample: Held(
                dict.fromkeys(objects),
                {s: {number: list(keys) for number, keys in each} for s, each in attempts.items()},
                dict(ended),
                dict.fromkeys(images),
                end,
                at,
            )
            for sample, (objects, attempts, ended, images, end, at) in state["held"].items()
        }
        self._loose = {key: (why, at) for key, (why, at) in state["loose"].items()}
        self._plans = dict(state["plans"])
        self._weights, self._optimizers = dict(state["weights"]), dict(state["optimizers"])


def _counts(groups: list[Group]) -> tuple[int, int, int]:
    """(groups, sequences, loss tokens), as a batch says them of a source."""
    return len(groups), sum(len(g.finished) for g in groups), sum(g.loss_tokens() for g in groups)
