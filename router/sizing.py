"""How many workers each pool should have: a recommendation for autoscalers and operators, from what this router sees.

Prefill  A prompt takes the predicted time of one worker's device, for what no cache holds. The pool is a queue with its
         workers as servers (queueing.py): as many as keep nine in ten waits within each class' TTFT target, less the
         class' own prefill time, and no worker busy more than four fifths of the time. Work that waits already is
         spread over a window.
Decode   By Little's law, arrivals a second x tokens of an answer x TPOT requests are there at a time. A worker holds as
         many as keep the strictest TPOT target, by what has been learnt of it, and as its rows hold. The pool needs
         places for nine in ten moments.

A recommendation goes up at once, and down when nothing higher was recommended for `down_after_s`. There is never less
than one; while nothing is known of the workers of a pool, and until a window has passed since the start, never less
than there is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.classifier import SlaClass
from router.placement import Placement
from router.pools import Pool, Registry, Worker, WorkerState
from router.queueing import places_for, servers_for_wait

_BUSIEST = 0.8  # of a prefill worker's time
_ROUNDING = 1e-4  # of a worker that asks for no other one: fitted times are off by up to 1e-5 where data are exact
_RARE = 0.05  # classes with a smaller share of the arrivals do not size a pool
_BURST_S = 15.0  # a rise within it counts at once...
_BURST_ARRIVALS = 30  # ...when this many have come, so that it is hardly chance
_SHORTEST_S = 10.0  # that a rate is taken over
_MEMORY = 128  # ended requests that means look back on


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    pool: Pool
    current: int  # workers that have joined and do not drain
    desired: int
    load: float  # in workers that have nothing to spare
    reason: str


@dataclass(slots=True)
class _Second:
    """What has arrived in one second."""

    at: int
    count: dict[str, int] = field(default_factory=dict)  # by SLA class
    service_s: dict[str, float] = field(default_factory=dict)
    squared: float = 0.0  # sum of squares of the service times


class _Mean:
    """Of the last values, older ones fading."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, _MEMORY)
        self.value += (value - self.value) / self.count


