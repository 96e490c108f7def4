"""Health of one worker, judged by how the calls to it end: a circuit breaker.

closed    all is well; `threshold` faults in a row, or one loss of the connection, open it
open      nothing is sent for a pause that doubles with every opening
half-open the pause is over: one request goes through as the probe; its success closes, its fault opens again

Open by counted faults is a suspicion, for they may have been a partner's or a link's. Open by a lost connection is more
than that: nobody is there to answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable


class Breaker:
    def __init__(
        self,
        clock: Callable[[], float],
        *,
        threshold: int = 3,
        first_pause_s: float = 0.25,
        longest_pause_s: float = 15.0,
    ) -> None:
        self._clock = clock
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._faults = 0  # in a row
        self._openings = 0  # without a success between them
        self._retry_at = 0.0  # when the pause ends; only counts while _openings > 0
        self._probing = False
        self._unreachable = False  # it was a lost connection that opened it

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        return not self._openings or (not self._probing and self._clock() >= self._retry_at)

    @property
    def pause_s(self) -> float:
        """Seconds until a probe may be sent; 0 when closed or already over."""
        return max(0.0, self._retry_at - self._clock()) if self._openings else 0.0

    @property
    def suspicion(self) -> float | None:
        """How much speaks against the worker, next to others; None: no use asking it before the pause ends."""
        if self._openings and self._unreachable:
            return None
        return float(self._openings)

    def begin(self) -> bool:
        """Notes that a request is sent; whether it is the probe, which must be ended with `end_probe`."""
        if not self._openings:
            return False
        self._probing = True
        return True

    def end_probe(self) -> None:
        """The probe is over, with or without a verdict (a cancelled request gives none)."""
        self._probing = False

    def succeeded(self) -> None:
        self._faults = self._openings = 0

    def failed(self, *, connection_lost: bool = False) -> None:
        if self._openings and not self._probing:
            return  # of a request that was sent before it opened: the same fault, not one more
        self._faults += 1
        if connection_lost or self._probing or self._faults >= self._threshold:
            pause = min(self._longest_pause_s, self._first_pause_s * 2**self._openings)
            self._retry_at = self._clock() + pause * random.uniform(0.8, 1.2)  # routers do not probe in step
            self._openings += 1
            self._faults = 0
            self._unreachable = connection_lost
