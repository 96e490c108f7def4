"""Leases: how long one end of a link may be silent before the other takes it for dead.

Both ends send a Heartbeat whenever they have sent nothing else for a third of the lease; bytes of any frame say the
same. The shorter of what the two ends were told holds for their link. Heartbeats come from the threads of the links, so
that a busy device says nothing about death, and a frozen process says nothing at all.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from twinpool.errors import PeerLost

if TYPE_CHECKING:
    from kvtransfer.transports import Link

log = logging.getLogger(__name__)

LEASE_S = 6.0
MIN_LEASE_MS, MAX_LEASE_MS = 100, 600_000
BEATS = 3  # heartbeats in a lease: two may be late


class PeerSilent(PeerLost):
    """The peer's lease is over. Inside this package only: everybody else gets PeerLost."""

    @classmethod
    def after(cls, peer: str, lease_s: float) -> PeerSilent:
        return cls(f"{peer} was silent for {lease_s:g} s, its lease: it is frozen, or cannot be reached")


def check(lease_s: float) -> float:
    """Raises ValueError for a lease that cannot be agreed on."""
    if not MIN_LEASE_MS <= 1000 * lease_s <= MAX_LEASE_MS:
        raise ValueError(f"a lease of {lease_s:g} s; {MIN_LEASE_MS / 1000:g} to {MAX_LEASE_MS / 1000:g} s are allowed")
    return lease_s


class Heartbeats:
    """The receiver's: one thread that sends them on all its links, whose own threads wait for rows."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # held while a beat goes out, so that no link is closed under it
        self._due: dict[Link, float] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, link: Link) -> None:
        with self._changed:
            self._due[link] = 0.0
            self._changed.notify()

    def remove(self, link: Link) -> None:
        """Nothing is sent on `link` after this. Idempotent."""
        with self._changed:
            self._due.pop(link, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for link in [link for link, due in self._due.items() if due <= now]:
                    self._beat(link, now)
                wait_s = min(self._due.values(), default=math.inf) - time.monotonic()
                self._changed.wait(min(max(0.0, wait_s), threading.TIMEOUT_MAX))

    def _beat(self, link: Link, now: float) -> None:
        try:
            link.beat()
        except PeerLost:
            del self._due[link]  # its own thread learns that too
        except Exception:
            log.exception("cannot send a heartbeat to %s", link.peer)
            del self._due[link]
        else:
            self._due[link] = now + link.lease_s / BEATS
