"""What a prefill worker still has to compute before a new prompt is done, as seconds of its device.

A worker gives half of each step to short and half to long inputs as long as both wait (prefill/scheduler.py): so a
newcomer waits for those of its own class, and for the other class as long as that has something, at half speed. A short
one waits for whole steps, though: for the rest of the one that runs, and for all of its own, which long inputs fill up.

Long inputs shrink as time passes. A short one is computed in a step or two, and is all there until it is done: to take
it for half done would send the next short ones after it.

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
        least = self._claimed[SHORT] if input_class == SHORT else 0.0
        return max(self._seconds[input_class], least)

    @property
    def total(self) -> float:
        return self.of(SHORT) + self.of(LONG)

    def until_done(self, input_class: str, seconds: float, beside_long_s: float = 0.0) -> float:
        """Until a newcomer that takes `seconds` on its own is computed.

        beside_long_s: what steps full of long inputs were seen to add to a short one.
        """
        own = self.of(input_class) + seconds
        other = max(own, beside_long_s) if input_class == SHORT else own
        return own + min(other, self.of(_OTHER[input_class]))

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
