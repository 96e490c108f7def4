"""How a worker process ends: it is told to stop, finishes what it has, and goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from twinpool.errors import Internal

SETTLE_S = 0.5  # a router may have sent a request just before it heard that this worker drains
POLL_S = 0.02


async def until_stopped(stop: asyncio.Event, alive: Callable[[], bool]) -> None:
    """Returns when `stop` is set. Raises Internal when the device thread is no longer alive."""
    while alive():
        try:
            await asyncio.wait_for(stop.wait(), 1)
        except TimeoutError:
            continue
        return
    raise Internal("the device thread died; its error is in the log")


async def until_idle(num_open: Callable[[], int], timeout_s: float) -> None:
    """Returns when there has been nothing to do for SETTLE_S, or when timeout_s has passed."""
    loop = asyncio.get_running_loop()
    end, idle_since = loop.time() + timeout_s, loop.time()
    while loop.time() < min(end, idle_since + SETTLE_S):
        await asyncio.sleep(POLL_S)
        if num_open():
            idle_since = loop.time()
