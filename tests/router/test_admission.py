"""Who starts when, who is refused, and that queues give back what they hold."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc

import pytest

from router.admission import Admission
from router.classifier import SlaClass
from router.placement import Demand, Pair, Placement
from router.pools import Registry
from tests.router.workers import join, registry
from twinpool.errors import Overloaded, PoolEmpty

INTERACTIVE = SlaClass(name="interactive", priority=10, queue=2000)
BATCH = SlaClass(name="batch", priority=0, queue=3)
DEMAND = Demand(num_tokens=10, num_choices=1, max_new_tokens=10)


class Gate:
    """A pair of workers with one slot, and the order in which requests got it."""

    def __init__(self, *, pool_wait_s: float = 0.05, workers: bool = True) -> None:
        self.pools: Registry = registry()
        if workers:
            join(self.pools, "p0")
            join(self.pools, "d0")
        placement = Placement(self.pools, prefill_slots=100, decode_slots=1)
        self.admission = Admission((BATCH, INTERACTIVE), placement, pool_wait_s=pool_wait_s)
        self.pools.on_change = self.admission.pump
        self.order: list[str] = []

    async def pass_through(self, name: str, sla: SlaClass = INTERACTIVE, **fields: object) -> None:
        pair = await self.place(sla, **fields)
        self.order.append(name)
        pair.release()
        self.admission.pump()

    async def place(self, sla: SlaClass = INTERACTIVE, **fields: object) -> Pair:
        options = {"priority": 0, "deadline": 1e9} | fields
        return await self.admission.place(DEMAND, sla, **options)  # type: ignore[arg-type]

    def queue(self, name: str, sla: SlaClass = INTERACTIVE, **fields: object) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.pass_through(name, sla, **fields))


async def test_order_is_class_then_priority_then_deadline_then_arrival() -> None:
    gate = Gate()
    holder = await gate.place()
    waiting = [
        gate.queue("batch", BATCH, priority=99),
        gate.queue("late", deadline=30),
        gate.queue("soon", deadline=20),
        gate.queue("soon too", deadline=20),
        gate.queue("urgent", priority=1, deadline=99),
        gate.queue("resumed", BATCH, resumption=True),
    ]
    await asyncio.sleep(0)
    assert gate.admission.queued("interactive") == 4
    holder.release()
    gate.admission.pump()
    await asyncio.gather(*waiting)
    assert gate.order == ["resumed", "urgent", "soon", "soon too", "late", "batch"]
    assert gate.admission.queued("interactive") == gate.admission.queued("batch") == 0


async def test_full_queue_refuses_at_once_and_says_when_to_return() -> None:
    gate = Gate()
    holder = await gate.place()
    waiting = [gate.queue(str(i), BATCH) for i in range(BATCH.queue)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="'batch' is full") as caught:
        await gate.place(BATCH)
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0
    resumed = gate.queue("resumed", BATCH, resumption=True)  # no bound for those who have begun
    await asyncio.sleep(0)
    holder.release()
    gate.admission.pump()
    await asyncio.gather(resumed, *waiting)


async def test_a_thousand_queued_and_cancelled_leave_nothing() -> None:
    gate = Gate()
    holder = await gate.place()
    held_bytes = []
    tracemalloc.start()
    for round_number in range(3):
        waiting = [gate.queue(str(i)) for i in range(1000)]
        await asyncio.sleep(0)
        assert gate.admission.queued("interactive") == 1000
        random.Random(round_number).shuffle(waiting)
        for task in waiting:
            task.cancel()
        assert all(isinstance(each, asyncio.CancelledError) for each in await _results(waiting))
        assert gate.admission.queued("interactive") == 0
        waiting.clear()
        gc.collect()  # errors and their tracebacks are cycles
        held_bytes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert held_bytes[2] - held_bytes[1] < 100_000  # a hundred bytes a request would show
    holder.release()
    (await gate.place()).release()  # and the gate still works


async def test_cancel_in_the_moment_of_placement_gives_the_pair_back() -> None:
    gate = Gate()
    holder = await gate.place()
    first, second = gate.queue("first"), gate.queue("second")
    await asyncio.sleep(0)
    holder.release()
    gate.admission.pump()  # places the first, whose task has not run yet
    first.cancel()
    await _results([first, second])
    assert gate.order == ["second"]
    assert not any(worker.claims for worker in gate.pools)


async def test_random_cancels_never_lose_the_slot() -> None:
    gate, draw = Gate(), random.Random(7)
    for _ in range(200):
        tasks = [gate.queue(str(i), draw.choice([INTERACTIVE, BATCH])) for i in range(draw.randrange(1, 4))]
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
        for task in tasks:
            if draw.random() < 0.5:
                task.cancel()
        await _results(tasks)
        assert not any(worker.claims for worker in gate.pools)
    assert gate.admission.queued("interactive") == gate.admission.queued("batch") == 0


async def test_empty_pool_fails_all_who_wait_and_is_forgotten_when_it_fills() -> None:
    gate = Gate(workers=False)
    with pytest.raises(PoolEmpty, match="no usable prefill worker"):
        await gate.place()
    join(gate.pools, "p0")
    with pytest.raises(PoolEmpty, match="no usable decode worker"):
        await gate.place()
    waiting = gate.queue("waiter")
    await asyncio.sleep(0)
    join(gate.pools, "d0")
    await waiting
    assert gate.order == ["waiter"]


async def _results(tasks: list[asyncio.Task[None]]) -> list[object]:
    return list(await asyncio.gather(*tasks, return_exceptions=True))
