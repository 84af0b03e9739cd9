"""The adapters of `examples/feeds` on packed windows: forms, dtypes, and who shifts what."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from examples.feeds import drain, fsdp, loop, megatron, slime, verl
from examples.feeds.packs import rows
from pipeline.batch.windows import plan_window
from pipeline.config import load
from schemas.parallel import LayoutName
from schemas.plan import Plan
from tests import peers
from tests.window_parts import Columns, context, key_of, packed, plan_of, sequence

MASKS = ([0, 0, 1, 1, 0, 1], [0] * 3 + [1] * 8, [0, 1, 0, 0], [0] * 5 + [1] * 2)
"""Loss masks of contexts: the first two are of one sequence; the last is blank when its sequence is left out."""
ROLLOUTS = 3


def made() -> tuple[Plan, dict[str, Columns]]:
    """A plan of one full micro-batch, and its payloads. Token ids are unlike."""
    rng = np.random.default_rng(3)
    sequences, objects, first = [], {}, 1
    for name, masks in (("a", MASKS[:2]), ("b", MASKS[2:3]), ("c", MASKS[3:])):
        mask = np.concatenate([np.array(each, np.uint8) for each in masks])
        columns: Columns = {
            "tokens": np.arange(first, first + len(mask), dtype=np.int32),
            "loss_mask": mask,
            "logprobs": (-rng.random(len(mask)) * mask).astype(np.float32),
            "policy_version": mask.astype(np.int32),
            "routed_experts.L0-1": rng.integers(0, 9, (len(mask), 2, 2)).astype(np.uint8),
        }
        offsets = np.cumsum([0, *map(len, masks)]).tolist()
        contexts = [context(at, list(each)) for at, each in zip(offsets, masks, strict=False)]
        sequences.append(sequence(name, contexts, columns=columns))
        objects[key_of(name)] = columns
        first += len(mask)
    places = [(0, 0, 0, 0, 0.5, 1.0), (0, 1, 0, 0, -1.0, 1.0), (1, 0, 0, 0, 2.0, 1.5), (2, 0, 0, 0, 1.0, 1.5)]
    return plan_of(sequences, places), objects


def windows(layout: LayoutName, cp: int = 1, tp: int = 1, **given: Any) -> list[dict[str, torch.Tensor]]:
    """As `MicroBatch.torch()`, of each context-parallel rank."""
    plan, objects = made()
    plan = plan.model_copy(update={"layout": layout, "cp": cp, "tp": tp})
    found = (plan_window(plan, 0, 0, rank, columns=("routed_experts",), **given) for rank in range(cp))
    return [
        {name: torch.from_numpy(array) for name, array in packed(each, objects).items()} for each in found
    ]


def trained() -> dict[int, int]:
    """Of each trained token the one before it."""
    _, objects = made()
    found: dict[int, int] = {}
    for columns in objects.values():
        at = np.flatnonzero(columns["loss_mask"])
        found |= dict(zip(columns["tokens"][at].tolist(), columns["tokens"][at - 1].tolist(), strict=True))
    return found


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 2)])
def test_megatron(cp: int, tp: int) -> None:
    pairs: dict[int, int] = {}
    weights = 0.0
    for window in windows("megatron", cp, tp):
        batch = megatron.get_batch(window)
        assert batch["attention_mask"] is None
        shape, forms = (1, len(window["tokens"])), {"tokens", "labels", "position_ids"}
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and name != "routed_experts":
                dtype = torch.int64 if name in forms else torch.float32
                assert (value.dtype, value.shape) == (dtype, shape), name
        experts = batch["routed_experts"]
        assert experts is not None
        assert (experts.dtype, experts.shape) == (torch.uint8, (*shape, 2, 2))
        params = batch["packed_seq_params"]
        assert params.qkv_format == "thd"
        assert params.cu_seqlens_q.dtype == torch.int32
        assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv_padded.tolist()
        assert int(params.cu_seqlens_q[-1]) == cp * shape[1], "of the whole pack"
        assert (params.max_seqlen_q, type(params.max_seqlen_q)) == (16 if cp == 2 else 11, int)
        assert not (params.cu_seqlens_q % (2 * cp * tp if cp > 1 else tp)).any()
        assert batch["tokens"] is not None
        assert batch["labels"] is not None
        assert batch["loss_mask"] is not None
        assert batch["loss_weights"] is not None
        on = batch["loss_mask"] == 1
        # Shifted: the label of a row is the token after the row's own, on whatever rank that lies.
        pairs |= dict(zip(batch["labels"][on].tolist(), batch["tokens"][on].tolist(), strict=True))
        weights += float(batch["loss_weights"].sum())
    assert pairs == trained()
    assert weights == pytest.approx(1)


def test_megatron_stages_have_what_theirs_need() -> None:
    (first,), (last,) = (windows("megatron", stages=2, pp=pp) for pp in (0, 1))
    batch = megatron.get_batch(first)
    assert (batch["labels"], batch["loss_mask"], batch["advantages"]) == (None, None, None)
    assert batch["tokens"] is not None
    batch = megatron.get_batch(last)
    assert batch["tokens"] is None
    assert batch["labels"] is not None
    assert batch["routed_experts"] is not None
    assert batch["routed_experts"].shape[2] == 1


@pytest.mark.parametrize("layout", ["contiguous", "ulysses"])
def test_fsdp(layout: LayoutName) -> None:
    (window,) = windows(layout)
    inputs = fsdp.forward_inputs(window)
    assert "labels" in inputs
    for value in (inputs["input_ids"], inputs["position_ids"], inputs["shift_labels"], inputs["labels"]):
        assert (value.dtype, value.shape) == (torch.int64, (1, 28))
    assert (inputs["cu_seq_lens_q"].dtype, inputs["cu_seq_lens_k"].tolist()) == (
        torch.int32,
        [0, 6, 17, 21, 28],
    )
    assert (inputs["max_length_q"], type(inputs["max_length_k"])) == (11, int)
    assert int((inputs["shift_labels"] != fsdp.IGNORED).sum()) == int(window["loss_mask"].sum()) == 14
    # What transformers' ForCausalLMLoss makes of labels, across contexts too.
    assert torch.equal(pad(inputs["labels"], (0, 1), value=fsdp.IGNORED)[:, 1:], inputs["shift_labels"])
    on = inputs["labels"] != fsdp.IGNORED
    assert torch.equal(inputs["labels"][on], inputs["input_ids"][on])

    halves = [fsdp.forward_inputs(window) for window in windows(layout, 2)]
    assert all("labels" not in half for half in halves), "the first label of a half is another rank's"
    both = torch.cat([half["shift_labels"] for half in halves], 1)
    assert sorted(both[both != fsdp.IGNORED].tolist()) == sorted(trained())


def logprobs_of(window: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a model would give for the labels, [T]: some ratios beyond the clip, on both sides."""
    noise = torch.from_numpy(np.random.default_rng(5).normal(0, 0.4, len(window["labels"])))
    return window["logprobs"].double() + noise


