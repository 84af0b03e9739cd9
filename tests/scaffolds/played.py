"""A scaffold's run on the stage against capture over the policy double, and what must hold of every such run."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from aiohttp import web

from pipeline.capture.export import Export
from pipeline.capture.rules import Rules
from pipeline.capture.secret import session_url
from pipeline.capture.server import Capture, Limits
from pipeline.capture.session import Session
from schemas.config import Behaviour
from tests.scaffolds import flat
from tests.scaffolds.policy import Emission, Play, Policy
from tests.scaffolds.stage import Ended, Stage, staged
from tests.scaffolds.wire import Answers, Wire

KEY = b"k" * 32


@dataclass(frozen=True, slots=True)
class Client:
    """How a scaffold is started: `command` prepares the stage and gives argv, environment and standard input for a base URL,
    which ends with /v1."""

    name: str
    wire: str
    rules: Rules
    command: Callable[[Stage, str], tuple[Sequence[str], dict[str, str], str]]


@dataclass(slots=True)
class Played:
    """A run that is over."""

    client: Client
    ended: Ended
    wire: Wire
    policy: Policy
    session: Session
    export: Export
    folder: Path
    notes: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def labels(self) -> list[str]:
        """Of the contexts, in order."""
        return [context.label for context in self.export.contexts]

    @property
    def statuses(self) -> list[int]:
        """Of the model calls, in order."""
        return self.wire.statuses

    def context(self, index: int) -> list[int]:
        """A context's tokens."""
        meta = self.export.contexts[index]
        return self.export.columns["tokens"][meta.offset : meta.offset + meta.tokens].tolist()

    def text(self, index: int) -> str:
        return self.policy.renderer.tokenizer.decode(self.context(index), keep_special=True)

    def trained(self, index: int) -> list[str]:
        """What the policy said that a context trains, turn by turn."""
        tokens = self.context(index)
        decode = self.policy.renderer.tokenizer.decode
        spans = self.export.contexts[index].loss_spans
        said = [decode(tokens[span.start : span.end], keep_special=True) for span in spans]
        return [text.removesuffix("<|im_end|>") for text in said]


@asynccontextmanager
async def playing(
    client: Client,
    play: Play,
    folder: Path,
    fault: Answers = lambda _: None,
    max_context: int = 1_000_000,
    **behaviour: Any,
) -> AsyncIterator[tuple[Stage, Wire, Policy, Session]]:
    """The stage with capture on its socket and one session open."""
    policy = Policy(play)
    wire = Wire(fault)
    policy.on_portion = wire.cut_now
    capture = Capture(KEY, policy.renderer, policy, max_context, Limits(ping_s=0.5))
    session = capture.open(
        "run-1", Behaviour(**{"max_turns": 60, "max_tokens": 4096, **behaviour}), client.rules
    )
    wire.session = session
    runner = capture.runner(1)
    wire.around(runner.app)
    await runner.setup()
    try:
        async with staged(folder) as stage:
            await web.SockSite(runner, stage.listening).start()
            yield stage, wire, policy, session
    finally:
        await runner.cleanup()
        await session.close()


async def played(
    client: Client,
    play: Play,
    folder: Path,
    fault: Answers = lambda _: None,
    within: float = 200,
    prepare: Callable[[Stage, Wire, Policy], None] | None = None,
    status: int | None = 0,
    **given: Any,
) -> Played:
    """Runs the client to its end and checks what holds of every run. `status`: how it must exit; None: either way."""
    async with playing(client, play, folder, fault, **given) as (stage, wire, policy, session):
        if prepare:
            prepare(stage, wire, policy)
        argv, environment, stdin = client.command(stage, session_url(stage.url, KEY, session.id))
        ended = await stage.run(argv, environment, within, stdin)
        done = Played(client, ended, wire, policy, session, session.export(), folder)
        _note(done)
        assert status is None or ended.status == status, f"{ended}\nstatuses {done.statuses}"
        check_tokens(done)
        check_texts(done)
        return done


