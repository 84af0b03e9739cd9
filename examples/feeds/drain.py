"""Prints what a trainer would be given: one step of a run, by one of the adapters beside this file. Trains nothing.

    python -m examples.feeds.drain .packtrain/runs/RUN/config.toml megatron|fsdp|verl|slime [RANK [STEP]]

Its default is rank 0 and the first step that is not trained. The packers must be up, and the step yielded.
"""

import asyncio
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from examples.feeds.packs import Params, Window
from pipeline.feed.feed import open_feed
from pipeline.log import Log
from schemas.config import RunConfig
from schemas.facts import StepTrained
from services.cli.reach import read_record

ADAPTERS = {"megatron": "get_batch", "fsdp": "forward_inputs", "verl": "fields", "slime": "rollout_data"}


def adapter(name: str, config: RunConfig) -> Callable[[Window], Mapping[str, Any]]:
    made = getattr(importlib.import_module(f"examples.feeds.{name}"), ADAPTERS[name])
    if name == "slime":
        made = partial(made, rollouts=sum(source.groups * source.group_size for source in config.sources))
    return made


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        lengths = (
            f"nested, lengths {[len(part) for part in value.unbind()]}"
            if value.is_nested
            else list(value.shape)
        )
        return f"{value.dtype} {lengths}"
    if isinstance(value, list) and value:
        return f"{len(value)}, the first: {described(value[0])}"
    if isinstance(value, Params):
        return f"cu_seqlens {value.cu_seqlens_q.tolist()}, longest {value.max_seqlen_q}"
    return repr(value)


async def next_step(config: RunConfig) -> int:
    log = await Log.connect(config.broker, config.run, "drain")
    try:
        newest = await log.latest("step.trained")
    finally:
        await log.close()
    return newest.fact.step + 1 if newest is not None and isinstance(newest.fact, StepTrained) else 1


def drain(config: RunConfig, name: str, rank: int, step: int, timeout_s: float | None = None) -> None:
    made = adapter(name, config)
    with open_feed(config, rank, timeout_s=timeout_s) as feed:
        for micro_batch in feed.batch(step):
            print(f"step {step}, micro-batch {micro_batch.index} of {micro_batch.count}")
            if not micro_batch.sequences:
                print("  empty")
                continue
            for key, value in made(micro_batch.torch()).items():
                print(f"  {key}: {described(value)}", flush=True)


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 5 or sys.argv[2] not in ADAPTERS:
        sys.exit(__doc__)
    run = read_record(Path(sys.argv[1]))
    ask = [int(each) for each in sys.argv[3:]]
    drain(run, sys.argv[2], ask[0] if ask else 0, ask[1] if len(ask) > 1 else asyncio.run(next_step(run)))