def expected(window: dict[str, torch.Tensor], clip: float = 0.2) -> float:
    """-sum w min(r A, clip(r) A)."""
    ratio = (logprobs_of(window) - window["logprobs"]).exp()
    advantages = window["advantages"]
    least = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return float(-(window["loss_weights"] * least).sum())


class Data(dict[str, Any]):
    """As much of a TensorDict as verl's loss asks for."""

    def select(self, *names: str) -> Data:
        return Data({name: self[name] for name in names})

    def to_padded_tensor(self) -> Data:
        return Data({name: value.to_padded_tensor(0) for name, value in self.items()})


class Metric(SimpleNamespace):
    @staticmethod
    def from_dict(values: dict[str, Any], aggregation: str) -> dict[str, Any]:
        return values


def verls() -> dict[str, Any]:
    """Functions of its wheel, as they stand there."""
    masked = peers._functions(
        peers.VERL,
        "verl/utils/torch_functional.py",
        {"torch": torch},
        lambda name: name.startswith("masked_"),
    )
    names: dict[str, Any] = {
        "torch": torch,
        "F": torch.nn.functional,
        "verl_F": SimpleNamespace(**masked),
        "tu": SimpleNamespace(get_non_tensor_data=lambda data, key, default: data.get(key, default)),
        "AggregationType": SimpleNamespace(SUM="sum", MEAN="mean"),
        "Metric": Metric,
        "AlgoConfig": int,
    }
    for path, wanted in (
        ("verl/workers/utils/padding.py", {"no_padding_2_padding"}),
        ("verl/trainer/ppo/core_algos.py", {"agg_loss", "compute_policy_loss_vanilla"}),
        ("verl/workers/utils/losses.py", {"ppo_loss"}),
    ):
        peers._functions(peers.VERL, path, names, wanted.__contains__)
    names["get_policy_loss_fn"] = lambda _: names["compute_policy_loss_vanilla"]
    return names


def test_verl_fields() -> None:
    (window,) = windows("verl")
    fields = verl.fields(window)
    assert all(value.is_nested for value in fields.values())  # pyright: ignore[reportAttributeAccessIssue]
    lengths = {name: [len(part) for part in value.unbind()] for name, value in fields.items()}  # pyright: ignore[reportAttributeAccessIssue]
    assert lengths["input_ids"] == lengths["position_ids"] == lengths["loss_mask"] == [6, 11, 4, 7]
    assert lengths["prompts"] == [2, 3, 1, 5]
    for name in ("responses", "response_mask", "old_log_probs", "advantages", "rollout_is_weights"):
        assert lengths[name] == [4, 8, 3, 2], name
    # In token space: a column's entry is of the token that is there.
    ids, mask = fields["input_ids"].values(), fields["loss_mask"].values()
    assert sorted(ids[mask == 1].tolist()) == sorted(trained())
    ids, mask = fields["responses"].values(), fields["response_mask"].values()
    assert sorted(ids[mask == 1].tolist()) == sorted(trained())
    assert float(fields["rollout_is_weights"].values().sum()) == pytest.approx(1)
    with pytest.raises(ValueError, match="context parallelism has cut its contexts"):
        verl.fields(windows("verl", 2)[0])


