"""The requests that wait, in lanes: one for each SLA class crossed with each input class, one heap a tenant in each
lane.

Within a tenant's heap the order is the request's own priority, then when its first token (or its end) is due, then
arrival. One that is due before it could be computed goes behind those that can still make it, or a queue once late
would stay late and all in it miss their target; one placement in four is kept for such. Between lanes, and between the
tenants of a lane, it is fair shares of the work (fairness.py): lanes by the weight of their class, tenants alike.
Requests that return for another attempt stand apart and before all others.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from router.classifier import LONG, SHORT, SlaClass
from router.fairness import FairShare
from router.placement import Demand, Pair

_TURN_OF_LATE = 4  # placements of a tenant, of which one goes to who is too late for its target


@dataclass(order=True, slots=True)
class Entry:
    """One waiting request; the first three fields are its place in its heap."""

    priority: int  # negated
    due: float
    number: int  # of arrival
    demand: Demand = field(compare=False)
    pair: asyncio.Future[Pair] = field(compare=False)
    lane: Lane = field(compare=False)
    tenant: str = field(compare=False)
    work: float = field(compare=False)  # tokens, for the shares
    compute_s: float = field(compare=False)  # of one prefill worker, for the prediction of waits

    @property
    def late_from(self) -> float:
        """From then on its first token cannot come in time."""
        return self.due - self.compute_s


class _Heap:
    """Two heaps, of those in time and of those too late, whose entries may leave from the middle.

    They are counted out at once and cleared away in bulk.
    """

    def __init__(self, *, knows_late: bool) -> None:
        self.waiting = 0
        self._in_time: list[Entry] = []
        self._late: list[Entry] = []
        self._knows_late = knows_late
        self._placed = 0

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._in_time, entry)
        self.waiting += 1

    def placed(self) -> None:
        self._placed += 1

    def left(self) -> None:
        """An entry's future is done: it waits no more."""
        self.waiting -= 1
        if 2 * self.waiting < len(self._in_time) + len(self._late):
            self._in_time = [entry for entry in self._in_time if not entry.pair.done()]
            self._late = [entry for entry in self._late if not entry.pair.done()]
            heapq.heapify(self._in_time)
            heapq.heapify(self._late)

    def first(self) -> Entry | None:
        now = asyncio.get_running_loop().time()
        in_time = _first(self._in_time)
        while in_time is not None and self._knows_late and in_time.late_from < now:
            heapq.heappush(self._late, heapq.heappop(self._in_time))
            in_time = _first(self._in_time)
        late = _first(self._late)
        if late is None or in_time is None:
            return late or in_time
        if late.priority != in_time.priority:
            return min(late, in_time)
        return late if (self._placed + 1) % _TURN_OF_LATE == 0 else in_time

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entry in chain(self._in_time, self._late) if not entry.pair.done())


def _first(heap: list[Entry]) -> Entry | None:
    while heap and heap[0].pair.done():
        heapq.heappop(heap)
    return heap[0] if heap else None


class Lane:
    """What waits of one SLA class and one input class."""

    def __init__(self, sla: SlaClass, input_class: str) -> None:
        self.sla = sla
        self.input_class = input_class
        self.waiting = 0
        self.compute_s = 0.0
        self._tenants: dict[str, _Heap] = {}
        self._share = FairShare()

    def push(self, entry: Entry) -> None:
        heap = self._tenants.get(entry.tenant)
        if heap is None:
            heap = self._tenants[entry.tenant] = _Heap(knows_late=self.input_class in (SHORT, LONG))
        heap.push(entry)
        self.waiting += 1
        self.compute_s += entry.compute_s

    def left(self, entry: Entry) -> None:
        heap = self._tenants[entry.tenant]
        heap.left()
        if not heap.waiting:
            del self._tenants[entry.tenant]
        self.waiting -= 1
        self.compute_s = self.compute_s - entry.compute_s if self.waiting else 0.0
        if not self.waiting:
            self._share.idle()

    def first(self) -> Entry | None:
        """Of the tenant whose turn it is. A heap may still count entries that were placed a moment ago."""
        heads = {tenant: entry for tenant, heap in self._tenants.items() if (entry := heap.first()) is not None}
        return heads[self._share.first(heads)] if heads else None

    def placed(self, entry: Entry) -> None:
        self._share.charge(entry.tenant, entry.work)
        self._tenants[entry.tenant].placed()

    def last(self, tenant: str | None = None) -> Entry | None:
        """Who would be served last: of `tenant`, or of the one with most waiting, the last in order."""
        heaps = [heap for name, heap in self._tenants.items() if tenant in (None, name) and heap.first() is not None]
        if not heaps:
            return None
        longest: _Heap = max(heaps, key=lambda heap: heap.waiting)
        return max(longest)

    def by_tenant(self) -> Counter[str]:
        """How many wait, by tenant. Those that were placed or refused a moment ago may still count."""
        return Counter({tenant: heap.waiting for tenant, heap in self._tenants.items()})

    def ahead_s(self, entry: Entry) -> float:
        """Work of this lane that goes before `entry`: what its tenant has in front, as much for each other one."""
        ahead = sum(other.compute_s for other in self._tenants.get(entry.tenant, ()) if other < entry)
        others = (heap for tenant, heap in self._tenants.items() if tenant != entry.tenant)
        return ahead + sum(min(ahead + entry.compute_s, sum(each.compute_s for each in heap)) for heap in others)

    def __iter__(self) -> Iterator[Entry]:
        for heap in self._tenants.values():
            yield from heap
