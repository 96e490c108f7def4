"""Who starts when, who is refused, and that queues give back what they hold."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from dataclasses import replace

import pytest

from router.admission import Admission
from router.classifier import Classifier, SlaClass
from router.placement import Demand, Pair, Placement
from router.pools import Registry
from tests.router.workers import join, registry
from twinpool.errors import Overloaded, PoolEmpty

INTERACTIVE = SlaClass(name="interactive", priority=10, queue=2000, weight=8)
BATCH = SlaClass(name="batch", priority=0, queue=3)
DEMAND = Demand(num_tokens=10, num_choices=1, max_new_tokens=10)


class Gate:
    """A pair of workers with one slot, and the order in which requests got it."""

    def __init__(
        self,
        *,
        pool_wait_s: float = 0.05,
        workers: bool = True,
        policy: str = "least_loaded",
        decode_slots: int = 1,
        max_queued: int = 10000,
    ) -> None:
        self.pools: Registry = registry()
        if workers:
            join(self.pools, "p0")
            join(self.pools, "d0", rows_free=10000)
        classifier = Classifier((BATCH, INTERACTIVE), "batch", 512)
        self.placement = placement = Placement(
            self.pools, classifier, prefill_slots=100, decode_slots=decode_slots, policy=policy
        )
        self.admission = Admission((BATCH, INTERACTIVE), placement, pool_wait_s=pool_wait_s, max_queued=max_queued)
        self.pools.on_change = self.admission.pump
        self.order: list[str] = []

    async def pass_through(self, name: str, sla: SlaClass = INTERACTIVE, **fields: object) -> None:
        pair = await self.place(sla, **fields)
        self.order.append(name)
        pair.release()
        self.admission.pump()

    async def place(self, sla: SlaClass = INTERACTIVE, demand: Demand = DEMAND, **fields: object) -> Pair:
        options = {"priority": 0, "deadline": 1e9} | fields
        return await self.admission.place(demand, sla, **options)  # type: ignore[arg-type]

    def queue(self, name: str, sla: SlaClass = INTERACTIVE, **fields: object) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.pass_through(name, sla, **fields))


async def test_order_within_a_class_is_priority_then_deadline_then_arrival() -> None:
    gate = Gate()
    holder = await gate.place()
    waiting = [
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
    assert gate.order == ["resumed", "urgent", "soon", "soon too", "late"]
    assert gate.admission.queued("interactive") == gate.admission.queued("batch") == 0


async def test_who_is_too_late_for_the_target_goes_behind_those_that_are_not_but_for_one_in_four() -> None:
    gate, sla = Gate(), replace(INTERACTIVE, ttft_ms=20_000)
    now = asyncio.get_running_loop().time()
    holder = await gate.place()
    missed, kept = (replace(DEMAND, arrived_at=at) for at in (now - 30, now))
    waiting = [gate.queue(f"missed {i}", sla, demand=missed) for i in range(2)]
    waiting += [gate.queue(f"in time {i}", sla, demand=kept) for i in range(5)]
    await asyncio.sleep(0)
    holder.release()
    gate.admission.pump()
    await asyncio.gather(*waiting)
    in_time = [f"in time {i}" for i in range(5)]
    assert gate.order == [*in_time[:3], "missed 0", *in_time[3:], "missed 1"]


async def test_classes_share_by_weight_and_tenants_alike_so_that_nobody_starves() -> None:
    gate = Gate()
    holder = await gate.place()
    waiting = [gate.queue("i", INTERACTIVE, tenant="noisy") for _ in range(60)]
    waiting += [gate.queue("i quiet", INTERACTIVE, tenant="quiet") for _ in range(3)]
    waiting += [gate.queue("b", BATCH) for _ in range(3)]
    await asyncio.sleep(0)
    holder.release()
    gate.admission.pump()
    await asyncio.gather(*waiting)
    last = {name: max(i for i, each in enumerate(gate.order) if each == name) for name in set(gate.order)}
    assert last["i quiet"] < 10  # three turns of two tenants, and what batch takes
    first_40 = gate.order[:40]
    assert first_40.count("b") == 3  # one in nine, by weights 8 and 1
    assert gate.order[:9].count("b") <= 2


async def test_long_input_that_waits_for_a_busy_prefill_worker_does_not_hold_up_short_ones() -> None:
    gate = Gate(policy="predict", decode_slots=100)
    long = Demand(num_tokens=3000, num_choices=1, max_new_tokens=10)
    pairs = [await gate.place(demand=long, input_class="long")]
    blocked = asyncio.ensure_future(gate.place(demand=long, input_class="long"))
    await asyncio.sleep(0)
    assert not blocked.done()  # three seconds of work are there already, by the default of a millisecond a token
    pairs += [await asyncio.wait_for(gate.place(), 1) for _ in range(3)]
    for pair in pairs:
        pair.release()
    gate.admission.pump()
    (await asyncio.wait_for(blocked, 5)).release()
    gate.admission.close()


async def test_deadline_that_cannot_be_kept_is_refused_at_once_with_when_to_return() -> None:
    gate = Gate()
    predictor = gate.placement.predictor
    for _ in range(8):
        predictor.prefilled("p0", 10, 0, 2.0)
        predictor.decoded("d0", 1, 0.1)
    now = asyncio.get_running_loop().time()
    slow = Demand(num_tokens=10, num_choices=1, max_new_tokens=11, least_new_tokens=11)
    with pytest.raises(Overloaded, match=r"about 3 s, and (1|0\.9\d*) s are left") as caught:
        await gate.place(demand=slow, deadline=now + 1)
    assert caught.value.retry_after_s == pytest.approx(2.0, abs=0.1)
    at_once = asyncio.get_running_loop().time() + 0.05
    with pytest.raises(Overloaded, match=r"and 0\.0[0-4]\d* s are left"):  # no "0.0 s", which says nothing
        await gate.place(demand=slow, deadline=at_once)
    holder = await gate.place(deadline=now + 60)
    waiting: list[asyncio.Task[None]] = []
    while not (waiting and waiting[-1].done()) and len(waiting) < 20:  # two seconds each, one after the other
        waiting.append(gate.queue(str(len(waiting)), deadline=now + 25))
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="in the queue"):
        await waiting.pop()
    assert 10 <= len(waiting) <= 15
    waiting.append(gate.queue("first", deadline=now + 10))  # goes before them
    await asyncio.sleep(0)
    holder.release()
    gate.admission.pump()
    await asyncio.gather(*waiting)
    assert gate.order[0] == "first"


async def test_overload_sheds_the_lowest_class_first_and_its_last_request() -> None:
    gate = Gate(max_queued=4)
    holder = await gate.place()
    batch = [gate.queue(f"b{i}", BATCH) for i in range(3)]
    first = gate.queue("i0")
    await asyncio.sleep(0)
    second = gate.queue("i1")
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="made room for a request of SLA class 'interactive'"):
        await batch[2]
    with pytest.raises(Overloaded, match="this router is overloaded"):
        await gate.place(BATCH)
    holder.release()
    gate.admission.pump()
    await asyncio.gather(first, second, *batch[:2])
    assert sorted(gate.order) == ["b0", "b1", "i0", "i1"]


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


async def test_time_to_return_follows_from_how_fast_the_queue_moves() -> None:
    gate = Gate()
    for _ in range(40):
        (await gate.place()).release()
        await asyncio.sleep(0.005)
    holder = await gate.place()
    waiting = [gate.queue(str(i), INTERACTIVE) for i in range(INTERACTIVE.queue)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await gate.place()
    assert caught.value.retry_after_s is not None
    assert 1.0 < caught.value.retry_after_s <= 60.0  # a tenth of 2,000 places, of which each takes 5 ms or more
    for each in waiting:
        each.cancel()
    holder.release()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_tenant_that_fills_the_queue_gives_way_to_another_until_both_have_alike() -> None:
    gate = Gate()
    holder = await gate.place()
    flood = [gate.queue(f"f{i}", BATCH, tenant="flood") for i in range(BATCH.queue)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="'batch' is full"):
        await gate.place(BATCH, tenant="flood")
    polite = gate.queue("p0", BATCH, tenant="polite")
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="this tenant has most of what waits") as caught:
        await flood[-1]
    assert caught.value.retry_after_s is not None
    with pytest.raises(Overloaded, match="'batch' is full"):  # two and one: nobody has more than another would have
        await gate.place(BATCH, tenant="polite")
    holder.release()
    gate.admission.pump()
    await asyncio.gather(polite, *flood[:-1])
    assert sorted(gate.order) == ["f0", "f1", "p0"]


async def test_a_router_that_is_full_of_one_tenant_has_room_for_another() -> None:
    gate = Gate(max_queued=3)
    holder = await gate.place()
    flood = [gate.queue(f"f{i}", tenant="flood") for i in range(3)]
    await asyncio.sleep(0)
    polite = gate.queue("p0", tenant="polite")
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="this tenant has most of what waits"):
        await flood[-1]
    holder.release()
    gate.admission.pump()
    await asyncio.gather(polite, *flood[:-1])


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
