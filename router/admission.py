"""Who starts next, who has to wait, and who is refused.

1. A request that cannot end by its deadline, by what is predicted of the queue and of the workers, is refused at once.
2. So is one that finds the queue of its class full, unless another tenant has more of that queue: then the last of the
   tenant with most of it gives way. When the router as a whole holds all that it may, the class of the lowest priority
   gives way: the last of its queue is refused, to make room for a request of a class above.
3. The others wait in lanes (waiting.py) for a pair of workers (placement.py). Every refusal says when to come back.

A request that has been placed may return for another attempt; it then goes before all that have not started, and no
bound refuses it: its client has already been told yes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from router.classifier import LONG, SHORT, SlaClass
from router.fairness import FairShare
from router.placement import Demand, Outlook, Pair, Placement, Wait
from router.waiting import Entry, Lane
from twinpool.errors import Overloaded, PoolEmpty

_RATE_SAMPLES = 32  # placements that the retry-after estimate looks back on
_MARGIN = 1.2  # how many times the time left a prediction must be to refuse a request
_LOOK_AGAIN_S = 0.02  # while requests wait only because prefill workers have enough to do
_WORK_OF_ANSWER = 256  # tokens of an answer that count as work at most: how long it gets nobody knows


class Admission:
    """Hands out pairs. `pool_wait_s`: how long requests wait for a worker while a pool has none."""

    def __init__(
        self, classes: Iterable[SlaClass], placement: Placement, *, pool_wait_s: float, max_queued: int = 10000
    ) -> None:
        self._lanes = {
            (sla.name, length): Lane(sla, length)
            for sla in sorted(classes, key=lambda sla: -sla.priority)
            for length in (SHORT, LONG)
        }
        self._classes = FairShare()
        self._lengths = {sla_class: FairShare() for sla_class, _ in self._lanes}
        self._resumed = {sla_class: Lane(lane.sla, "resumed") for (sla_class, _), lane in self._lanes.items()}
        self._placement = placement
        self._pool_wait_s = pool_wait_s
        self._max_queued = max_queued
        self._arrivals = 0
        self._placed_at: deque[float] = deque(maxlen=_RATE_SAMPLES)
        self._missing_since: float | None = None
        self._give_up: asyncio.TimerHandle | None = None
        self._look_again: asyncio.TimerHandle | None = None

    def queued(self, sla_class: str) -> int:
        return sum(lane.waiting for lane in self._all_lanes() if lane.sla.name == sla_class)

    @property
    def all_queued(self) -> int:
        return sum(lane.waiting for lane in self._all_lanes())

    @property
    def queued_s(self) -> float:
        """Prefill work that waits, in seconds of one worker."""
        return sum(lane.compute_s for lane in self._all_lanes())

    async def place(
        self,
        demand: Demand,
        sla: SlaClass,
        *,
        priority: int,
        deadline: float,
        resumption: bool = False,
        tenant: str = "",
        input_class: str = SHORT,
    ) -> Pair:
        """Waits for a pair; the caller bounds the wait by its deadline and releases the pair.

        Raises Overloaded when the queue is full or the deadline cannot be kept, and PoolEmpty when a pool stays without
        a usable worker.
        """
        lane = self._lanes[sla.name, input_class]
        loop = asyncio.get_running_loop()
        self._arrivals += 1
        outlook = self._placement.outlook(demand)
        due = min(deadline, (demand.arrived_at or loop.time()) + sla.ttft_ms / 1000) if sla.ttft_ms else deadline
        entry = Entry(
            -priority,
            due,
            self._arrivals,
            demand,
            loop.create_future(),
            self._resumed[sla.name] if resumption else lane,
            tenant,
            max(1.0, demand.num_tokens + min(demand.max_new_tokens, _WORK_OF_ANSWER)),
            outlook.compute_s,
        )
        if not resumption:
            self._refuse_full(sla, tenant)
            self._refuse_late(entry, outlook, deadline - loop.time())
            self._make_room(sla, tenant)
        entry.lane.push(entry)
        try:
            self.pump()
            return await entry.pair
        except asyncio.CancelledError:
            if not entry.pair.cancel() and not entry.pair.cancelled() and entry.pair.exception() is None:
                entry.pair.result().release()  # placed in the moment of the cancel
                self.pump()
            raise
        finally:
            entry.lane.left(entry)
            if not self.all_queued:
                for share in (self._classes, *self._lengths.values()):
                    share.idle()

    def pump(self) -> None:
        """Places whoever can start now, the first first. Called whenever room or a worker may have come."""
        while self._place_one():
            pass
        self._watch_pools()

    def close(self) -> None:
        for timer in (self._give_up, self._look_again):
            if timer is not None:
                timer.cancel()

    def _place_one(self) -> bool:
        """Places the first that can be; False when nobody can.

        Whoever waits for room (slots, rows) holds up all behind it, or it would wait for ever while smaller requests
        take what becomes free. Who only waits until a prefill worker has less to do holds up its own lane.
        """
        for entry in self._in_order():
            pair = self._placement.choose(entry.demand)
            if pair is Wait.FOR_ROOM:
                return False
            if isinstance(pair, Pair):
                self._placed_at.append(asyncio.get_running_loop().time())
                self._charge(entry)
                entry.pair.set_result(pair)
                return True
            self._pump_later()
        return False

    def _in_order(self) -> Iterator[Entry]:
        """The first of each lane: those that return first, then by the shares of the classes, then of their lanes."""
        yield from sorted(entry for lane in self._resumed.values() if (entry := lane.first()) is not None)
        heads: dict[str, dict[str, Entry]] = {}
        for (sla_class, length), lane in self._lanes.items():
            if lane.waiting and (entry := lane.first()) is not None:
                heads.setdefault(sla_class, {})[length] = entry
        while heads:
            sla_class = self._classes.first(heads)
            own = heads.pop(sla_class)
            while own:
                yield own.pop(self._lengths[sla_class].first(own))

    def _charge(self, entry: Entry) -> None:
        if entry.lane.input_class in (SHORT, LONG):
            entry.lane.placed(entry)
            self._lengths[entry.lane.sla.name].charge(entry.lane.input_class, entry.work)
            self._classes.charge(entry.lane.sla.name, entry.work, entry.lane.sla.weight)

    def _pump_later(self) -> None:
        if self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._pump_again)

    def _pump_again(self) -> None:
        self._look_again = None
        self.pump()

    # Refusals

    def _refuse_full(self, sla: SlaClass, tenant: str) -> None:
        waiting = self.queued(sla.name)
        if waiting >= sla.queue and self._crowding(sla, tenant) is None:
            raise Overloaded(
                f"the queue of SLA class {sla.name!r} is full ({waiting} requests wait); try again later",
                retry_after_s=self._retry_after_s(sla.queue),
            )

    def _refuse_late(self, entry: Entry, outlook: Outlook, left_s: float) -> None:
        if outlook.first_s is None or outlook.tpot_s is None:
            return
        alone_s = outlook.first_s + (entry.demand.least_new_tokens - 1) * outlook.tpot_s
        queue_s = 0.0
        if alone_s + sum(lane.compute_s for lane in self._lanes.values()) > left_s:  # else no need to look closer
            queue_s = self._ahead_s(entry) / max(1, self._placement.num_prefill)
        if alone_s + queue_s <= _MARGIN * left_s:
            return
        more = f", {queue_s:.3g} s of them in the queue" if queue_s else ""
        raise Overloaded(
            f"the answer would take about {alone_s + queue_s:.3g} s{more}, and {max(0.0, left_s):.3g} s are left "
            "until its deadline; give it more time, or try again later",
            retry_after_s=min(60.0, max(0.1, alone_s + queue_s - left_s)),
        )

    def _ahead_s(self, entry: Entry) -> float:
        """Prefill work in the queue that goes before `entry`: of its lane, and the other lanes' shares meanwhile."""
        own = entry.lane
        ahead = own.ahead_s(entry)
        others = (lane for lane in self._lanes.values() if lane is not own and lane.waiting)
        mine = ahead + entry.compute_s
        return ahead + sum(min(lane.compute_s, mine * lane.sla.weight / own.sla.weight) for lane in others)

    def _make_room(self, sla: SlaClass, tenant: str) -> None:
        """Sheds a request where the class, or the router, holds all that it may. Raises Overloaded if it is this one.

        In the class it is the last of the tenant with most; in the router the last of the lowest class below `sla`.
        """
        full = self.queued(sla.name) >= sla.queue
        if not full and self.all_queued < self._max_queued:
            return None
        crowding = self._crowding(sla, tenant)
        if full and crowding is not None:
            return self._shed_crowding(crowding, sla.queue)
        retry_after_s = self._retry_after_s(self._max_queued)
        for lane in sorted(self._lanes.values(), key=lambda lane: (lane.sla.priority, -lane.waiting)):
            victim = lane.last() if lane.sla.priority < sla.priority else None
            if victim is not None:
                victim.pair.set_exception(
                    Overloaded(
                        f"this router is overloaded and made room for a request of SLA class {sla.name!r}, which goes "
                        f"before {lane.sla.name!r}; try again later",
                        retry_after_s=retry_after_s,
                    )
                )
                return None
        if crowding is not None:
            return self._shed_crowding(crowding, self._max_queued)
        raise Overloaded(
            f"this router is overloaded ({self.all_queued} requests wait); try again later",
            retry_after_s=retry_after_s,
        )

    def _crowding(self, sla: SlaClass, tenant: str) -> Entry | None:
        """The last request of the tenant with most of a class' queue; None if `tenant` would have as many."""
        lanes = [lane for lane in self._lanes.values() if lane.sla.name == sla.name]
        counts = sum((lane.by_tenant() for lane in lanes), Counter[str]())
        most = max(counts, key=counts.__getitem__, default=tenant)
        if counts[most] <= counts[tenant] + 1:
            return None
        return max(lanes, key=lambda lane: lane.by_tenant()[most]).last(most)

    def _shed_crowding(self, victim: Entry, bound: int) -> None:
        victim.pair.set_exception(
            Overloaded(
                "the queue is full, and this tenant has most of what waits in SLA class "
                f"{victim.lane.sla.name!r}: the last of its requests made room for another tenant's; try again later",
                retry_after_s=self._retry_after_s(bound),
            )
        )

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
        if self._missing_since is not None and self.all_queued:
            self._give_up = loop.call_at(self._missing_since + self._pool_wait_s, self._refuse_all)

    def _refuse_all(self) -> None:
        self._give_up = None
        missing = self._placement.missing()
        if missing is None:
            self.pump()
            return
        if self._placement.may_come:  # the wait goes on, for as long as its probe may take
            self._give_up = asyncio.get_running_loop().call_later(self._pool_wait_s, self._refuse_all)
            return
        for lane in self._all_lanes():
            for entry in lane:
                entry.pair.set_exception(PoolEmpty(missing))

    def _all_lanes(self) -> Iterator[Lane]:
        yield from self._lanes.values()
        yield from self._resumed.values()

    def _retry_after_s(self, bound: int) -> float:
        """When, at the rate of the last placements, a queue of `bound` will have moved by a tenth."""
        if len(self._placed_at) < 2:
            return 1.0
        span = asyncio.get_running_loop().time() - self._placed_at[0]
        per_request = span / len(self._placed_at)
        return min(60.0, max(0.1, per_request * bound / 10))
