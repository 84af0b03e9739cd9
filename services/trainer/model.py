"""The trained model: packed windows in, log-probabilities of the labels out; weights and optimizer to bytes and back.

Promise: what is stored is whole, however many tensor-parallel ranks there are: a run may go on with other sizes.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from safetensors.torch import load as load_blob
from safetensors.torch import save as save_blob
from torch import Tensor

from pipeline.engines.tiny.model import Llama, weights_from_bytes, weights_to_bytes
from services.trainer.ranks import Mesh
from services.trainer.sharding import shard, whole


def label_logprobs(model: Llama, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """log p(labels[t] | the context's tokens up to t), float32 [T], for a pack of B contexts, at temperature 1.

    tokens, labels: int64 [T]; cu_seqlens: int32 [B + 1]. Contexts of about one length, none more than twice as long as
    another, are computed as one right-padded batch: on a CPU a causal kernel without a mask is faster than one dense
    block-diagonal [T, T], and a short context beside a long one would cost what the long one does.
    """
    alike: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(cu_seqlens.tolist()):
        alike.setdefault((end - start).bit_length(), []).append((start, end))
    rows = [torch.cat([torch.arange(*span) for span in spans]) for spans in alike.values()]
    found = [
        _padded(model, tokens[at], labels[at], torch.tensor([end - start for start, end in spans]))
        for at, spans in zip(rows, alike.values(), strict=True)
    ]
    return torch.cat(found)[torch.cat(rows).argsort()]


def _padded(model: Llama, tokens: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    real = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    padded = torch.zeros(real.shape, dtype=torch.int64)
    padded[real] = tokens
    return -F.cross_entropy(model(padded)[real], labels, reduction="none")


def model_to_bytes(model: Llama, mesh: Mesh) -> bytes:
    """The whole weights. A collective of the tensor-parallel ranks."""
    return weights_to_bytes(whole(model.state_dict(), mesh))


def model_from_bytes(model: Llama, blob: bytes, mesh: Mesh) -> None:
    """The rank's part of whole weights."""
    model.load_state_dict(shard(weights_from_bytes(blob), mesh))


def optimizer_to_bytes(optimizer: torch.optim.AdamW, model: Llama, mesh: Mesh) -> bytes:
    """AdamW's moments and step counts, whole, by parameter name. A collective of the tensor-parallel ranks."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}/{name}"] = torch.as_tensor(value).contiguous()
    return save_blob(whole(tensors, mesh))


def optimizer_from_bytes(optimizer: torch.optim.AdamW, model: Llama, blob: bytes, mesh: Mesh) -> None:
    """The rank's part of `optimizer_to_bytes`; raises KeyError that names a parameter which the blob lacks."""
    tensors = shard(load_blob(blob), mesh)
    for name, parameter in model.named_parameters():
        keys = ("step", "exp_avg", "exp_avg_sq")
        missing = [key for key in keys if f"{key}/{name}" not in tensors]
        if missing:
            raise KeyError(f"optimizer state has no {missing[0]} of parameter {name}")
        optimizer.state[parameter] = {key: tensors[f"{key}/{name}"] for key in keys}
