"""Who may still be writing into reserved rows, over links that do not fence (one-sided ones).

A push is here from the moment it learns its rows until it says that it writes no more (Commit, Abort) or its link's
sender is gone. A reservation that is over meanwhile stays in quarantine: its rows go to nobody until then.
"""

from __future__ import annotations

from kvtransfer.reservation import Reservation
from kvtransfer.transports import Link


class Writers:
    """The entries of a link are touched by that link's thread only."""

    def __init__(self) -> None:
        self._reservations: dict[tuple[Link, int], Reservation] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    def add(self, link: Link, push: int, reservation: Reservation) -> None:
        self._reservations[link, push] = reservation

    def done(self, link: Link, push: int) -> None:
        """This push writes no more."""
        reservation = self._reservations.pop((link, push), None)
        if reservation is not None:
            reservation.fence()

    def gone(self, link: Link) -> None:
        """Nobody writes over this link any more."""
        for owner, push in [key for key in list(self._reservations) if key[0] is link]:
            self.done(owner, push)