class Sizing:
    """Owned by one event loop: told of every arrival and end, and to `update` every few seconds."""

    def __init__(
        self,
        registry: Registry,
        placement: Placement,
        classes: Sequence[SlaClass],
        *,
        decode_slots: int,
        queued_s: Callable[[], float],
        window_s: float = 60.0,
        down_after_s: float = 300.0,
    ) -> None:
        """queued_s: prefill work that waits in the router, in seconds of one worker."""
        self._registry = registry
        self._placement = placement
        self._classes = {sla.name: sla for sla in classes}
        self._decode_slots = decode_slots
        self._queued_s = queued_s
        self._window_s = window_s
        self._down_after_s = down_after_s
        self._started_at = registry.clock()
        self._seconds: deque[_Second] = deque()
        self._longest = _Mean()  # tokens of the longest choice, after its first
        self._held = _Mean()  # tokens of prompt and all choices
        self._history: dict[Pool, deque[tuple[float, int]]] = {pool: deque() for pool in Pool}
        self.sizes: dict[Pool, PoolSize] = {}
        self.update()

    def arrived(self, sla_class: str, num_tokens: int, num_cached: int) -> None:
        """A valid request has come, whether it will be served or refused."""
        now = int(self._registry.clock())
        if not self._seconds or self._seconds[-1].at != now:
            self._seconds.append(_Second(now))
        second = self._seconds[-1]
        service_s = self._service_s(num_tokens, num_cached)
        second.count[sla_class] = second.count.get(sla_class, 0) + 1
        second.service_s[sla_class] = second.service_s.get(sla_class, 0.0) + service_s
        second.squared += service_s**2

    def ended(self, prompt_tokens: int, completion_tokens: int, longest: int) -> None:
        """A request has finished; `longest`: tokens of its longest choice."""
        self._longest.add(max(0, longest - 1))
        self._held.add(prompt_tokens + completion_tokens)

    def update(self) -> None:
        now = self._registry.clock()
        while self._seconds and self._seconds[0].at < now - self._window_s:
            self._seconds.popleft()
        for pool, recommend in ((Pool.PREFILL, self._prefill), (Pool.DECODE, self._decode)):
            members = [w for w in self._registry.pool(pool) if w.state is not WorkerState.DRAINING]
            load, wanted, reason = recommend(members)
            if wanted is None or now - self._started_at < self._window_s:
                wanted = max(wanted or 1, len(members))
            history = self._history[pool]
            history.append((now, wanted))
            while history[0][0] < now - self._down_after_s:
                history.popleft()
            desired = max(each for _, each in history)
            if desired > wanted:
                reason = f"{wanted} would do now: {reason}"
            self.sizes[pool] = PoolSize(pool=pool, current=len(members), desired=desired, load=load, reason=reason)

    def _prefill(self, members: list[Worker]) -> tuple[float, int | None, str]:
        predictor = self._placement.predictor
        if not any(predictor.knows_prefill(worker.info.worker_id) for worker in members):
            return 0.0, None, "nothing is known yet of how fast its workers are"
        count = sum(sum(second.count.values()) for second in self._seconds)
        if not count:
            return 0.0, 1, "nothing has arrived of late"
        mean_s = sum(sum(second.service_s.values()) for second in self._seconds) / count
        mean_square = sum(second.squared for second in self._seconds) / count
        squared_cv = max(0.0, mean_square / mean_s**2 - 1) if mean_s else 0.0
        rate = self._rate()
        load = rate * mean_s + self._queued_s() / self._window_s
        wanted = max(1, math.ceil(load / _BUSIEST - _ROUNDING))
        reason = f"{rate:.3g} prompts/s of {1000 * mean_s:.3g} ms keep {load:.3g} workers busy"
        for name, share in self._shares(count).items():
            sla = self._classes[name]
            spare_s = sla.ttft_ms / 1000 - self._class_service_s(name)
            if not sla.ttft_ms or share < _RARE or spare_s <= 0:  # more workers make no prompt faster
                continue
            needed = servers_for_wait(spare_s, load, mean_s, squared_cv)
            if needed > wanted:
                wanted = needed
                reason += f"; TTFT of {name} leaves {1000 * spare_s:.3g} ms to wait"
        return load, wanted, reason

    def _decode(self, members: list[Worker]) -> tuple[float, int | None, str]:
        known = [w for w in members if self._placement.predictor.knows_decode(w.info.worker_id)]
        if not known or not self._longest.count:
            return 0.0, None, "nothing is known yet of how fast its workers are"
        count = sum(sum(second.count.values()) for second in self._seconds)
        if not count:
            return 0.0, 1, "nothing has arrived of late"
        rows = sum(w.info.rows_total * w.info.block_size for w in known) / len(known)
        most = max(1, min(self._decode_slots, int(rows / max(1.0, self._held.value))))
        targets = [self._classes[name].tpot_ms / 1000 for name, share in self._shares(count).items() if share >= _RARE]
        target_s = min((target for target in targets if target), default=0.0)
        batch = self._largest_batch(known, most, target_s)
        tpot_s = self._tpot_s(known, batch)
        present = self._rate() * self._longest.value * tpot_s
        reason = (
            f"{self._rate():.3g} answers/s of {self._longest.value:.3g} tokens, {1000 * tpot_s:.3g} ms each, are "
            f"{present:.3g} at a time, {batch} a worker"
        )
        return present / batch, max(1, math.ceil(places_for(present) / batch - 1e-9)), reason

    def _rate(self) -> float:
        """Arrivals a second: over the window, or over its end when many have come in it."""
        now = self._registry.clock()
        rates = []
        for span_s, least in ((self._window_s, 0), (min(_BURST_S, self._window_s), _BURST_ARRIVALS)):
            count = sum(sum(second.count.values()) for second in self._seconds if second.at >= int(now - span_s))
            if count >= least:
                rates.append(count / max(min(span_s, now - self._started_at), min(_SHORTEST_S, span_s)))
        return max(rates)

    def _shares(self, count: int) -> dict[str, float]:
        shares: dict[str, float] = {}
        for second in self._seconds:
            for name, number in second.count.items():
                shares[name] = shares.get(name, 0.0) + number / count
        return shares

    def _class_service_s(self, name: str) -> float:
        count = sum(second.count.get(name, 0) for second in self._seconds)
        return sum(second.service_s.get(name, 0.0) for second in self._seconds) / max(1, count)

    def _service_s(self, num_tokens: int, num_cached: int) -> float:
        members = self._registry.pool(Pool.PREFILL)
        predictor = self._placement.predictor
        each = [predictor.prefill_s(worker.info.worker_id, num_tokens, num_cached) for worker in members]
        return sum(each) / len(each) if each else predictor.prefill_s("", num_tokens, num_cached)

    def _tpot_s(self, workers: list[Worker], batch: int) -> float:
        return sum(self._placement.predictor.tpot_s(w.info.worker_id, batch) for w in workers) / len(workers)

    def _largest_batch(self, workers: list[Worker], most: int, target_s: float) -> int:
        """That keeps the target, at most `most`; all of `most` where there is no target, or none that can be kept."""
        if not target_s or self._tpot_s(workers, 1) > target_s:
            return most
        low, high = 1, most
        while low < high:  # TPOT grows with the batch
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._tpot_s(workers, middle) <= target_s else (low, middle - 1)
        return low
