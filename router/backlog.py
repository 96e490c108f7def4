"""What a prefill worker still has to compute before a new prompt is done, as seconds of its device.

A worker gives half of each step to short and half to long inputs as long as both wait (prefill/scheduler.py): so a
newcomer waits for those of its own class, and for the other class as long as that has something, at half speed.

Reports come once a heartbeat. In between the estimate grows with every claim, shrinks as time passes, and never exceeds
what the open claims and the last report leave room for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.classifier import LONG, SHORT

_OTHER = {SHORT: LONG, LONG: SHORT}


class Backlog:
    """Seconds of work by input class. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()
        self._seconds = {SHORT: 0.0, LONG: 0.0}
        self._claimed = {SHORT: 0.0, LONG: 0.0}

    def claim(self, input_class: str, seconds: float) -> None:
        self._pass_time()
        self._seconds[input_class] += seconds
        self._claimed[input_class] += seconds

    def release(self, input_class: str, seconds: float) -> None:
        """The prompt is computed, or will not be."""
        self._pass_time()
        self._claimed[input_class] = max(0.0, self._claimed[input_class] - seconds)
        self._seconds[input_class] = min(self._seconds[input_class], self._claimed[input_class])

    def reported(self, seconds: Mapping[str, float]) -> None:
        """The worker says what waits there, from this router and others."""
        self._pass_time()
        for name, value in seconds.items():
            self._seconds[name] = max(value, self._seconds[name])

    def of(self, input_class: str) -> float:
        self._pass_time()
        return self._seconds[input_class]

    @property
    def total(self) -> float:
        self._pass_time()
        return self._seconds[SHORT] + self._seconds[LONG]

    def until_done(self, input_class: str, seconds: float) -> float:
        """Until a newcomer that takes `seconds` on its own is computed."""
        own = self.of(input_class) + seconds
        return own + min(own, self._seconds[_OTHER[input_class]])

    def _pass_time(self) -> None:
        now = self._clock()
        passed, self._at = now - self._at, now
        short, long = self._seconds[SHORT], self._seconds[LONG]
        half = passed / 2
        if short <= half:
            self._seconds[SHORT], self._seconds[LONG] = 0.0, max(0.0, long - (passed - short))
        elif long <= half:
            self._seconds[SHORT], self._seconds[LONG] = max(0.0, short - (passed - long)), 0.0
        else:
            self._seconds[SHORT], self._seconds[LONG] = short - half, long - half
