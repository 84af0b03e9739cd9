"""A grader of one fact, as a process of its own: `python -m tests.log_worker URL TOKEN_FILE RUN MODE`.

Modes: `good` publishes its result and acknowledges; `block` publishes, and never acknowledges; `die` is killed by its fact.
It prints what it does, one line a step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from pipeline.log import Delivery, Log, serve_work
from schemas.config import Broker
from schemas.facts import SampleCompleted, SampleGraded

MAX_DELIVER = 3
ACK_WAIT_S = 0.5


async def main(url: str, token_file: str, run: str, mode: str) -> None:
    log = await Log.connect(Broker(url=url, token_file=token_file), run, mode)

    async def handle(delivery: Delivery) -> None:
        fact = delivery.event.fact
        assert isinstance(fact, SampleCompleted)
        print("taken", delivery.attempt, flush=True)
        if mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        graded = SampleGraded(source=fact.source, sample=fact.sample, grader=mode, rewards=fact.rewards)
        published = await log.publish(graded, delivery.event)
        print("published", "won" if published.won else "lost", flush=True)
        if mode == "block":
            await asyncio.Event().wait()
        await delivery.ack()
        # The acknowledgement is on its way when the broker has answered what was sent after it.
        await log.head()
        print("acknowledged", flush=True)

    work = await log.work("grader", "sample.completed", ack_wait_s=ACK_WAIT_S, max_deliver=MAX_DELIVER)
    print("ready", flush=True)
    await serve_work(work, 1, handle, asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
