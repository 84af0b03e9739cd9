"""The proof's model whole, on one process, context by context from the raw batch: neither plan nor window nor packing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.engines.tiny.model import Llama, LlamaConfig, rotary
from services.trainer.extras import Encoder, Replayed
from services.trainer.loss import Clip, policy_loss
from services.trainer.ranks import Mesh
from services.trainer.sharding import divided_model, shard
from tests.proof_batch import (
    CHANGED,
    EXPERTS,
    LAYERS,
    PLACEHOLDER,
    SCALED,
    SKIPPED,
    VISION,
    VOCABULARY,
    Batch_,
    changed_span,
    places,
    weight,
)

HIDDEN, INNER = 32, 16
CLIP = Clip(0.2, 0.28, positive_low=0.05, negative_high=4.0)
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


class Model(nn.Module):
    """A Llama, experts beside each layer, and a vision encoder."""

    def __init__(self, llama: Llama, inner: int) -> None:
        super().__init__()
        self.llama = llama
        self.experts = nn.ModuleList(Replayed(HIDDEN, inner, EXPERTS) for _ in range(LAYERS))
        self.encoder = Encoder(HIDDEN, VISION.patch, VISION.merge)


def whole_model(dtype: torch.dtype) -> Model:
    torch.manual_seed(3)
    return Model(Llama(CONFIG), INNER).to(dtype)


def divided(model: Model, mesh: Mesh) -> Model:
    """The rank's part of the whole model."""
    part = Model(divided_model(model.llama, mesh), INNER // mesh.sizes.tp)
    part = part.to(model.llama.model.norm.weight.dtype)
    part.load_state_dict(shard(model.state_dict(), mesh))
    return part


def expected(batch: Batch_, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the batch, each context by itself, as a plain causal sequence."""
    model = whole_model(dtype)
    total = torch.zeros((), dtype=dtype)
    for s, c in places(batch):
        context, skip = batch.sequences[s].contexts[c], SKIPPED.get((s, c), 0)
        ids = torch.from_numpy(context.tokens).long()
        x = model.llama.model.embed_tokens(ids)
        for image, at in context.images:
            rows = model.encoder([torch.from_numpy(batch.pictures[image])])
            x = torch.cat([x[:at], rows, x[at + len(rows) :]])
            assert (ids[at : at + len(rows)] == PLACEHOLDER).all()
        x = x[skip:]
        cos, sin = rotary(torch.arange(len(x))[None], CONFIG.head_dim, CONFIG.rope_theta)
        for number, layer in enumerate(model.llama.model.layers):
            x = layer(x[None], cos, sin, None, None)[0]
            chosen = torch.from_numpy(context.routed[skip:, number]).long()
            x = x + model.experts[number](x, chosen, None)
        logits = model.llama.model.norm(x) @ model.llama.model.embed_tokens.weight.T
        loss_at = context.mask.nonzero()[0].tolist()
        sets = dict(zip(loss_at, context.candidates, strict=True))
        advantage, kept = _advantages(batch, s, c, loss_at)
        # The first kept token of a cut context is predicted by nothing that is kept.
        at = [t for t in loss_at if kept[t] and t > skip]
        logprobs = torch.stack([_logprob(logits[t - skip - 1], int(ids[t]), sets[t]) for t in at])

        def column(values: list[float], like: Tensor = logprobs) -> Tensor:
            # What rides in a window is float32, whatever the model's precision.
            return torch.tensor(values, dtype=torch.float32).to(like.dtype)

        total = (
            total
            + policy_loss(
                logprobs,
                column([float(context.logprobs[t]) for t in at]),
                column([advantage[t] for t in at]),
                column([weight(batch, s)] * len(at)),
                CLIP,
            ).loss
        )
    total.backward()
    return float(total.detach()), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def _logprob(logits: Tensor, label: int, candidates: list[int]) -> Tensor:
    if not candidates:
        return logits.log_softmax(0)[label]
    return logits[candidates].log_softmax(0)[candidates.index(label)]


def _advantages(
    batch: Batch_, s: int, c: int, loss_at: list[int]
) -> tuple[dict[int, float], dict[int, bool]]:
    """Of every loss token of a context, by the rules of the plan, from the raw batch."""
    sequence = batch.sequences[s]
    before = sum(int(context.mask.sum()) for context in sequence.contexts[:c])
    found, kept = dict[int, float](), dict[int, bool]()
    for i, t in enumerate(loss_at):
        plain = sequence.advantage if sequence.sidecar is None else float(sequence.sidecar[before + i])
        found[t], kept[t] = plain * SCALED.get(s, 1.0), True
        if (s, c) in CHANGED:
            first, end = changed_span(batch, (s, c))
            multiply, add, keep = CHANGED[s, c]
            if first <= t < end:
                found[t], kept[t] = multiply * plain + add, keep
    return found, kept
