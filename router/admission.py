"""Who starts next: one bounded queue per SLA class, ordered by priority, deadline and arrival.

A request that has been placed may return for another attempt; it then goes before all that have not started, and no
bound refuses it: its client has already been told yes.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.classifier import SlaClass
from router.placement import Demand, Pair, Placement
from twinpool.errors import Overloaded, PoolEmpty

_RATE_SAMPLES = 32  # placements that the retry-after estimate looks back on


@dataclass(order=True, slots=True)
class _Entry:
    """One waiting request; the fields before `demand` are its place in the queue."""

    resumption: int  # -1: placed before
    priority: int  # negated
    deadline: float
    number: int  # of arrival
    demand: Demand = field(compare=False)
    pair: asyncio.Future[Pair] = field(compare=False)


class _Queue:
    """A heap whose entries may leave from the middle: they are counted out at once and cleared away in bulk."""

    def __init__(self, sla: SlaClass) -> None:
        self.sla = sla
        self.waiting = 0
        self._heap: list[_Entry] = []

    def push(self, entry: _Entry) -> None:
        heapq.heappush(self._heap, entry)
        self.waiting += 1

    def left(self) -> None:
        """An entry's future is done: it waits no more."""
        self.waiting -= 1
        if 2 * self.waiting < len(self._heap):
            self._heap = [entry for entry in self._heap if not entry.pair.done()]
            heapq.heapify(self._heap)

    def first(self) -> _Entry | None:
        while self._heap and self._heap[0].pair.done():
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def entries(self) -> list[_Entry]:
        return [entry for entry in self._heap if not entry.pair.done()]


class Admission:
    """Hands out pairs. `pool_wait_s`: how long requests wait for a worker while a pool has none."""

    def __init__(self, classes: Iterable[SlaClass], placement: Placement, *, pool_wait_s: float) -> None:
        self._queues = {sla.name: _Queue(sla) for sla in sorted(classes, key=lambda sla: -sla.priority)}
        self._placement = placement
        self._pool_wait_s = pool_wait_s
        self._arrivals = 0
        self._placed_at: deque[float] = deque(maxlen=_RATE_SAMPLES)
        self._missing_since: float | None = None
        self._give_up: asyncio.TimerHandle | None = None

    def queued(self, sla_class: str) -> int:
        return self._queues[sla_class].waiting

    async def place(
        self, demand: Demand, sla: SlaClass, *, priority: int, deadline: float, resumption: bool = False
    ) -> Pair:
        """Waits for a pair; the caller bounds the wait by its deadline and releases the pair.

        Raises Overloaded when the queue is full and PoolEmpty when a pool stays without a usable worker.
        """
        queue = self._queues[sla.name]
        if not resumption and queue.waiting >= sla.queue:
            raise Overloaded(
                f"the queue of SLA class {sla.name!r} is full ({queue.waiting} requests wait); try again later",
                retry_after_s=self._retry_after_s(queue),
            )
        self._arrivals += 1
        loop = asyncio.get_running_loop()
        entry = _Entry(-1 if resumption else 0, -priority, deadline, self._arrivals, demand, loop.create_future())
        queue.push(entry)
        try:
            self.pump()
            return await entry.pair
        except asyncio.CancelledError:
            if not entry.pair.cancel() and not entry.pair.cancelled() and entry.pair.exception() is None:
                entry.pair.result().release()  # placed in the moment of the cancel
                self.pump()
            raise
        finally:
            queue.left()

    def pump(self) -> None:
        """Places whoever can start now, the first first. Called whenever room or a worker may have come."""
        while (entry := self._first()) is not None:
            pair = self._placement.choose(entry.demand)
            if pair is None:
                break
            self._placed_at.append(asyncio.get_running_loop().time())
            entry.pair.set_result(pair)
        self._watch_pools()

    def close(self) -> None:
        if self._give_up is not None:
            self._give_up.cancel()

    def _first(self) -> _Entry | None:
        heads = [entry for queue in self._queues.values() if (entry := queue.first()) is not None]
        resumed = [entry for entry in heads if entry.resumption]
        return min(resumed) if resumed else next(iter(heads), None)

    def _watch_pools(self) -> None:
        """While a pool has no usable worker, those who wait are told so when the time for it is up."""
        loop = asyncio.get_running_loop()
        if self._placement.missing() is None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = loop.time()
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        if self._missing_since is not None and any(queue.waiting for queue in self._queues.values()):
            self._give_up = loop.call_at(self._missing_since + self._pool_wait_s, self._refuse_all)

    def _refuse_all(self) -> None:
        self._give_up = None
        missing = self._placement.missing()
        if missing is None:
            self.pump()
            return
        for queue in self._queues.values():
            for entry in queue.entries():
                entry.pair.set_exception(PoolEmpty(missing))

    def _retry_after_s(self, queue: _Queue) -> float:
        """When, at the rate of the last placements, the queue will have moved by a tenth."""
        if len(self._placed_at) < 2:
            return 1.0
        span = asyncio.get_running_loop().time() - self._placed_at[0]
        per_request = span / len(self._placed_at)
        return min(60.0, max(0.1, per_request * queue.sla.queue / 10))
