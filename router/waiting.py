"""The requests that wait, in lanes: one for each SLA class crossed with each input class, one heap a tenant in each
lane.

Within a tenant's heap the order is the request's own priority, then when its first token (or its end) is due, then
arrival. Between lanes, and between the tenants of a lane, it is fair shares of the work (fairness.py): lanes by the
weight of their class, tenants alike. Requests that return for another attempt stand apart and before all others.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.classifier import SlaClass
from router.fairness import FairShare
from router.placement import Demand, Pair


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


class _Heap:
    """A heap whose entries may leave from the middle: they are counted out at once and cleared away in bulk."""

    def __init__(self) -> None:
        self.waiting = 0
        self._heap: list[Entry] = []

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)
        self.waiting += 1

    def left(self) -> None:
        """An entry's future is done: it waits no more."""
        self.waiting -= 1
        if 2 * self.waiting < len(self._heap):
            self._heap = [entry for entry in self._heap if not entry.pair.done()]
            heapq.heapify(self._heap)

    def first(self) -> Entry | None:
        while self._heap and self._heap[0].pair.done():
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entry in self._heap if not entry.pair.done())


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
            heap = self._tenants[entry.tenant] = _Heap()
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

    def last(self) -> Entry | None:
        """Who would be served last: of the tenant with most waiting, the last in order."""
        heaps = [heap for heap in self._tenants.values() if heap.first() is not None]
        if not heaps:
            return None
        longest: _Heap = max(heaps, key=lambda heap: heap.waiting)
        return max(longest)

    def ahead_s(self, entry: Entry) -> float:
        """Work of this lane that goes before `entry`: what its tenant has in front, as much for each other one."""
        ahead = sum(other.compute_s for other in self._tenants.get(entry.tenant, ()) if other < entry)
        others = (heap for tenant, heap in self._tenants.items() if tenant != entry.tenant)
        return ahead + sum(min(ahead + entry.compute_s, sum(each.compute_s for each in heap)) for heap in others)

    def __iter__(self) -> Iterator[Entry]:
        for heap in self._tenants.values():
            yield from heap
