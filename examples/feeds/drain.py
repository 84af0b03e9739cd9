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

from examples.feeds.packs import Params
from pipeline.feed.feed import open_feed
from pipeline.log import Log
from schemas.config import RunConfig
from schemas.facts import StepTrained
from services.cli.reach import read_record

ADAPTERS = {"megatron": "get_batch", "fsdp": "forward_inputs", "verl": "fields", "slime": "rollout_data"}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "megatron": ("megatron",),
    "fsdp": ("ulysses", "contiguous"),
    "verl": (),
    "slime": (),
}
"""What each takes where a pack is cut over context-parallel ranks; whole ones come in any layout."""


def adapter(name: str, config: RunConfig) -> Callable[..., Mapping[str, Any]]:
    """Raises SystemExit where the run's windows are not of the adapter's kind."""
    batch = config.batch
    if batch.cp > 1 and batch.layout not in LAYOUTS[name]:
        # A window of another layout would be taken without a word, and its attention computed over other tokens.
        raise SystemExit(
            f"batch.layout is {batch.layout!r} and batch.cp {batch.cp}: the adapter {name} takes "
            f"{' or '.join(LAYOUTS[name]) or 'whole packs alone: set batch.cp to 1'}"
        )
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
    log = await Log.connect(config.broker, config.run, "drain", user="reader")
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
            arguments = (
                {"local_cp_size": micro_batch.meta["cp_size"]}
                if config.batch.adaptive_cp and name == "megatron"
                else {}
            )
            for key, value in made(micro_batch.torch(), **arguments).items():
                print(f"  {key}: {described(value)}", flush=True)


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 5 or sys.argv[2] not in ADAPTERS:
        sys.exit(__doc__)
    run = read_record(Path(sys.argv[1]))
    ask = [int(each) for each in sys.argv[3:]]
    drain(run, sys.argv[2], ask[0] if ask else 0, ask[1] if len(ask) > 1 else asyncio.run(next_step(run)))
