"""A tiny engine in a process of its own: `python -m tests.engine_process POLICY` prints its port and serves."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent


@contextmanager
def engine_processes(policy: Path, count: int) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """So many engines, by URL; what is left of them is killed in the end."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine_process", str(policy)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        ports = []
        for process in processes:
            assert process.stdout is not None
            ports.append(int(process.stdout.readline()))
        yield {f"http://127.0.0.1:{p}": process for p, process in zip(ports, processes, strict=True)}
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


async def main(policy: Path) -> None:
    import torch

    from pipeline.engines.tiny.engine import TinyEngine
    from pipeline.engines.tiny.server import create_app, serve

    torch.set_num_threads(1)
    runner, port = await serve(create_app(TinyEngine(policy)), "127.0.0.1", 0, None)
    print(port, flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
