"""Who of several waiting parties is served next, so that each gets work in proportion to its weight: stride scheduling.

Every party has a virtual time: the work it was given, divided by its weight. The one with the least goes next. A party
that was away comes back at the virtual time of those who are there, so that it can neither claim what it did not ask
for nor pay for having been away. One that is served alone owes nothing to those who come later.

Between two parties that both wait all the time, work / weight differs by no more than the largest piece of work of
either divided by its weight, whatever pieces they bring (Waldspurger and Weihl, 1995).
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

MOST_PARTIES = 4096  # remembered; beyond, the half with the smallest debts is forgiven


class FairShare:
    """Virtual times by party. It does not know who waits: `first` is told."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._now = 0.0  # virtual time of the last party served; nobody who comes back starts before it

    def __len__(self) -> int:
        return len(self._times)

    def first(self, waiting: Iterable[str]) -> str:
        """Who of `waiting` (at least one) is next; among equals the first named."""
        return min(waiting, key=self._time)

    def charge(self, party: str, work: float, weight: float = 1.0) -> None:
        """`party` was served `work` (any unit, the same for all)."""
        start = self._time(party)
        self._now = max(self._now, start)
        self._times[party] = start + work / weight
        if len(self._times) > MOST_PARTIES:
            self._now = max(self._now, median(self._times.values()))
            self._times = {party: time for party, time in self._times.items() if time > self._now}

    def idle(self) -> None:
        """Nobody waits any more: who comes next finds no old debts."""
        self._times.clear()
        self._now = 0.0

    def _time(self, party: str) -> float:
        return max(self._times.get(party, 0.0), self._now)
