"""How many workers a router recommends, for loads whose need follows from the formulas of queueing.py."""

from __future__ import annotations

import math

import pytest

from router.classifier import Classifier, SlaClass
from router.placement import Placement
from router.pools import Pool, WorkerLoad
from router.queueing import places_for
from router.sizing import Sizing
from tests.router.workers import info, registry

FAST = SlaClass.parse("fast:ttft_ms=1000:tpot_ms=50")
SLOW = SlaClass.parse("slow:ttft_ms=0:tpot_ms=0")
PREFILL_S, TPOT_S = 0.5, 0.002  # of a prompt of 100 tokens; of a request more in a batch, above 10 ms


class World:
    """Two workers in each pool whose speed is known, and a clock that moves when told."""

    def __init__(self, *, known: bool = True, queued_s: float = 0.0, rows_total: int = 100_000) -> None:
        self.now = 1000.0
        self.pools = registry(lease_s=1e9, clock=lambda: self.now)
        for pool in Pool:
            for i in range(2):
                worker = self.pools.join(info(f"{pool.name}{i}", pool=pool, rows_total=rows_total, block_size=16))
                self.pools.report(worker, WorkerLoad(rows_free=rows_total))
        self.placement = Placement(self.pools, Classifier((FAST, SLOW), "fast", 512), prefill_slots=8, decode_slots=256)
        if known:
            self._teach()
        self.sizing = Sizing(
            self.pools,
            self.placement,
            (FAST, SLOW),
            decode_slots=256,
            queued_s=lambda: queued_s,
            window_s=60,
            down_after_s=300,
        )

    def _teach(self) -> None:
        for i in range(2):
            for n in range(1, 41):
                self.placement.predictor.prefilled(f"PREFILL{i}", 100 * n, 0, PREFILL_S * n)
                self.placement.predictor.decoded(f"DECODE{i}", n, 0.010 + TPOT_S * n)

    def arrive(self, per_s: int, seconds: int, *, sla: str = "fast", prompt: int = 100, answer: int = 101) -> None:
        for _ in range(seconds):
            for _ in range(per_s):
                self.sizing.arrived(sla, prompt, 0)
                self.sizing.ended(prompt, answer, answer)
            self.now += 1
            self.sizing.update()

    def desired(self, pool: Pool) -> int:
        return self.sizing.sizes[pool].desired


async def test_nothing_known_is_no_reason_to_change_anything() -> None:
    world = World(known=False)
    world.arrive(50, 400)
    for pool in Pool:
        size = world.sizing.sizes[pool]
        assert (size.current, size.desired) == (2, 2)
        assert "nothing is known" in size.reason
    await world.pools.close()


async def test_prefill_needs_its_load_and_what_keeps_the_waits_within_the_target() -> None:
    world = World()
    world.arrive(8, 100)
    size = world.sizing.sizes[Pool.PREFILL]
    assert size.load == pytest.approx(8 * PREFILL_S, rel=0.05)
    # 4 erlangs of equal prompts of 0.5 s, 0.5 s to wait, at most 80% busy. Of 5 servers C(5, 4) = 0.554 wait, by the
    # tables; of those exp(-0.5 / (0.5 / 1 / 2)) = 0.135 longer than the target: 7.5% of all, which will do
    assert size.desired == 5
    await world.pools.close()


async def test_without_a_target_only_the_load_counts_and_prompts_that_vary_need_more_with_one() -> None:
    calm, varied = World(), World()
    for _ in range(100):
        for _ in range(9):
            calm.sizing.arrived("slow", 100, 0)
            varied.sizing.arrived("fast", 20, 0)
        varied.sizing.arrived("fast", 820, 0)
        calm.sizing.arrived("slow", 100, 0)
        for world in (calm, varied):
            world.now += 1
            world.sizing.update()
    assert calm.desired(Pool.PREFILL) == math.ceil(10 * PREFILL_S / 0.8)
    assert varied.sizing.sizes[Pool.PREFILL].load == pytest.approx(5, rel=0.05)
    assert varied.desired(Pool.PREFILL) > calm.desired(Pool.PREFILL)
    assert "TTFT of fast" in varied.sizing.sizes[Pool.PREFILL].reason
    for world in (calm, varied):
        await world.pools.close()


async def test_decode_needs_places_for_what_littles_law_says() -> None:
    world = World()
    world.arrive(10, 100)
    # 10 ms + 2 ms a request keeps 50 ms up to 20 requests; 10/s x 100 tokens x 50 ms are 50 at a time
    size = world.sizing.sizes[Pool.DECODE]
    assert size.load == pytest.approx(50 / 20, rel=0.05)
    assert size.desired == math.ceil(places_for(50) / 20) == 3
    assert "20 a worker" in size.reason
    await world.pools.close()


async def test_rows_bound_what_a_decode_worker_holds() -> None:
    world = World(rows_total=128)  # 2,048 tokens: ten requests of 201
    world.arrive(10, 100)
    assert "10 a worker" in world.sizing.sizes[Pool.DECODE].reason  # at 30 ms: 30 at a time
    assert world.desired(Pool.DECODE) == math.ceil(places_for(30) / 10)
    await world.pools.close()


async def test_it_goes_up_at_once_and_down_after_a_stable_time() -> None:
    world = World()
    world.arrive(2, 400)
    assert world.desired(Pool.PREFILL) == 2
    world.arrive(20, 12)
    risen = world.desired(Pool.PREFILL)
    assert risen > 8  # 10 erlangs are coming, and a minute's mean does not know yet
    world.arrive(2, 250)
    assert world.desired(Pool.PREFILL) >= risen
    assert "would do now" in world.sizing.sizes[Pool.PREFILL].reason
    world.arrive(2, 120)
    assert world.desired(Pool.PREFILL) == 2
    world.arrive(0, 400)
    assert [world.desired(pool) for pool in Pool] == [1, 1]
    await world.pools.close()


async def test_a_router_that_has_just_started_does_not_take_workers_away() -> None:
    world = World()
    for i in range(2, 6):
        worker = world.pools.join(info(f"PREFILL{i}", pool=Pool.PREFILL))
        world.pools.report(worker, WorkerLoad(rows_free=100))
    world.arrive(0, 59)
    assert world.desired(Pool.PREFILL) == 6
    world.arrive(0, 310)
    assert world.desired(Pool.PREFILL) == 1
    await world.pools.close()


async def test_what_waits_already_is_worked_off_within_a_window() -> None:
    world = World(queued_s=120.0)
    world.arrive(2, 100, sla="slow")
    assert world.sizing.sizes[Pool.PREFILL].load == pytest.approx(2 * PREFILL_S + 120 / 60, rel=0.05)
    await world.pools.close()


async def test_a_draining_worker_is_no_member_any_more() -> None:
    world = World()
    worker = next(iter(world.pools.pool(Pool.DECODE)))
    world.pools.report(worker, WorkerLoad(rows_free=1, draining=True))
    world.sizing.update()
    assert world.sizing.sizes[Pool.DECODE].current == 1
    await world.pools.close()
