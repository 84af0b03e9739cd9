"""Throughput of the tiny engine through its HTTP server and client, by concurrency.

    python bench/engine.py [--policy DIR] [--tokens 64] [--threads 1]

Client and server share the process, so the figures include both sides of the wire.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import torch

from pipeline.capture.messages import Message
from pipeline.capture.renderers.chatml import ChatMLRenderer
from pipeline.capture.tokenizer import PolicyTokenizer
from pipeline.engines.client import EngineClient
from pipeline.engines.policies import TINY, policy_dir
from pipeline.engines.tiny.engine import TinyEngine
from pipeline.engines.tiny.server import create_app, serve
from pipeline.engines.wire import SamplingParams


async def measure(policy: Path, tokens: int) -> None:
    renderer = ChatMLRenderer(PolicyTokenizer.load(policy))
    prompt = renderer.render(
        Message("user", "State the final answer to the following arithmetic problem: 23 - 60 =")
    )
    prompt += renderer.generation_prompt()
    engine = TinyEngine(policy)
    runner, port = await serve(create_app(engine), "127.0.0.1", 0, None)
    async with EngineClient(f"http://127.0.0.1:{port}") as client:
        print(f"{'streams':>8} {'sampled':>8} {'tok/s':>8} {'steps':>7} {'ms/step':>8}")
        for streams in (1, 8, 32, 64):
            before, began = engine.counters.steps, time.perf_counter()
            # Nearly uniform sampling, so that few streams meet the end token before their limit.
            asked = [
                client.generate(
                    prompt, SamplingParams(max_tokens=tokens, temperature=20.0, seed=i), str(i), "bench"
                )
                for i in range(streams)
            ]
            sampled = sum(len(g.token_ids) for g in await asyncio.gather(*asked))
            seconds, steps = time.perf_counter() - began, engine.counters.steps - before
            print(
                f"{streams:>8} {sampled:>8} {sampled / seconds:>8.0f} {steps:>7} {1000 * seconds / steps:>8.2f}"
            )
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of the tiny engine.")
    parser.add_argument("--policy", type=Path, default=policy_dir(TINY))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asyncio.run(measure(arguments.policy, arguments.tokens))


if __name__ == "__main__":
    main()