@pytest.mark.skipif(bool(peers.missing()), reason=peers.missing())
@pytest.mark.parametrize("layout", ["contiguous", "verl", "slime"])
def test_verls_own_loss_of_the_fields_is_the_plans(layout: LayoutName) -> None:
    (window,) = windows(layout, tp=2)
    given = logprobs_of(window)
    # Its engines give log-probabilities of the next token for each token, as a nested tensor.
    nested = torch.nested.as_nested_tensor(
        [given[row.start : row.end] for row in rows(window)], layout=torch.jagged
    )
    data = Data(verl.fields(window), dp_size=1, batch_num_tokens=None, global_batch_size=None)
    config = SimpleNamespace(
        global_batch_info={},
        loss_scale_factor=None,
        loss_agg_mode="token-sum",
        policy_loss={},
        clip_ratio=0.2,
        clip_ratio_low=None,
        clip_ratio_high=None,
        use_kl_loss=False,
        get=lambda name, default: 1e9,
    )
    loss, _ = verls()["ppo_loss"](config, {"log_probs": nested}, data)
    assert float(loss) == pytest.approx(expected(window), rel=1e-6)


@pytest.mark.parametrize("layout", ["contiguous", "slime"])
def test_slimes_loss_of_the_rollout_data_is_the_plans(layout: LayoutName) -> None:
    """Its loss, `sum_of_sample_mean` of `megatron_utils/cp_utils.py` over the step's rollouts, derived anew."""
    (window,) = windows(layout)
    data = slime.rollout_data(window, ROLLOUTS)
    assert data["total_lengths"] == [6, 11, 4, 7]
    assert data["response_lengths"] == [4, 8, 3, 2]
    assert {t.dtype for t in data["tokens"]} == {torch.int64}
    assert {t.dtype for t in data["loss_masks"]} == {torch.int32}
    assert {t.dtype for t in data["rollout_log_probs"] + data["advantages"]} == {torch.float32}
    assert sum(int(t.sum()) for t in data["loss_masks"]) == int(window["loss_mask"].sum())
    given, loss = logprobs_of(window), 0.0
    for i, row in enumerate(rows(window)):
        # The logits of the row before a token are those of the token.
        of_model = given[row.start : row.end][-data["response_lengths"][i] - 1 : -1]
        ratio = (of_model - data["rollout_log_probs"][i]).exp()
        advantages = data["advantages"][i]
        each = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss += float((each * data["loss_masks"][i]).sum() / data["rollout_mask_sums"][i].clamp_min(1))
    assert loss / ROLLOUTS == pytest.approx(expected(window), rel=1e-6)


@pytest.mark.parametrize("layout", ["slime", "slime_allgather"])
def test_slimes_batch_of_a_window(layout: LayoutName) -> None:
    cp, tp = 2, 2
    masks, pairs = 0, dict[int, int]()
    for window in windows(layout, cp, tp):
        batch = slime.get_batch(window)
        tokens, mask = batch["tokens"], batch["full_loss_masks"]
        assert (tokens.dtype, mask.dtype) == (torch.int64, torch.int32)
        assert tokens.shape == mask.shape == (1, tokens.shape[1])
        assert tokens.shape[1] % (128 * tp) == 0
        params = batch["packed_seq_params"]
        assert int(params.cu_seqlens_q[-1]) == cp * tokens.shape[1]
        assert len(params.cu_seqlens_q) == len(MASKS) + 2, "the tail is a sequence of its own"
        masks += int(mask.sum())
        pairs |= dict(zip(batch["labels"][mask == 1].tolist(), tokens[mask == 1].tolist(), strict=True))
    assert masks == 14
    assert pairs == trained()


def test_a_sequence_that_is_left_out_trains_nothing_in_any_form() -> None:
    (window,) = windows("contiguous", without=frozenset(("c",)))
    data = slime.rollout_data(window, ROLLOUTS)
    assert int(data["loss_masks"][3].sum()) == 0
    assert float(data["rollout_mask_sums"][3]) == 1
    assert [len(part) for part in verl.fields(window)["responses"].unbind()] == [4, 8, 3, 1]
    assert int((fsdp.forward_inputs(window)["shift_labels"] != fsdp.IGNORED).sum()) == 12


@pytest.mark.parametrize(
    ("name", "layout", "told"),
    [
        ("megatron", "contiguous", "the adapter megatron takes megatron"),
        ("fsdp", "slime", "ulysses or contiguous"),
        ("verl", "verl", "whole packs alone: set batch.cp to 1"),
    ],
)
def test_windows_of_another_layout_are_refused(name: str, layout: str, told: str) -> None:
    demo = load(Path(__file__).parents[2] / "examples" / "demo.toml")
    cut = demo.model_copy(update={"batch": demo.batch.model_copy(update={"cp": 2, "layout": layout})})
    with pytest.raises(SystemExit, match=told):
        drain.adapter(name, cut)
    assert drain.adapter(name, demo) is not None
    with pytest.raises(SystemExit, match="4 ranks, and this trainer is one"):
        loop.check_alone(cut)
