"""Model, cache and sampling: cached decoding is the full forward pass, whoever else is in the batch."""

from __future__ import annotations

import json
import math

import pytest
import torch

from pipeline.engines.tiny.model import (
    Llama,
    LlamaConfig,
    load_model,
    load_policy,
    save_policy,
    weights_from_bytes,
    weights_to_bytes,
)
from pipeline.engines.tiny.runner import ModelRunner, WeightsRefused
from pipeline.engines.tiny.sampling import draw, processed_logprobs
from pipeline.engines.tiny.scheduler import Scheduler, Sequence
from pipeline.engines.wire import SamplingParams

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)


def random_state(seed: int, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Weights big enough that the distributions are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: p.detach().clone() if p.ndim == 1 else torch.randn(p.shape, generator=generator) * scale
        for name, p in Llama(CONFIG).named_parameters()
    }


def model_of(state: dict[str, torch.Tensor]) -> Llama:
    model = Llama(CONFIG)
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def generate(state, prompts, params, max_running=8, limit=12) -> list[Sequence]:
    """Drive scheduler and runner as the engine does, without the event loop."""
    scheduler = Scheduler(max_running, 200, 4, 64)
    runner = ModelRunner(CONFIG, state, 200, 4)
    sequences = [Sequence(tuple(p), s, limit, frozenset()) for p, s in zip(prompts, params, strict=True)]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.waiting or scheduler.running:
        batch = scheduler.admit() or list(scheduler.running)
        version, sampled = runner.step(batch)
        for sequence, one in zip(batch, sampled, strict=True):
            scheduler.record(sequence, one, version)
        scheduler.reap()
    return sequences


PROMPTS = [
    [5],
    [1, 2, 3],
    list(range(20)),
    [7] * 33,
    [60, 0, 59, 1, 30, 12, 9],
    [3, 1],
    [44] * 16,
    [2, 4, 8, 16, 32],
]


def rescored(model: Llama, sequence: Sequence) -> torch.Tensor:
    """Processed log-probabilities [output, vocab] of a sequence by one full forward pass."""
    whole = torch.tensor([[*sequence.prompt, *sequence.output]])
    logits = model(whole)[0, len(sequence.prompt) - 1 : -1]
    return processed_logprobs(logits, [sequence.params] * len(sequence.output))


@pytest.mark.parametrize("max_running", [1, 3, 8])
def test_returned_logprobs_are_those_of_a_full_forward_pass(max_running: int):
    state = random_state(1)
    params = [
        SamplingParams(seed=i, temperature=0.5 + 0.2 * i, top_k=(0, 5)[i % 2], top_p=(1.0, 0.8)[i // 4])
        for i in range(8)
    ]
    for sequence in generate(state, PROMPTS, params, max_running):
        scored = rescored(model_of(state), sequence)
        for i, token in enumerate(sequence.output):
            assert scored[i, token].item() == pytest.approx(sequence.logprobs[i], abs=1e-4)


def test_cached_logits_equal_the_full_forward_pass():
    state = random_state(2)
    runner, model = ModelRunner(CONFIG, state, 100, 4), model_of(state)
    whole = list(range(3, 40))
    sequence = Sequence(tuple(whole[:10]), SamplingParams(), 30, frozenset(), blocks=list(range(9, 19)))
    neighbour = Sequence(tuple(range(25)), SamplingParams(), 30, frozenset(), blocks=list(range(30, 45)))
    full = model(torch.tensor([whole]))[0]
    got = runner._forward([neighbour, sequence], [0, 0], [neighbour.prompt, sequence.prompt])[1]
    torch.testing.assert_close(got, full[9], atol=1e-5, rtol=1e-4)
    for i in range(10, 37):
        got = runner._forward([sequence], [i], [(whole[i],)])[0]
        torch.testing.assert_close(got, full[i], atol=1e-5, rtol=1e-4)


def test_neighbours_change_neither_greedy_output_nor_seeded_samples():
    state = random_state(3)
    for params in ([SamplingParams(temperature=0)] * 8, [SamplingParams(seed=i) for i in range(8)]):
        together = generate(state, PROMPTS, params, max_running=8)
        few = generate(state, PROMPTS, params, max_running=3)
        alone = [generate(state, [p], [s])[0] for p, s in zip(PROMPTS, params, strict=True)]
        assert [s.output for s in together] == [s.output for s in few] == [s.output for s in alone]


def test_packed_rows_with_their_own_mask_score_as_rows_alone():
    model = model_of(random_state(4))
    first, second = [4, 8, 15, 16], [23, 42, 1]
    mask = torch.block_diag(torch.ones(4, 4).tril(), torch.ones(3, 3).tril()).bool()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    packed = model(torch.tensor([first + second]), positions, mask)[0]
    alone = torch.cat([model(torch.tensor([row]))[0] for row in (first, second)])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)


def test_right_padding_does_not_reach_real_rows():
    model = model_of(random_state(5))
    row = [4, 8, 15, 16]
    padded = model(torch.tensor([[*row, 0, 0, 0]]))[0, :4]
    torch.testing.assert_close(padded, model(torch.tensor([row]))[0], atol=1e-6, rtol=1e-5)


def test_greedy_takes_the_likeliest_and_reports_temperature_one():
    state = random_state(6)
    sequence = generate(state, [[1, 2, 3]], [SamplingParams(temperature=0)])[0]
    scored = rescored(model_of(state), sequence)
    assert scored.argmax(-1).tolist() == sequence.output
    assert scored.exp().sum(-1).tolist() == pytest.approx([1.0] * 12, abs=1e-5)


def test_top_k_and_top_p_keep_the_smallest_sufficient_set_renormalized():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(4, 1)
    params = [
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.01),
        SamplingParams(top_k=2, top_p=0.6),
    ]
    got = processed_logprobs(logits, params).exp()
    expected = torch.tensor([[0.625, 0.375, 0, 0], [10 / 19, 6 / 19, 3 / 19, 0], [1, 0, 0, 0], [1, 0, 0, 0]])
    # Row 4: of the two kept by top-k, the first alone has 0.625 of the mass, which reaches 0.6.
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    uniform = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    tokens = draw(probabilities.log().repeat(10_000, 1), uniform, torch.zeros(10_000, dtype=torch.bool))
    assert torch.bincount(tokens, minlength=4).tolist() == pytest.approx([5000, 0, 3000, 2000], abs=2)


