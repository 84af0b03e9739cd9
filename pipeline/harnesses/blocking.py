"""Where an environment blocks: on a thread of its own, which nobody has to wait for.

Promise: a call that never returns costs its own trial. It takes no other trial's thread, and the process ends under it:
a pool's threads are joined at the end, a daemon is not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def on_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`; adapters of harnesses use it for whatever may block."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call(*args, **kwargs))
        except StopIteration as error:
            # An asyncio future cannot hold it: whoever waits would wait for ever.
            result.set_exception(RuntimeError(f"the call raised {error!r}"))
        except BaseException as error:
            result.set_exception(error)

    # Running, as a pool would mark it: a caller that is cancelled does not take the result's place away.
    result.set_running_or_notify_cancel()
    threading.Thread(target=run, name="environment", daemon=True).start()
    return await asyncio.wrap_future(result)
