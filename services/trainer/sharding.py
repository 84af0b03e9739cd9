"""Tensor parallelism of a state: which weights are divided over ranks, cut and put together. Whole states are what is stored.

Promises: `whole(shard(state))` is `state`, bit by bit, on every rank, so that a run may go on with other sizes; heads and the
inner width of an MLP are divided (column, then row, Megatron-LM, arXiv:1909.08053, section 3), all else each rank has whole:
embeddings, which are tied to the head, and norms, routers and the vision encoder of the proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.engines.tiny.model import Llama, LlamaConfig
from services.trainer.collectives import copied, summed
from services.trainer.ranks import Mesh

_DIVIDED: dict[str, int] = {
    "q_proj.weight": 0,
    "k_proj.weight": 0,
    "v_proj.weight": 0,
    "o_proj.weight": 1,
    "gate_proj.weight": 0,
    "up_proj.weight": 0,
    "down_proj.weight": 1,
    "experts_up": 1,
    "experts_down": 2,
}
"""Dimension along which a weight is divided, by the end of its name."""


def divided(name: str) -> int | None:
    """The dimension along which the weight of that name is divided over tensor-parallel ranks; None: each has it whole."""
    return next((dim for end, dim in _DIVIDED.items() if name.endswith(end)), None)


def divided_config(config: LlamaConfig, tp: int) -> LlamaConfig:
    """Of one rank's part. Raises ValueError that names what tp does not divide."""
    parts: dict[str, int] = {}
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        parts[name], rest = divmod(getattr(config, name), tp)
        if rest:
            raise ValueError(
                f"batch.tp {tp} does not divide {name} {getattr(config, name)} of the policy: set tp to a divisor"
            )
    return replace(config, **parts)


def divided_model(model: Llama, mesh: Mesh) -> Llama:
    """The rank's part of a whole model: the same architecture, narrower, whose attention and MLP blocks work with those of the
    other tensor-parallel ranks. The model itself where tp is 1."""
    if (tensor := mesh.tensor) is None:
        return model

    def enter(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return copied(given[0], tensor), *given[1:]

    def leave(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return summed(out, tensor)

    part = Llama(divided_config(model.config, mesh.sizes.tp)).to(model.model.norm.weight.dtype)
    part.load_state_dict(shard(model.state_dict(), mesh))
    for name, block in part.named_modules():
        if name.endswith((".self_attn", ".mlp")):
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(leave)
    return part


def shard(state: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The rank's part of a whole state, by name."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if (dim := _dimension(name, tensor)) is not None:
            tensor = tensor.chunk(mesh.sizes.tp, dim)[mesh.tp_rank].contiguous()
        found[name] = tensor
    return found


def whole(state: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The whole state of the ranks' parts. A collective of the tensor-parallel ranks, which have the same names."""
    if mesh.tensor is None:
        return dict(state)
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if (dim := _dimension(name, tensor)) is not None:
            parts = [torch.empty_like(tensor) for _ in range(mesh.sizes.tp)]
            dist.all_gather(parts, tensor.contiguous(), group=mesh.tensor)
            tensor = torch.cat(parts, dim)
        found[name] = tensor
    return found


def _dimension(name: str, tensor: Tensor) -> int | None:
    # The optimizer counts steps of a divided weight in a scalar.
    return divided(name) if tensor.ndim else None


def clip_gradients(model: nn.Module, mesh: Mesh, most: float) -> float:
    """Scales the gradients to a global norm of at most `most`; returns what it was. Each weight counts once, whole or divided."""
    parts: dict[bool, list[Tensor]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            parts[divided(name) is not None and mesh.tensor is not None].append(parameter.grad)
    norm = nn.utils.get_total_norm(parts[False])
    if mesh.tensor is not None:
        squares = nn.utils.get_total_norm(parts[True]).square()
        dist.all_reduce(squares, group=mesh.tensor)
        norm = (norm.square() + squares).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), most, norm)
    return float(norm)
