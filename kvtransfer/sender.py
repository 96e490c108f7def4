"""The prefill worker's end: opens pushes, one link a receiver."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvtransfer import handshake, lease, transports
from kvtransfer.mapping import LinkMapping
from kvtransfer.metrics import MAX_PEER_CHARS, NoMetrics, TransferMetrics, host_of
from kvtransfer.outbound import Outbound
from kvtransfer.push import Push
from kvtransfer.region import Region, check_regions
from kvtransfer.target import Target
from kvtransfer.transports import Link
from twinpool.errors import Incompatible, PeerLost, ReservationGone, TransferFailed

log = logging.getLogger(__name__)

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
        transport: str = transports.AUTO,
        options: transports.Options = transports.NO_OPTIONS,
        lease_s: float = lease.LEASE_S,
        metrics: TransferMetrics | None = None,
    ) -> None:
        """transport: a name, or "auto" for the first of what the receiver offers that works.

        lease_s: a receiver that is silent for longer is lost (or for less, if the receiver says so): 0.1 to 600.
        """
        self._regions = check_regions(regions)
        self._party = handshake.Party(
            fingerprint=fingerprint, regions=self._regions, cluster_key=cluster_key, lease_s=lease.check(lease_s)
        )
        self._metrics = metrics or NoMetrics()
        self._transports = transports.choose(transport, options)
        for each in self._transports.values():
            each.register(self._regions, None)
        self._lock = threading.Lock()
        self._links: dict[_Receiver, Outbound] = {}
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
        endpoints = self._usable(wanted)
        receiver = _Receiver(endpoints, wanted.incarnation, wanted.name or host_of(endpoints[-1]))
        with self._lock:
            if self._closed:
                raise TransferFailed("the sender is closed")
            link = self._links.get(receiver)
            push = link.open(wanted, deadline) if link is not None else None
            if push is not None:
                return push
            link = self._new_link(receiver, deadline)
            push = link.start(wanted, deadline)
            self._links[receiver] = link
            return push

    def introduce_as(self, name: str) -> None:
        """What receivers call this sender in their metrics, from its next link on; until then: its host."""
        self._party = replace(self._party, name=name[:MAX_PEER_CHARS])

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
        for transport in self._transports.values():
            transport.close()

    def _usable(self, target: Target) -> tuple[str, ...]:
        endpoints = tuple(each for each in target.endpoints if _scheme(each) in self._transports)
        if not endpoints:
            offered, mine = ", ".join(target.endpoints), ", ".join(self._transports)
            raise PeerLost(f"the receiver is reached by {offered}; this sender has {mine}")
        return endpoints

    def _new_link(self, receiver: _Receiver, deadline: float) -> Outbound:
        connect_by = min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)

        def connect() -> tuple[Link, str, LinkMapping | None]:
            return self._connect_best(receiver, connect_by)

        def forget(ended: Outbound) -> None:
            with self._lock:
                if self._links.get(receiver) is ended:
                    del self._links[receiver]

        return Outbound(receiver.address, receiver.name, connect, self._regions, self._metrics, forget)

    def _connect_best(self, receiver: _Receiver, deadline: float) -> tuple[Link, str, LinkMapping | None]:
        """A link over the first endpoint that works, in the receiver's order, and its transport; the log says why."""
        failures: list[PeerLost | Incompatible] = []
        for endpoint in receiver.endpoints:
            try:
                link, mapping = self._connect(endpoint, receiver.incarnation, deadline)
            except PeerLost as exc:
                failures.append(exc)
                continue
            except _CannotMap as exc:
                failures.append(Incompatible(exc.message))
                continue
            reasons = "".join(f"; {failure.message}" for failure in failures)
            log.info("KV rows for %s go over %s%s", receiver.address, _scheme(endpoint), reasons)
            if mapping is not None:
                log.info("KV rows for %s are mapped: %s", receiver.address, mapping)
            return link, _scheme(endpoint), mapping
        raise failures[-1]

    def _connect(self, endpoint: str, incarnation: bytes, deadline: float) -> tuple[Link, LinkMapping | None]:
        transport, mapping = self._transports[_scheme(endpoint)], None
        link = transport.connect(endpoint, deadline=deadline)
        try:
            shapes, lease_s = handshake.greet(link, self._party, incarnation=incarnation, deadline=deadline)
            if shapes != self._party.shapes:
                if not transport.caps.any_source:
                    raise _CannotMap(
                        f"KV transport {_scheme(endpoint)!r} sends from the cache memory only, and {link.peer} cuts "
                        "its rows differently: set the same block size and tensor-parallel size, or choose tcp or shm"
                    )
                mapping = LinkMapping(self._regions, shapes)
                link.expect([shape.row_bytes for shape in shapes])
            link.attach(deadline=deadline)
            link.agree(lease_s)
        except BaseException:
            link.close()
            raise
        return link, mapping


class _CannotMap(Incompatible):
    """This transport cannot; another may."""


@dataclass(frozen=True, slots=True)
class _Receiver:
    """Who a link is for: one incarnation of a receiver, and the ways to it that this sender has, best first."""

    endpoints: tuple[str, ...]
    incarnation: bytes
    name: str = field(compare=False)  # for metrics

    @property
    def address(self) -> str:
        """For logs: the same whichever way is taken."""
        return self.endpoints[-1]


def _scheme(endpoint: str) -> str:
    return endpoint.partition("://")[0]
