"""A worker that has just joined gets at most one and a half times its even share of the new requests, until it has
caught up. What is placed before its probe has passed does not count: it would have that much in store then.

Without this all new requests would go to the one that has least to do, before anybody knows whether it is any good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from router.pools import Pool, Worker

SHARE = 1.5
LONGEST_S = 30.0


@dataclass(slots=True)
class _Start:
    """What was placed in its pool since a worker could be used."""

    at: float
    placed: int = 0  # on it
    placed_in_pool: int = 0


class SlowStart:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._starting: dict[Worker, _Start] = {}
        self._caught_up: set[Worker] = set()

    def allowed(self, workers: Sequence[Worker], pool: Sequence[Worker]) -> list[Worker]:
        """Those of `workers`, all of `pool`, that may take one more."""
        proved = [worker for worker in pool if worker.proved]
        self._look(proved)
        if not self._starting:
            return list(workers)
        return [worker for worker in workers if self._may_take(worker, len(proved))]

    def placed(self, worker: Worker) -> None:
        for other, start in self._starting.items():
            if other.info.pool is worker.info.pool:
                start.placed_in_pool += 1
                start.placed += other is worker

    def _may_take(self, worker: Worker, pool_size: int) -> bool:
        start = self._starting.get(worker)
        return start is None or start.placed + 1 <= ceil(SHARE * (start.placed_in_pool + 1) / pool_size)

    def _look(self, pool: Sequence[Worker]) -> None:
        """Notes who of a pool's proved workers is new, and who is new no more."""
        members = set(pool)
        kind = pool[0].info.pool if pool else Pool.PREFILL
        for worker in [each for each in self._starting if each.info.pool is kind]:
            others = [other.requests for other in members if other is not worker]
            caught_up = not others or worker.requests >= sum(others) / len(others) > 0
            late = self._clock() - self._starting[worker].at > LONGEST_S
            if worker not in members or caught_up or late:
                del self._starting[worker]
                self._caught_up.add(worker)
        self._caught_up = {each for each in self._caught_up if each in members or each.info.pool is not kind}
        for worker in members - self._caught_up:
            if worker not in self._starting:
                self._starting[worker] = _Start(self._clock())
