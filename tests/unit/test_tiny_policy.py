"""The shipped policy and the script that made it: prompts as the environments write them, about half of the samples right."""

from __future__ import annotations

import importlib
import random
import shutil
import sys
from pathlib import Path

import pytest
import reasoning_gym
import torch

from pipeline.capture.renderers.chatml import ChatMLRenderer
from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.engines.policies import TINY, policy_dir
from pipeline.engines.tiny.model import load_model, load_policy

SCRIPTS = Path(__file__).parents[2] / "examples" / "tiny_policy"


@pytest.fixture(scope="module")
def scripts():
    """The scripts' directory is first on the path, as where one of them is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield
        for name in ("train", "demonstrations"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def train(scripts: None):
    return importlib.import_module("train")


@pytest.fixture(scope="module")
def shows(scripts: None):
    return importlib.import_module("demonstrations")


@pytest.fixture(scope="module")
def renderer() -> ChatMLRenderer:
    return ChatMLRenderer(PolicyTokenizer.load(policy_dir(TINY)))


def test_the_policy_fits_its_tokenizer_and_its_budget(renderer: ChatMLRenderer):
    config, state = load_policy(policy_dir(TINY))
    assert config.vocab_size == renderer.tokenizer.vocab_size <= 512
    assert config.eos_token_id == renderer.stop_token_ids[0]
    assert all(t.dtype == torch.float32 and torch.isfinite(t).all() for t in state.values())
    assert sum(f.stat().st_size for f in policy_dir(TINY).iterdir()) <= 4_000_000


def test_digits_are_tokens_of_their_own(renderer: ChatMLRenderer):
    ids = renderer.tokenizer.encode("907")
    assert [renderer.tokenizer.decode([i], keep_special=False) for i in ids] == ["9", "0", "7"]


def test_questions_are_reasoning_gyms(shows):
    data = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2, size=50, seed=3
    )
    for entry in data:
        left, operator, right = entry["metadata"]["expression"].split()
        assert shows.arithmetic_question(int(left), operator, int(right)) == entry["question"]
        assert str(shows.apply(int(left), operator, int(right))) == entry["answer"]


def test_held_out_operands_are_in_no_demonstration(shows):
    rng = random.Random(0)
    drawn = [shows.draw_arithmetic(rng, 0.5) for _ in range(2000)] + [
        shows.draw_calculator(rng) for _ in range(2000)
    ]
    assert not any(shows.held_out(a, b) for a, _, b in drawn)
    assert all(
        shows.held_out(a, b) for a, _, b in (shows.draw_arithmetic(rng, 0.5, True) for _ in range(200))
    )


def test_the_demonstrator_errs_as_often_as_it_says(shows, renderer: ChatMLRenderer):
    rng = random.Random(1)
    for scale, expected in ((0.0, 0.0), (1.0, shows.ARITHMETIC_ERROR)):
        demonstrator = shows.Demonstrator(renderer, scale)
        wrong = 0
        for _ in range(2000):
            a, operator, b = shows.draw_arithmetic(rng, 0.5)
            shown = demonstrator.arithmetic(rng, a, operator, b)
            answer = renderer.parse(
                [t for t, trained in zip(shown.tokens, shown.loss, strict=True) if trained]
            )
            wrong += int(answer.content) != shows.apply(a, operator, b)
        assert wrong / 2000 == pytest.approx(expected, abs=0.04)


def test_loss_covers_what_the_policy_samples_and_nothing_else(shows, renderer: ChatMLRenderer):
    shown = shows.Demonstrator(renderer, 0.0).calculator(random.Random(0), 347, "*", 82)
    trained = [t for t, loss in zip(shown.tokens, shown.loss, strict=True) if loss]
    assert renderer.tokenizer.decode(trained, keep_special=True) == (
        '<tool_call>{"name": "calculator", "arguments": {"expression": "347 * 82"}}</tool_call><|im_end|>28454<|im_end|>'
    )


def test_running_the_common_prefix_once_gives_the_same_loss(train, shows, renderer: ChatMLRenderer):
    model = load_model(policy_dir(TINY))
    rng = random.Random(5)
    demonstrator = shows.Demonstrator(renderer, 0.0)
    tokens, mask = train.pad([demonstrator.calculator(rng, *shows.draw_calculator(rng)) for _ in range(8)], 0)
    with torch.inference_mode():
        plain = torch.nn.functional.cross_entropy(
            model(tokens[:, :-1])[mask[:, 1:]], tokens[:, 1:][mask[:, 1:]]
        )
        assert train.loss_of(model, tokens, mask).item() == pytest.approx(plain.item(), rel=0.05)


def test_about_half_of_the_samples_are_right_and_siblings_differ(train, renderer: ChatMLRenderer):
    """What reinforcement learning needs of its first policy, on expressions that no demonstration showed."""
    model = load_model(policy_dir(TINY)).eval()
    found = train.measure(model, renderer, seed=11, prompts=32, group=8)
    for source in ("arithmetic", "calculator"):
        assert 0.3 <= found[source] <= 0.7, found
        assert found[f"{source}_mixed"] >= 0.85, found
    greedy = train.measure(model, renderer, seed=12, prompts=48, group=1, temperature=0.0)
    assert greedy["arithmetic"] >= 0.9, greedy


def test_a_resumed_training_ends_with_the_same_weights(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(train, "CLEAN_STEPS", 1)
    monkeypatch.setattr(train, "ERRING_STEPS", 1)
    monkeypatch.setattr(train, "ARITHMETIC_BATCH", 8)
    monkeypatch.setattr(train, "CALCULATOR_BATCH", 2)
    unbroken, _ = train.run(tmp_path / "unbroken", 3, lambda line: None)
    (tmp_path / "resumed").mkdir()
    shutil.copy(tmp_path / "unbroken" / "tokenizer.json", tmp_path / "resumed")
    shutil.copy(tmp_path / "unbroken" / "clean.pt", tmp_path / "resumed" / "checkpoint.pt")
    lines: list[str] = []
    resumed, _ = train.run(tmp_path / "resumed", 3, lines.append)
    assert "resumed at step 1" in lines
    for name, parameter in unbroken.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name