def test_a_draw_at_the_very_top_stays_in_the_candidate_set():
    logprobs = torch.tensor([[0.7, 0.3, 0.0]]).log()
    top = torch.tensor([math.nextafter(1, 0)], dtype=torch.float64)
    assert draw(logprobs, top, torch.tensor([False])).item() in (0, 1)


def test_broken_logits_are_an_error_not_a_token():
    with pytest.raises(FloatingPointError, match="not finite"):
        draw(torch.full((1, 4), torch.nan), torch.tensor([0.5], dtype=torch.float64), torch.tensor([False]))


def test_candidate_sets_are_the_open_ids():
    state = random_state(7)
    params = [SamplingParams(seed=1, top_k=4), SamplingParams(seed=1)]
    narrow, wide = generate(state, [[1, 2], [1, 2]], params)
    scored = rescored(model_of(state), narrow)
    assert [torch.nonzero(torch.isfinite(r))[:, 0].tolist() for r in scored] == narrow.candidates
    assert all(len(ids) == 4 for ids in narrow.candidates)
    assert wide.candidates == [[]] * 12


def test_weights_survive_the_blob_and_the_directory(tmp_path):
    state = random_state(8)
    assert all(torch.equal(t, state[name]) for name, t in weights_from_bytes(weights_to_bytes(state)).items())
    save_policy(tmp_path, CONFIG, state)
    config, loaded = load_policy(tmp_path)
    assert config == CONFIG
    assert loaded.keys() == state.keys()
    tokens = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(load_model(tmp_path)(tokens), model_of(state)(tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.norm.weight"), "missing"),
        (lambda s: s.update({"lm_head.weight": torch.zeros(1)}), "unknown"),
        (lambda s: s.update({"model.norm.weight": torch.zeros(3)}), "shape"),
        (lambda s: s["model.norm.weight"].fill_(torch.nan), "NaN"),
    ],
)
def test_misfit_weights_are_refused_and_change_nothing(change, message):
    runner = ModelRunner(CONFIG, random_state(9), 20, 4)
    before = weights_to_bytes(runner._model.state_dict())
    state = random_state(10)
    change(state)
    with pytest.raises(WeightsRefused, match=message):
        runner.load_bytes(weights_to_bytes(state), 5)
    with pytest.raises(WeightsRefused, match="not safetensors"):
        runner.load_bytes(b"\x00" * 40, 5)
    assert runner.version == 0
    assert weights_to_bytes(runner._model.state_dict()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "qwen3"),
        ({"tie_word_embeddings": False}, "tied"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn"),
        ({"num_attention_heads": 3}, "multiple"),
    ],
)
def test_an_architecture_that_is_not_ours_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_json({**CONFIG.to_json(), **change})


def test_config_json_round_trips():
    assert LlamaConfig.from_json(json.loads(json.dumps(CONFIG.to_json()))) == CONFIG
