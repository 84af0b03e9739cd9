"""Parts for tests of dialects over real sockets: a policy that thinks, sees and calls tools, behind the capture server."""

from __future__ import annotations

import re
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.capture.renderers.chatml import IM_END, IM_START, MARKS, ChatMLRenderer
from pipeline.capture.server import Capture, Limits
from pipeline.capture.session import Session
from pipeline.capture.tokenizer import PolicyTokenizer
from tests.capture_http_parts import KEY, PacedEngine, Proxy
from tests.capture_parts import Script, served


@cache
def seeing_renderer() -> ChatMLRenderer:
    """A byte-level vocabulary with marks for calls, reasoning and images."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|pad|>", IM_START, IM_END, *MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user\nassistant\nsystem\ntool\n"], trainer)
    return ChatMLRenderer(PolicyTokenizer(backend))


class ThinkingEngine(PacedEngine):
    """Samples what its script says, in which marks are tokens."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.renderer = seeing_renderer()

    def turn(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text):
            mark = self.renderer.tokenizer.special(part) if part in MARKS else None
            ids += self.renderer.tokenizer.encode(part) if mark is None else [mark]
        return [*ids, self.renderer.stop_token_ids[0]]


def called(name: str, arguments: str) -> str:
    """A call, as the policy writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


@asynccontextmanager
async def thinking(
    script: Script = lambda _: "hello", limits: Limits | None = None, max_context: int = 10_000
) -> AsyncIterator[Proxy]:
    """A proxy over such a policy."""
    engine = ThinkingEngine(script)
    capture = Capture(KEY, engine.renderer, engine, max_context, limits or Limits())
    async with served(capture) as base_url:
        yield Proxy(capture, engine, base_url)


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Told by the garbage collector, whenever it finds what an earlier test left: nobody knows whose they are.
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def assert_captured_once(session: Session, proxy: Proxy, contexts: int = 1) -> None:
    """Every sampled token stands once in the exported contexts, as it was sampled, and nothing else is trained."""
    exported = session.export()
    assert len(exported.contexts) == contexts
    trained = exported.columns["tokens"][exported.columns["loss_mask"] == 1]
    sampled = [token for made in proxy.engine.generations for token in made.token_ids]
    assert trained.tolist() == sampled
    logprobs = exported.columns["logprobs"][exported.columns["loss_mask"] == 1]
    returned = [logprob for made in proxy.engine.generations for logprob in made.logprobs]
    np.testing.assert_array_equal(logprobs, np.array(returned, np.float32))


def assert_append_only(proxy: Proxy) -> None:
    """Every prompt begins with the one before and what was sampled on it."""
    pairs = zip(proxy.engine.prompts, proxy.engine.generations, proxy.engine.prompts[1:], strict=False)
    for prompt, made, after in pairs:
        known = [*prompt, *made.token_ids]
        assert after[: len(known)] == known
