"""The live reservations of one receiver, by token, and the thread that ends those whose time is over."""

from __future__ import annotations

import math
import threading
import time

from kvtransfer.reservation import Reservation
from kvtransfer.transports import Link
from twinpool.errors import Overloaded, ReservationGone, TransferFailed


class ReservationTable:
    def __init__(self, max_reservations: int) -> None:
        self._max = max_reservations
        self._by_token: dict[bytes, Reservation] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._wakes_at = math.inf
        self._thread = threading.Thread(target=self._expire, name="kv-expiry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def __len__(self) -> int:
        return len(self._by_token)

    def add(self, reservation: Reservation) -> None:
        """Makes it findable. Overloaded when the table is full."""
        with self._changed:
            if len(self._by_token) >= self._max or self._closed:
                raise Overloaded(
                    f"{len(self._by_token)} KV reservations are open and no more are taken", retry_after_s=1
                )
            self._by_token[reservation.token] = reservation
            if reservation.expires_at < self._wakes_at:
                self._changed.notify()

    def find(self, token: bytes) -> Reservation:
        reservation = self._by_token.get(token)
        if reservation is None:
            raise ReservationGone("the reservation is unknown, used, expired or released")
        return reservation

    def forget(self, reservation: Reservation) -> None:
        self._by_token.pop(reservation.token, None)

    def lose(self, link: Link, reason: str) -> None:
        for reservation in list(self._by_token.values()):
            reservation.lose(link, reason)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        for reservation in list(self._by_token.values()):
            reservation.fail(TransferFailed("the receiver was closed"))

    def _expire(self) -> None:
        while not self._closed:
            now = time.monotonic()
            for reservation in list(self._by_token.values()):
                reservation.expire(now)
            with self._changed:
                self._wakes_at = min((r.expires_at for r in list(self._by_token.values())), default=math.inf)
                if not self._closed:
                    wait_s = max(0.0, self._wakes_at - time.monotonic())
                    self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