class Run(Protocol):
    """What is checked of a run."""

    policy: Policy
    export: Export
    notes: dict[str, Any]

    @property
    def labels(self) -> list[str]: ...

    def context(self, index: int) -> list[int]: ...


def check_tokens(run: Run) -> None:
    """Every sampled token has loss once, with its log-probability, in a context that is the very prompt it was sampled
    from; what was left out is what its rules exclude."""
    columns, emissions = run.export.columns, run.policy.emissions
    trained = np.flatnonzero(columns["loss_mask"])
    got = Counter(
        (float(p), int(t))
        for p, t in zip(columns["logprobs"][trained], columns["tokens"][trained], strict=True)
    )
    assert max(got.values(), default=1) == 1, "a sampled token is trained twice"
    given = {_tokens(emission): emission for emission in emissions}
    for one, emission in given.items():
        found = sum(pair in got for pair in one)
        assert found in (0, len(one)), "a turn is trained in part"
        if not found:
            run.notes.setdefault("excluded", []).append(emission)
    assert sum(got.values()) + sum(run.export.excluded.values()) == sum(map(len, given))
    assert sum(map(len, map(_tokens, run.notes.get("excluded", [])))) == sum(run.export.excluded.values())
    whole = {(*emission.prompt, *emission.generation.token_ids): emission for emission in emissions}
    for i in range(len(run.export.contexts)):
        assert tuple(run.context(i)) in whole, f"context {i} ({run.labels[i]}) is no prompt with its answer"
    # Nothing that the policy did not say has a log-probability.
    assert not columns["logprobs"][_unsampled(run)].any()


def check_texts(run: Run) -> None:
    """What each prompt says is what the scaffold sent, turn by turn."""
    for emission in run.policy.emissions:
        sent = _joined(flat.turns(emission.exchange.path, emission.exchange.body))
        names = flat.tool_names(emission.exchange.body)
        given = _joined(run.policy.turns_of(emission.prompt)[:-1])
        if names:
            if sent[0][0] != "system":
                sent.insert(0, ("system", ""))
            role, text = given[0]
            assert role == "system"
            system, _, tools = f"\n{text}".partition("\nTools:\n{")
            shown = [json.loads("{" * (not i) + line)["name"] for i, line in enumerate(tools.split("\n"))]
            assert shown == names
            given[0] = ("system", system[1:])
        roles = [role for role, _ in given]
        assert roles == [role for role, _ in sent], f"call {emission.exchange.number}"
        for (role, text), (_, meant) in zip(given, sent, strict=True):
            if role == "assistant":
                assert meant.strip() in text
            else:
                assert text == meant


def _joined(turns: Sequence[flat.Turn]) -> list[flat.Turn]:
    """With neighbouring turns of the assistant as one: after a cut, Responses has items of two in a row."""
    found: list[flat.Turn] = []
    for role, text in turns:
        if role == "assistant" and found and found[-1][0] == role:
            found[-1] = (role, found[-1][1] + text)
        else:
            found.append((role, text))
    return found


def _tokens(emission: Emission) -> tuple[tuple[float, int], ...]:
    made = emission.generation
    return tuple(zip(map(float, np.asarray(made.logprobs, np.float32)), made.token_ids, strict=True))


def _unsampled(run: Run) -> np.ndarray[Any, Any]:
    mask = np.ones(len(run.export.columns["tokens"]), bool)
    for start, end, _, flags, _ in run.export.columns["segments"]:
        mask[start:end] = not flags & 1
    return mask


def _note(run: Played) -> None:
    """A row for whoever makes the table of `docs/capture.md`."""
    if path := os.environ.get("PACKTRAIN_SCAFFOLD_TABLE"):
        row = {
            "test": os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0],
            "client": run.client.name,
            "wire": run.client.wire,
            "seconds": round(run.ended.seconds, 1),
            "requests": len(run.wire.exchanges),
            "statuses": run.statuses,
            "labels": dict(Counter(run.labels)),
            "excluded": run.export.excluded,
        }
        with Path(path).open("a") as table:
            table.write(json.dumps(row) + "\n")
