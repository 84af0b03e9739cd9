"""The sampler's core alone: how fast it decides, and what a sequence in flight takes."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Sequence

from log_server import say
from report import Figure
from signals_world import AT_ONCE, MEMBERS, configured, figure, groups_of, order, started

from pipeline.batch.sampler import SamplerCore
from schemas.config import Broker
from schemas.envelope import Event, Message, at, decode, encode, new_event
from schemas.facts import BatchYielded, Fact, SampleCompleted, SampleGraded, SampleShaped

STATE = 4096
"""Goal: bytes of memory for a sequence in flight."""


def core(groups: int) -> list[Figure]:
    """Of a batch of so many groups of two sources, whose advantages the sampler makes itself."""
    chain = {"hooks": [{"kind": "length_penalty"}, {"kind": "grpo"}]}
    sources = [
        {"name": "code", "groups": groups - groups // 2, **chain},
        {"name": "math", "groups": groups // 2, **chain},
    ]
    config = configured("bench", Broker(), "file:///nowhere", sources)
    members = groups * MEMBERS
    say(f"the core alone: {members:,} sequences in {groups:,} groups")
    made = groups_of(config)
    whole = [sum(column.bytes for column in m.finished.payload.columns) for group in made for m in group]
    facts: list[Fact] = [started(config), *(m.dispatched for group in made for m in group)]
    facts += [member.finished for _, member in order(made, max(MEMBERS, members // AT_ONCE))]
    messages = [encode(new_event(fact, "bench"), config.run) for fact in facts]
    bodies = [len(message.body) for message in messages[-members:]]
    del made, facts
    decided, decoded, planned = _run(messages, groups)
    held = _held(messages[:-1])
    say(f"  {held / members:,.0f} bytes a sequence, of {statistics.mean(bodies):,.0f} of its event")
    return [
        figure("core.rate", members / decided, "seq/s", 0, members / decoded, better="higher"),
        figure("core.memory", held / members, "B/seq", STATE, statistics.mean(whole)),
        figure("core.plan", planned, "s", 0, decided),
    ]


class _Alone:
    """The core, whose decisions come back at once, and a grader that keeps all rewards."""

    def __init__(self, run: str) -> None:
        self.core = SamplerCore(run)
        self.decided = self.decoded = 0.0
        """CPU seconds in the core, and for decoding what it is given: neither waits, so they are the same on a busy machine."""
        self.shaped = self.yielded = 0
        self._seq = 0

    def take(self, message: Message) -> None:
        began = time.process_time()
        event = decode(message.subject, message.headers, message.body, self._seq + 1)
        assert isinstance(event, Event), event
        self.decoded += time.process_time() - began
        waiting = deque([event])
        while waiting:
            self._seq += 1
            event = at(waiting.popleft(), self._seq)
            began = time.process_time()
            self.core.fold(event)
            decisions = self.core.decide(event)
            self.decided += time.process_time() - began
            waiting += [new_event(decision.fact, "sampler", event) for decision in decisions]
            match event.fact:
                case SampleCompleted(source=source, sample=sample, rewards=rewards):
                    graded = SampleGraded(source=source, sample=sample, grader="none", rewards=rewards)
                    waiting.append(new_event(graded, "grader", event))
                case SampleShaped():
                    self.shaped += 1
                case BatchYielded():
                    self.yielded += 1
                case _:
                    pass


def _run(messages: Sequence[Message], groups: int) -> tuple[float, float, float]:
    """CPU seconds of deciding and of decoding all but the batch, and of deciding on the last sequence: of the plan."""
    gc.collect()
    alone = _Alone("bench")
    for message in messages[:-1]:
        alone.take(message)
    decided, decoded = alone.decided, alone.decoded
    alone.take(messages[-1])
    assert (alone.shaped, alone.yielded) == (groups, 1), f"{alone.shaped} groups, {alone.yielded} batches"
    return decided, decoded, alone.decided - decided


def _held(messages: Sequence[Message]) -> int:
    """Bytes that the core has allocated after these and still holds."""
    gc.collect()
    tracemalloc.start()
    alone = _Alone("bench")
    for message in messages:
        alone.take(message)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held
