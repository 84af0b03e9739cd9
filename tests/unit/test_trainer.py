"""The reference trainer's loss and packing: right values, and nothing trained that carries no loss."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

from pipeline.engines.tiny.model import Llama, LlamaConfig  # noqa: E402  # after importorskip
from schemas.config import RunConfig  # noqa: E402
from schemas.parallel import Sizes  # noqa: E402
from services.trainer.loss import Clip, policy_loss  # noqa: E402
from services.trainer.model import label_logprobs, optimizer_from_bytes, optimizer_to_bytes  # noqa: E402
from services.trainer.ranks import Mesh  # noqa: E402
from services.trainer.sharding import divided, divided_config, shard  # noqa: E402
from services.trainer.windows import candidate_mask  # noqa: E402


def small() -> Llama:
    torch.manual_seed(0)
    return Llama(
        LlamaConfig(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    )


def test_loss_by_hand() -> None:
    old = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5, 0.25]))
    new = torch.log(torch.tensor([0.5, 0.9, 0.1, 0.9, 0.5])).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0])
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0])
    terms = policy_loss(new, old, advantages, weights, Clip(0.2, 0.28))
    # min(r A, clip(r) A): 1.0; clipped up at 1.28; clipped down at 0.8; unclipped 1.8 (a pessimistic bound).
    assert terms.loss.item() == pytest.approx(-(0.1 * 1.0 + 0.2 * 1.28 + 0.3 * -0.8 + 0.4 * -1.8), abs=1e-6)
    assert terms.tokens.item() == 4
    assert terms.clipped.item() == 3
    assert terms.kl.item() == pytest.approx(-(math.log(1.8) + math.log(0.2) + math.log(1.8)), abs=1e-5)
    terms.loss.backward()
    assert new.grad is not None
    # d/dlogp of w r A where unclipped, 0 where the bound holds or no loss is carried.
    assert new.grad.tolist() == pytest.approx([-0.1, 0.0, 0.0, 0.4 * 1.8, 0.0], abs=1e-6)


def test_the_other_two_bounds_by_hand() -> None:
    """Each stops what the first two let through: a ratio that is far off in the direction that the advantage is against."""
    ratios = torch.tensor([0.04, 0.06, 4.1, 3.9, 4.1, 0.04])
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0, -2.0])
    new = ratios.log().requires_grad_()
    weights = torch.full((6,), 0.5)
    terms = policy_loss(new, torch.zeros(6), advantages, weights, Clip(0.2, 0.28, 0.05, 4.0))
    # Stopped below; free; stopped above; free; PPO's own bounds.
    each = [2 * 0.05, 2 * 0.06, -2 * 4.0, -2 * 3.9, 2 * 1.28, -2 * 0.8]
    assert terms.loss.item() == pytest.approx(-0.5 * sum(each), rel=1e-6)
    terms.loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0, -0.06, 0, 3.9, 0, 0], rel=1e-5)


def test_candidates_are_of_their_own_rows_and_none_is_the_whole_vocabulary() -> None:
    mask = candidate_mask(torch.tensor([0, 2, 2, 3]), torch.tensor([4, 1, 0], dtype=torch.int32), 5)
    assert [row.nonzero().flatten().tolist() for row in mask] == [[1, 4], [0, 1, 2, 3, 4], [0]]


def test_parts_of_a_state_make_it_up_and_are_a_narrower_model() -> None:
    model = small()
    sizes = Sizes(dp=1, cp=1, tp=2)
    parts = [shard(model.state_dict(), Mesh(sizes, rank)) for rank in range(2)]
    for name, tensor in model.state_dict().items():
        dim = divided(name)
        pieces = [part[name] for part in parts]
        if dim is None:
            assert all(torch.equal(piece, tensor) for piece in pieces)
        else:
            assert torch.equal(torch.cat(pieces, dim), tensor)
    assert {name for name in parts[0] if divided(name) is None} == {
        name for name in parts[0] if "norm" in name or "embed" in name
    }
    with pytest.raises(ValueError, match=r"batch.tp 2 does not divide num_key_value_heads 1 of the policy"):
        divided_config(model.config, 2)


def test_garbage_where_no_loss_is_carried_changes_nothing() -> None:
    new = torch.tensor([-1.0, -500.0], requires_grad=True)
    terms = policy_loss(
        new, torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 9.0]), torch.tensor([1.0, 0.0]), Clip(0.2, 0.28)
    )
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(-2.0)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-2.0, 0.0])


def test_a_pack_gives_each_context_what_it_has_alone() -> None:
    model = small()
    contexts = [torch.randint(0, 31, (n,)) for n in (5, 2, 400, 9, 300, 1, 4)]
    tokens = torch.cat(contexts)
    labels = torch.cat([torch.cat([c[1:], torch.zeros(1, dtype=torch.int64)]) for c in contexts])
    cu = torch.tensor([0, *map(len, contexts)], dtype=torch.int32).cumsum(0)
    computed: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, given: computed.append(given[0].numel()))
    packed = label_logprobs(model, tokens, labels, cu)
    hook.remove()
    assert sum(computed) < 2 * len(tokens), "a short context costs what a long one beside it does"
    for a, b, context in zip(cu.tolist(), cu.tolist()[1:], contexts, strict=False):
        alone = torch.log_softmax(model(context[None])[0], -1)
        expected = alone[:-1].gather(1, context[1:, None])[:, 0]
        assert torch.allclose(packed[a : b - 1], expected, atol=1e-5)


def test_optimizer_state_survives_bytes() -> None:
    def step(model: Llama, optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(6)[None]).square().mean().backward()
        optimizer.step()

    first, second = small(), small()
    a = torch.optim.AdamW(first.parameters(), lr=1e-2)
    step(first, a)
    b = torch.optim.AdamW(second.parameters(), lr=1e-2)
    second.load_state_dict(first.state_dict())
    optimizer_from_bytes(b, second, optimizer_to_bytes(a, first, Mesh()), Mesh())
    step(first, a)
    step(second, b)
    for x, y in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(x, y)
    with pytest.raises(KeyError, match="no step of parameter"):
        optimizer_from_bytes(
            b,
            Llama(first.config.__class__.from_json(first.config.to_json() | {"num_hidden_layers": 3})),
            optimizer_to_bytes(a, first, Mesh()),
            Mesh(),
        )


def test_what_the_reference_trainer_cannot_do_is_refused_at_the_door() -> None:
    config = {
        "batch": {"pp": 2},
        "pools": [{"name": "p", "harness": "chat"}],
        "sources": [{"name": "s", "pool": "p", "groups": 1, "environment": {"kind": "arithmetic"}}],
    }
    with pytest.raises(ValueError, match=r"batch.pp is 2, and the reference trainer has no pipeline stages"):
        RunConfig.model_validate(config)
    routed = {"packer": {"columns": ["candidates", "routed_experts"]}}
    with pytest.raises(ValueError, match=r"packer.columns has routed_experts, which the reference trainer"):
        RunConfig.model_validate({**config, **routed, "batch": {}})
    RunConfig.model_validate({**config, **routed, "trainer": {"kind": "external"}})
    with pytest.raises(ValueError, match=r"a bound of 0.9 would stop"):
        RunConfig.model_validate({**config, "trainer": {"kind": "external", "clip_negative_high": 0.9}})
