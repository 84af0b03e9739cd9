"""How far a long command is, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.cli.summary import size

_EVERY_S = 5.0


@contextmanager
def progress(what: str, total: int, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told how many of `total` are done."""
    shown = (lambda count: size(count)) if in_bytes else (lambda count: f"{count:,}")
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[at]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total, at="")
            yield lambda done: bar.update(task, completed=done, at=f"{shown(done)} of {shown(total)}")
        return
    told = time.monotonic()

    def tell(done: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _EVERY_S:
            told = time.monotonic()
            print(f"packtrain: {what}: {shown(done)} of {shown(total)}", file=sys.stderr, flush=True)

    yield tell
