"""verl's and TRL's own formulas, and how verl pads and cuts packs, to compare ours with.

Their packages do not import beside ours: both need transformers (107 MB, with an older tokenizers than is pinned here). The
functions themselves need torch alone, so they are taken out of the wheels (2.6 MB) and run as they stand there; TRL's advantage is a
statement in its trainer, and verl's overlong penalty one in its reward manager. The wheels lie in `<venv>/peers`, where `make`
puts them:

    python -m pip download --no-deps --dest .venv/peers verl==0.9.1 trl==1.16.0

`python -m tests.peers > tests/fixtures/peers.json` writes what they give for `groups()` and `packs()`; without the wheels, that is what ours is compared
with.
"""

from __future__ import annotations

import ast
import json
import math
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

VERL, TRL = "verl-0.9.1", "trl-1.16.0"
AT = Path(sys.prefix) / "peers"
GOLDEN = Path(__file__).parent / "fixtures" / "peers.json"
MAX_LENGTH, BUFFER, FACTOR = 200, 50, 0.5
"""Of the overlong penalty."""

Groups = list[list[float]]
Pack = tuple[str, list[int], int, int, bool]
"""How it is cut, real lengths, cp, tp, FP8."""
Cut = dict[str, list[int]]
"""Of one rank: its `ids` (`pack_ids`; 0 for padding), and of the pack `cu`: cumulative padded lengths, where verl says them."""
CUTS = ("packed_seqs", "thd_zigzag", "thd_contiguous", "ulysses")


def missing() -> str:
    """Why the wheels cannot be used; empty if they can."""
    lacking = [name for name in (VERL, TRL) if not (AT / f"{name}-py3-none-any.whl").is_file()]
    return f"no wheel of {' and '.join(lacking)} in {AT}; `make` fetches them" if lacking else ""


def groups(seed: int = 6, count: int = 12) -> Groups:
    """Rewards of groups of 1 to 16: in turn of 0 and 1, of any number, and all equal."""
    rng = np.random.default_rng(seed)
    made: Groups = [[0.7]]
    for i in range(count):
        n = int(rng.integers(2, 17))
        values = (rng.integers(0, 2, n), rng.normal(0, 2, n).round(3), np.full(n, 0.1))[i % 3]
        made.append([float(value) for value in values])
    return made


def lengths(rewards: list[float]) -> list[int]:
    """Of the answers of one group: up to MAX_LENGTH."""
    return [1 + (37 * i + len(rewards) * 11) % MAX_LENGTH for i in range(len(rewards))]


def results(given: Groups) -> dict[str, Groups]:
    """What the peers give for the groups, taken as one batch: a number for each reward, by formula."""
    import torch

    verl = _verl()
    flat = [reward for rewards in given for reward in rewards]
    ends = [length for rewards in given for length in lengths(rewards)]
    index = np.repeat(np.arange(len(given)), [len(rewards) for rewards in given])
    mask = (torch.arange(MAX_LENGTH) < torch.tensor(ends)[:, None]).double()

    def call(name: str, **options: Any) -> list[float]:
        scores = torch.zeros(len(flat), MAX_LENGTH, dtype=torch.float64)
        scores[torch.arange(len(flat)), torch.tensor(ends) - 1] = torch.tensor(flat, dtype=torch.float64)
        found, _ = verl[f"compute_{name}_outcome_advantage"](scores, mask, index=index, **options)
        return found[:, 0].tolist()

    rows = {
        "verl_grpo": call("grpo"),
        "verl_dr_grpo": call("grpo", norm_adv_by_std_in_grpo=False),
        "verl_rloo": call("rloo"),
        "verl_rloo_vectorized": call("rloo_vectorized"),
        "verl_reinforce_pp_baseline": call("reinforce_plus_plus_baseline"),
        "verl_overlong": [_overlong(r, end) for r, end in zip(flat, ends, strict=True)],
    }
    cuts = np.cumsum([len(rewards) for rewards in given])[:-1]
    split = {name: [part.tolist() for part in np.split(np.array(row), cuts)] for name, row in rows.items()}
    for scale in ("group", "none"):
        split[f"trl_{scale}"] = [_trl(rewards, scale) for rewards in given]
    return split


def packs(seed: int = 7, count: int = 24) -> list[Pack]:
    rng = np.random.default_rng(seed)
    made: list[Pack] = []
    for i in range(count):
        cut, cp, tp = CUTS[i % len(CUTS)], int(rng.choice([1, 2, 4])), int(rng.choice([1, 2]))
        fp8 = cut in ("packed_seqs", "thd_zigzag") and i % 3 == 0
        lengths = [int(n) for n in rng.integers(1, 40, int(rng.integers(1, 5)))]
        made.append((cut, lengths, cp, tp, fp8))
    return made


def pack_ids(lengths: list[int]) -> list[list[int]]:
    """Token ids by which a row is known: its sequence and position."""
    return [[1000 * (i + 1) + t for t in range(n)] for i, n in enumerate(lengths)]


