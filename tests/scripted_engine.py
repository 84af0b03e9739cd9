"""A scripted policy behind the engine's wire, for whole runs: their hosts are processes, and ask over HTTP.

It speaks with the tiny policy's tokenizer, so that what it samples can be trained. What it is asked it knows from the
prompt's tokens alone; the session, from the header that engines route by, says which member of a group asks.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.capture.renderers.chatml import ChatMLRenderer
from pipeline.capture.renderers.choose import load_renderer
from pipeline.engines.base import Generation
from pipeline.engines.policies import TINY, policy_dir
from pipeline.store import ObjectStore
from pipeline.store.payload import read_columns
from schemas.plan import Plan
from tests.scaffolds.policy import ASKED, Emission, Play, Policy, Scene

_SESSION = re.compile(r"(.+)-\d{6}-(\d+)-a(\d+)")


@dataclass(frozen=True, slots=True)
class Asked:
    """Which session a generation is for."""

    session: str

    @property
    def headers(self) -> dict[str, str]:
        return {"x-session-id": self.session}


@dataclass(frozen=True, slots=True)
class Attempt:
    source: str
    member: int
    number: int


def attempt(scene: Scene) -> Attempt:
    """Whose turn it is."""
    found = _SESSION.fullmatch(scene.headers["x-session-id"])
    assert found is not None, scene.headers
    return Attempt(found[1], int(found[2]), int(found[3]))


def small_policy(folder: Path) -> Path:
    """A policy directory whose model trains in no time: one thin layer under the tiny policy's tokenizer."""
    # Late: torch takes seconds, and only runs that train need it.
    from pipeline.engines.tiny.model import Llama, LlamaConfig, load_policy, save_policy

    given, _ = load_policy(policy_dir(TINY))
    config = LlamaConfig(
        vocab_size=given.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        eos_token_id=given.eos_token_id,
    )
    save_policy(folder, config, Llama(config).state_dict())
    shutil.copy(policy_dir(TINY) / "tokenizer.json", folder)
    return folder


class ServedPolicy(Policy):
    """`application()` serves it."""

    def __init__(self, play: Play) -> None:
        super().__init__(play)
        renderer = load_renderer(policy_dir(TINY))
        assert isinstance(renderer, ChatMLRenderer)
        self.renderer = renderer

    async def generate(
        self, token_ids: Sequence[int], params: Any, request_id: str, session_id: str, **given: Any
    ) -> Generation:
        ASKED.set(Asked(session_id))
        return await super().generate(token_ids, params, request_id, session_id, **given)


async def check_trained(plan: Plan, store: ObjectStore, policy: Policy) -> None:
    """Every token that the plan trains was sampled by the policy, in that session, after the very tokens that stand before
    it, with that log-probability; each once."""
    sampled: dict[tuple[str, float], Emission] = {
        (emission.exchange.session, emission.generation.logprobs[0]): emission
        for emission in policy.emissions
    }
    trained: list[tuple[str, float]] = []
    for row, context in zip(plan.rows.sequence, plan.rows.context, strict=True):
        sequence = plan.sequences[row]
        meta = sequence.contexts[context]
        columns = await read_columns(store, sequence.payload, ["tokens", "loss_mask", "logprobs"])
        rows = slice(meta.offset, meta.offset + meta.tokens)
        tokens, mask, logprobs = (
            columns[name][rows].tolist() for name in ("tokens", "loss_mask", "logprobs")
        )
        assert sum(mask) == meta.loss_tokens()
        assert meta.loss_spans, "a row without loss is planned"
        session = sequence.payload.key.rpartition("/")[2].partition(".")[0]
        for span in meta.loss_spans:
            assert all(mask[span.start : span.end])
            emission = sampled[session, logprobs[span.start]]
            trained.append((session, logprobs[span.start]))
            assert tokens[: span.start] == list(emission.prompt), f"{session} was sampled after other tokens"
            assert tokens[span.start : span.end] == list(emission.generation.token_ids)
            assert logprobs[span.start : span.end] == list(emission.generation.logprobs)
    assert len(set(trained)) == len(trained), "a turn is trained twice"
