import asyncio

import pytest

from service import drain
from twinpool.errors import Internal


async def test_a_worker_waits_for_the_signal_to_stop():
    stop = asyncio.Event()
    waiting = asyncio.create_task(drain.until_stopped(stop, lambda: True))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    stop.set()
    await asyncio.wait_for(waiting, 10)


async def test_a_dead_device_thread_ends_the_worker():
    with pytest.raises(Internal, match="device thread died"):
        await asyncio.wait_for(drain.until_stopped(asyncio.Event(), lambda: False), 10)


async def test_a_drain_ends_when_all_requests_have_and_no_late_one_came(monkeypatch):
    monkeypatch.setattr(drain, "SETTLE_S", 0.1)
    num_open = 1
    draining = asyncio.create_task(drain.until_idle(lambda: num_open, timeout_s=60))
    await asyncio.sleep(0.3)
    assert not draining.done()
    num_open = 0
    await asyncio.wait_for(draining, 10)


async def test_a_drain_does_not_wait_for_ever():
    await asyncio.wait_for(drain.until_idle(lambda: 1, timeout_s=0.1), 10)
