"""The prefill worker's end: opens pushes, one link a receiver."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvtransfer import handshake, transports
from kvtransfer.faults import Faults
from kvtransfer.metrics import NoMetrics, TransferMetrics
from kvtransfer.outbound import Outbound
from kvtransfer.push import Push
from kvtransfer.region import Region, check_regions
from kvtransfer.target import Target
from kvtransfer.transports import Link, Transport
from twinpool.errors import PeerLost, ReservationGone, TransferFailed

CONNECT_TIMEOUT_S = 3.0  # connection and handshake
CLOSE_TIMEOUT_S = 5.0


class KvSender:
    """Thread safe. Links are made when first needed, shared by all pushes to one receiver, and closed when idle."""

    def __init__(
        self,
        regions: Sequence[Region],
        *,
        fingerprint: str,
        cluster_key: str = "",
        metrics: TransferMetrics | None = None,
        faults: Faults | None = None,
    ) -> None:
        """faults: to inject, for tests of what happens around a transfer that goes wrong (kvtransfer/faults.py)."""
        self._regions = check_regions(regions)
        self._party = handshake.Party(fingerprint=fingerprint, regions=self._regions, cluster_key=cluster_key)
        self._metrics = metrics or NoMetrics()
        self._transports: dict[str, Transport] = {"tcp": transports.create("tcp")}
        for transport in self._transports.values():
            transport.register(self._regions)
        self._faults = faults
        self._lock = threading.Lock()
        self._links: dict[tuple[str, bytes], Outbound] = {}  # one to each incarnation of a receiver
        self._closed = False

    def open(self, target: bytes, *, request_id: str, attempt: int, timeout_s: float) -> Push:
        """Begins the push that `target` (Reservation.target) allows; it has to be acknowledged within `timeout_s`.

        Does not wait: the link is made in the background, and what goes wrong with it ends the push.
        Raises InvalidRequest for bytes that are no target, ReservationGone for another request's or attempt's.
        """
        deadline = time.monotonic() + timeout_s
        wanted = Target.decode(target)
        if (wanted.request_id, wanted.attempt) != (request_id, attempt):
            raise ReservationGone(
                f"the target is for request {wanted.request_id!r}, attempt {wanted.attempt}, "
                f"not for {request_id!r}, attempt {attempt}"
            )
        endpoint, transport = self._choose(wanted)
        key = (endpoint, wanted.incarnation)
        with self._lock:
            if self._closed:
                raise TransferFailed("the sender is closed")
            link = self._links.get(key)
            push = link.open(wanted, deadline) if link is not None else None
            if push is not None:
                return push
            link = self._new_link(endpoint, wanted.incarnation, transport, deadline)
            push = link.start(wanted, deadline)
            self._links[key] = link
            return push

    def close(self) -> None:
        """Fails every open push and ends every link and thread. Bounded; idempotent."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            link.close()
        end = time.monotonic() + CLOSE_TIMEOUT_S + CONNECT_TIMEOUT_S
        for link in links:
            link.join(max(0.0, end - time.monotonic()))

    def _choose(self, target: Target) -> tuple[str, Transport]:
        for endpoint in target.endpoints:
            transport = self._transports.get(endpoint.partition("://")[0])
            if transport is not None:
                return endpoint, transport
        raise PeerLost(
            f"the receiver is reached by {', '.join(target.endpoints)}; this sender has {', '.join(self._transports)}"
        )

    def _new_link(self, endpoint: str, incarnation: bytes, transport: Transport, deadline: float) -> Outbound:
        connect_by = min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)

        def connect() -> Link:
            link = transport.connect(endpoint, deadline=connect_by)
            try:
                handshake.greet(link, self._party, incarnation=incarnation, deadline=connect_by)
            except BaseException:
                link.close()
                raise
            return link if self._faults is None else self._faults.wrap(link)

        def forget(ended: Outbound) -> None:
            with self._lock:
                if self._links.get((endpoint, incarnation)) is ended:
                    del self._links[endpoint, incarnation]

        return Outbound(endpoint, connect, self._regions, self._metrics, forget)
