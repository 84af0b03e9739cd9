"""The grader service as a process whose groups come back soon when it is killed: `python -m tests.grader_process CONFIG`."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

from pipeline.config import load
from services.grader import serve
from services.grader.judging import Limits
from services.process import run_service

if __name__ == "__main__":
    limits = Limits(ack_wait_s=0.5, backoff_s=0.01)
    asyncio.run(run_service(partial(serve, limits=limits), load(Path(sys.argv[1])), "grader"))
