"""The speed of a growing count."""

from __future__ import annotations

import time
from collections.abc import Callable


class Rate:
    """Units a second over the last whole interval; asked by several routers, so it measures by its own clock."""

    def __init__(self, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._since, self._count, self._per_s = clock(), 0, 0.0

    def update(self, count: int) -> float:
        """Notes the count now; the rate over the last interval that has passed."""
        passed_s = self._clock() - self._since
        if passed_s >= self._interval_s:
            self._per_s = (count - self._count) / passed_s
            self._since, self._count = self._since + passed_s, count
        return self._per_s