def cuts(pack: Pack) -> list[Cut]:
    """What each context-parallel rank has of the pack, as verl cuts it."""
    import torch

    cut, lengths, cp, tp, fp8 = pack
    ids = [torch.tensor(each) for each in pack_ids(lengths)]
    found: list[Cut] = []
    for rank in range(cp):
        if cut == "ulysses":
            slice_ = _ulysses(rank, cp)["ulysses_pad_and_slice_inputs"]
            found.append({"ids": slice_(torch.cat(ids)[None], sp_size=cp)[0][0].tolist()})
            continue
        verl = _mcore(rank, cp, tp)
        if cut == "packed_seqs":
            mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            rows, params = verl["preprocess_packed_seqs"](padded, mask, use_fp8_padding=fp8)
        else:
            nested = torch.nested.nested_tensor(ids, layout=torch.jagged)
            options = {"use_fp8_padding": fp8, "cp_layout": cut.removeprefix("thd_")}
            rows, params, _ = verl["preprocess_thd_engine"](nested, **options)
        found.append({"ids": rows[0].tolist(), "cu": params.cu_seqlens_q_padded.tolist()})
    return found


@cache
def _read(wheel: str, path: str) -> ast.Module:
    with zipfile.ZipFile(AT / f"{wheel}-py3-none-any.whl") as archive:
        return ast.parse(archive.read(path))


def _run(nodes: list[Any], names: dict[str, Any], path: str) -> dict[str, Any]:
    # Annotations are not evaluated, as in this module: theirs name types that are not here.
    exec(compile(ast.Module(nodes, type_ignores=[]), path, "exec"), names)
    return names


def _functions(wheel: str, path: str, names: dict[str, Any], wanted: Callable[[str], bool]) -> dict[str, Any]:
    found = [n for n in _read(wheel, path).body if isinstance(n, ast.FunctionDef) and wanted(n.name)]
    for node in found:
        node.decorator_list = []  # registries, and torch.no_grad
    return _run(found, names, path)


@cache
def _statement(wheel: str, path: str, test: str, assigns: str) -> ast.If:
    """The one `if` whose condition starts with `test` and that assigns the name `assigns`."""
    found = [
        node
        for node in ast.walk(_read(wheel, path))
        if isinstance(node, ast.If)
        and ast.unparse(node.test).startswith(test)
        and any(isinstance(n, ast.Name) and n.id == assigns and isinstance(n.ctx, ast.Store) for n in ast.walk(node))
    ]  # fmt: skip
    assert len(found) == 1, f"{path} of {wheel} has {len(found)} statements `if {test}`"
    return found[0]


@cache
def _verl() -> dict[str, Any]:
    import torch

    masked = _functions(
        VERL, "verl/utils/torch_functional.py", {"torch": torch}, lambda name: name.startswith("masked_")
    )
    names = {"torch": torch, "np": np, "defaultdict": defaultdict, "verl_F": SimpleNamespace(**masked)}
    return _functions(
        VERL, "verl/trainer/ppo/core_algos.py", names, lambda name: name.endswith("_outcome_advantage")
    )


@cache
def _mcore(rank: int, cp: int, tp: int) -> dict[str, Any]:
    import torch

    sizes = SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: tp,
        get_context_parallel_world_size=lambda: cp,
        get_context_parallel_rank=lambda: rank,
    )
    names = {
        "torch": torch,
        "math": math,
        "mpu": sizes,
        "PackedSeqParams": SimpleNamespace,
        "_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE": True,
        "is_dataclass": lambda _: False,
        "is_npu_available": False,
        "logger": SimpleNamespace(warning_once=lambda _: None),
    }
    wanted = ("preprocess_packed_seqs", "preprocess_thd_engine", "preprocess_for_mindspeed")
    return _functions(
        VERL, "verl/models/mcore/util.py", names, lambda name: name in wanted or name.startswith("_")
    )


@cache
def _ulysses(rank: int, cp: int) -> dict[str, Any]:
    import torch

    names = {
        "torch": torch,
        "dist": SimpleNamespace(get_world_size=lambda _: cp),
        "get_ulysses_sequence_parallel_group": lambda: None,
        "get_ulysses_sequence_parallel_rank": lambda: rank,
    }
    wanted = ("ulysses_pad", "ulysses_pad_and_slice_inputs", "slice_input_tensor", "_pad_tensor")
    return _functions(VERL, "verl/utils/ulysses.py", names, lambda name: name in wanted)


def _overlong(reward: float, length: int) -> float:
    path = "verl/workers/reward_manager/dapo.py"
    manager = SimpleNamespace(
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=BUFFER, penalty_factor=FACTOR, log=False),
        max_resp_len=MAX_LENGTH,
    )
    node = _statement(VERL, path, "self.overlong_buffer_cfg", "overlong_reward")
    return _run([node], {"self": manager, "reward": reward, "valid_response_length": length}, path)["reward"]


def _trl(rewards: list[float], scale: str) -> list[float]:
    import torch

    path = "trl/trainer/grpo_trainer.py"
    trainer = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards=scale,
        reward_weights=torch.ones(1, dtype=torch.float64),
    )
    names = {
        **_functions(TRL, "trl/trainer/utils.py", {"torch": torch}, lambda name: name == "nanstd"),
        "self": trainer,
        "device": "cpu",
        "num_generations": len(rewards),
        "rewards_per_func": torch.tensor(rewards, dtype=torch.float64)[:, None],
        "unscorable_mask": torch.zeros(len(rewards), dtype=torch.bool),
    }
    node = _statement(TRL, path, "self.multi_objective_aggregation == 'sum_then_normalize'", "advantages")
    return _run([node], names, path)["advantages"].tolist()


if __name__ == "__main__":
    made = {"of": [VERL, TRL], "groups": groups(), "results": results(groups())}
    made |= {"packs": packs(), "cuts": [cuts(pack) for pack in packs()]}
    print(json.dumps(json.loads(json.dumps(made), parse_float=lambda digits: round(float(digits), 12))))
