"""The decode worker's end: hands out reservations and lets links fill them.

One thread a link reads frames in order. For each Put: find the reservation by its token, let it check the claim and the
positions, let the link put the payload where the reservation says, verify. Whatever concerns one push is answered with
Refused and ends that push only; whatever is no frame closes the link and ends what the link had claimed.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvtransfer import handshake, lease, transports, wire
from kvtransfer.digest import row_checksums
from kvtransfer.lease import Heartbeats, PeerSilent
from kvtransfer.memory import SharedMemory
from kvtransfer.metrics import ABORTED, MAX_PEER_CHARS, LinkMetrics, NoMetrics, TransferMetrics, error_name, host_of
from kvtransfer.region import Region, check_regions
from kvtransfer.reservation import Commit, Reservation
from kvtransfer.reservation_table import ReservationTable
from kvtransfer.target import MAX_POSITIONS, Target
from kvtransfer.transports import Link, Listener, Transport
from kvtransfer.writers import Writers
from twinpool.errors import (
    ConfigError,
    Incompatible,
    InvalidRequest,
    Overloaded,
    PeerLost,
    ReservationGone,
    TransferFailed,
    Unauthenticated,
)

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_LINKS = 1024
REPLY_TIMEOUT_S = 5.0  # a sender that takes no answer for this long is cut off
CLOSE_TIMEOUT_S = 5.0
CLAIM_WITHIN_S = 10.0  # or a lease, if that is longer: for a target to reach its sender and that one's claim to come
FENCE_POLL_S = 0.5  # how often a link that waits for its sender's end looks whether the receiver was closed


class KvReceiver:
    """Thread safe. Serves between `start` and `close`; `endpoint` is known after `start`."""

    def __init__(
        self,
        regions: Sequence[Region],
        *,
        fingerprint: str,
        cluster_key: str = "",
        transport: str = transports.AUTO,
        options: transports.Options = transports.NO_OPTIONS,
        memory: SharedMemory | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        max_reservations: int = 4096,
        lease_s: float = lease.LEASE_S,
        claim_within_s: float | None = None,
        metrics: TransferMetrics | None = None,
    ) -> None:
        """fingerprint: of everything both sides must agree on; senders with another are refused.

        transport: a name, or "auto" for all that this process can offer; memory: what the regions lie in, for "shm".
        advertise: host, or host:port, under which senders reach this process (default: where it listens).
        lease_s: a sender that is silent for longer is lost (or for less, if the sender says so): 0.1 to 600.
        claim_within_s: a reservation that no sender has claimed by then expires (default: CLAIM_WITHIN_S).
        """
        self.endpoints: tuple[str, ...] = ()  # best first
        self._regions = check_regions(regions)
        self._num_rows = {region.group: region.num_rows for region in self._regions}
        self._party = handshake.Party(
            fingerprint=fingerprint, regions=self._regions, cluster_key=cluster_key, lease_s=lease.check(lease_s)
        )
        self._claim_within_s = max(CLAIM_WITHIN_S, lease_s) if claim_within_s is None else claim_within_s
        self._incarnation = secrets.token_bytes(wire.INCARNATION_BYTES)
        self._is_auto = transport == transports.AUTO
        self._transports = transports.choose(transport, options)
        self._memory = memory
        self._address = (host, port, advertise)
        self._metrics = metrics or NoMetrics()
        self._link_metrics: dict[Link, LinkMetrics] = {}  # of links through their handshake
        self._name = ""
        self._table = ReservationTable(max_reservations)
        self._links: dict[Link, threading.Thread] = {}
        self._links_lock = threading.Lock()
        self._writers = Writers()
        self._heartbeats = Heartbeats()
        self._listeners: list[Listener] = []
        self._closed = False

    def start(self) -> None:
        """Raises ConfigError when the address cannot be listened on, or the transport asked for cannot serve."""
        if not self._party.cluster_key and self._address[0] not in LOOPBACK:
            log.warning("KV transfers on %s are open to everybody who can connect: set a cluster key", self._address[0])
        try:
            for name, transport in self._transports.items():
                self._listen(name, transport, self._address_of(name))
        except ConfigError:
            self._close_listeners()
            for transport in self._transports.values():
                transport.close()
            raise
        self.endpoints = tuple(listener.endpoint for listener in self._listeners)
        log.info("KV rows are received at %s", ", ".join(self.endpoints))
        self._table.start()
        self._heartbeats.start()

    def _address_of(self, name: str) -> tuple[str, int, str | None]:
        """The last transport gets the port; those that `auto` offers besides take free ones."""
        host, port, advertise = self._address
        if name == next(reversed(self._transports)):
            return host, port, advertise
        return host, 0, advertise and re.sub(r"(?<![:\[]):\d+$", "", advertise)

    def _listen(self, name: str, transport: Transport, address: tuple[str, int, str | None]) -> None:
        try:
            transport.register(self._regions, self._memory)
            self._listeners.append(transport.listen(*address, partial(self._accept, name)))
        except ConfigError as exc:
            if not self._is_auto or name == transports.PREFERENCE[-1]:
                raise
            log.info("KV transport %r is not offered: %s", name, exc)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    def introduce_as(self, name: str) -> None:
        """What senders call this receiver in their metrics, from its next reservation on; until then: its host."""
        self._name = name[:MAX_PEER_CHARS]

    def close(self) -> None:
        """Ends every link, thread and reservation (on_failed is called for live ones). Bounded; idempotent."""
        with self._links_lock:
            if self._closed:
                return
            self._closed = True
        self._close_listeners()
        with self._links_lock:
            links = dict(self._links)
        for link in links:
            link.cut()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in links.values():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        self._heartbeats.close()
        self._table.close()
        for transport in self._transports.values():
            transport.close()

    def reserve(
        self,
        *,
        request_id: str,
        attempt: int,
        rows: Mapping[str, Sequence[int]],
        timeout_s: float,
        on_commit: Callable[[Commit], None],
        on_failed: Callable[[TransferFailed], None],
        on_fenced: Callable[[], None] = lambda: None,
        expected_from: Mapping[str, int] | None = None,
        tokens: Mapping[str, int] | None = None,
    ) -> Reservation:
        """Sets `rows` aside for one push of this request and attempt: `timeout_s` seconds, less if nobody claims it.

        rows: for every group the row ids in order of absolute position in the sequence.
        expected_from: for a group the first position that has to come (default 0); rows below it hold their data
        already and are never written.
        tokens: for a group whose rows have a layout, how many tokens they hold in all (default: as many as fit);
        senders with other block sizes put theirs accordingly.
        on_fenced: called once, if ever, after a `release` that returned False.
        Raises Overloaded when too many are open, InvalidRequest for an id that cannot travel, ValueError for rows that
        do not exist.
        """
        if not 0 < len(request_id) <= wire.MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(
                f"a request id has 1 to {wire.MAX_REQUEST_ID_CHARS} characters, not {len(request_id)}",
                field="request_id",
            )
        first = dict(expected_from or {})
        self._check_rows(rows, first)
        self._check_tokens(rows, tokens or {})
        reservation = Reservation(
            regions=self._regions,
            request_id=request_id,
            attempt=attempt,
            rows={group: tuple(ids) for group, ids in rows.items()},
            expected_from=first,
            tokens=tokens or {},
            timeout_s=timeout_s,
            claim_within_s=self._claim_within_s,
            on_commit=on_commit,
            on_failed=on_failed,
            on_fenced=on_fenced,
            forget=self._table.forget,
            metrics=self._metrics,
        )
        reservation.target = Target(
            endpoints=self.endpoints,
            incarnation=self._incarnation,
            token=reservation.token,
            request_id=request_id,
            attempt=attempt,
            spans=reservation.spans(),
            name=self._name,
        ).encode()
        self._table.add(reservation)
        return reservation

    @property
    def num_reservations(self) -> int:
        """Reservations that are neither committed, failed nor released."""
        return len(self._table)

    @property
    def num_writers(self) -> int:
        """Pushes that may be writing into this process' memory by themselves."""
        return len(self._writers)

    def _check_rows(self, rows: Mapping[str, Sequence[int]], first: Mapping[str, int]) -> None:
        for group, ids in rows.items():
            if group not in self._num_rows:
                raise ValueError(f"no region belongs to group {group!r}")
            if len(ids) > MAX_POSITIONS:
                raise ValueError(f"{len(ids)} rows of group {group!r}; one reservation has at most {MAX_POSITIONS}")
            if len(set(ids)) != len(ids) or (ids and not 0 <= min(ids) <= max(ids) < self._num_rows[group]):
                raise ValueError(f"rows of group {group!r} must be distinct and below {self._num_rows[group]}")
        for group, position in first.items():
            if not 0 <= position <= len(rows.get(group, ())):
                raise ValueError(f"expected_from[{group!r}] is {position}, beyond the {len(rows.get(group, ()))} rows")

    def _check_tokens(self, rows: Mapping[str, Sequence[int]], tokens: Mapping[str, int]) -> None:
        for group, count in tokens.items():
            block = next((each.layout.tokens for each in self._regions if each.group == group and each.layout), None)
            size = len(rows.get(group, ()))
            if block is None or -(-count // block) != size:
                raise ValueError(f"{count} tokens do not take {size} rows of group {group!r}, which hold {block} each")

    def _accept(self, transport: str, link: Link) -> None:
        thread = threading.Thread(
            target=self._serve, args=(transport, link), name=f"kv-receive {link.peer}", daemon=True
        )
        with self._links_lock:
            if self._closed or len(self._links) >= MAX_LINKS:
                log.warning("refusing a KV link from %s: %d are open", link.peer, len(self._links))
                self._refused(transport, link, Overloaded.__name__)
                link.close()
                return
            self._links[link] = thread
            try:
                thread.start()
            except RuntimeError:  # the process has no thread left
                log.exception("cannot serve the KV link from %s", link.peer)
                del self._links[link]
                link.close()

    def _serve(self, transport: str, link: Link) -> None:
        reason, error = "the link was closed", None
        try:
            deadline = time.monotonic() + handshake.TIMEOUT_S
            name, lease_s = handshake.admit(link, self._party, incarnation=self._incarnation, deadline=deadline)
            self._link_metrics[link] = self._metrics.link(transport, name or host_of(link.peer))
            link.share(deadline=deadline)
            link.agree(lease_s)
            self._heartbeats.add(link)
            while True:
                self._handle(link, link.receive())
        except PeerSilent as exc:
            reason, error = exc.message, error_name(exc)
            self._link_metrics[link].lease_lost()
            log.warning("%s", reason)
        except PeerLost as exc:  # an idle link is closed without a word
            reason = exc.message
        except (wire.Malformed, Unauthenticated, Incompatible, TransferFailed) as exc:
            reason, error = f"link from {link.peer} refused: {exc}", error_name(exc)
            self._refused(transport, link, error)
            log.warning("%s", reason)
        except Exception as exc:
            reason, error = f"the receiver failed on the link from {link.peer}", error_name(exc)
            log.exception("%s", reason)
        finally:
            self._table.lose(link, reason)
            self._heartbeats.remove(link)
            link.cut()
            if link in self._link_metrics:
                self._link_metrics[link].down(error)
            self._wait_for_fence(link)
            if link in self._link_metrics:
                self._link_metrics.pop(link).forget()
            with self._links_lock:
                self._links.pop(link, None)
            link.close()

    def _refused(self, transport: str, link: Link, error: str) -> None:
        """Counts a link that was turned away, with whoever it is if that has been proved."""
        known = self._link_metrics.get(link)
        if known is not None:
            known.refused(error)
            return
        stranger = self._metrics.link(transport, host_of(link.peer), stranger=True)
        stranger.refused(error)
        stranger.down(error)
        stranger.forget()

    def _wait_for_fence(self, link: Link) -> None:
        while not link.fenced(FENCE_POLL_S):
            if self._closed:
                return  # what is in quarantine stays there for the rest of this process
        self._writers.gone(link)

    def _handle(self, link: Link, frame: wire.Frame) -> None:
        message = frame.message
        if isinstance(message, wire.Put):
            self._put(link, message, frame.payload_bytes)
        elif isinstance(message, wire.Commit):
            self._commit(link, message, frame.payload_bytes)
        elif isinstance(message, wire.Abort):
            self._abort(link, message)
        elif isinstance(message, wire.Claim):
            self._take_claim(link, message)
        elif not isinstance(message, wire.Heartbeat):
            raise wire.Malformed(f"{type(message).__name__} where rows were expected")

    def _put(self, link: Link, put: wire.Put, payload_bytes: int) -> None:
        num_rows = len(put.positions) // 4
        num_bytes = num_rows * self._regions[put.region].row_bytes if put.region < len(self._regions) else -1
        expected = 0 if put.checksums else num_rows * wire.CHECKSUM_BYTES
        written = bool(put.checksums) or (link.one_sided and link.checksums_follow)  # else the rows are in band
        if num_bytes < 0 or written != link.one_sided or payload_bytes != expected + (0 if written else num_bytes):
            raise wire.Malformed(f"Put of {num_rows} rows of region {put.region} with {payload_bytes} bytes")
        reservation, taken = None, False

        def take(rows: Sequence[memoryview]) -> tuple[Sequence[int], Sequence[int]]:
            nonlocal taken
            arrived = (row_checksums(rows), wire.unpack_u64(put.checksums)) if put.checksums else link.fill_rows(rows)
            taken = True
            return arrived

        try:
            reservation = self._claimed(link, put)
            reservation.land(put, take)
        except PeerLost:
            raise  # the link itself broke
        except TransferFailed as exc:
            if not taken:
                link.skip(payload_bytes)
            self._end(link, put.push, reservation, exc)
        else:
            self._link_metrics[link].moved(num_rows, num_bytes)

    def _commit(self, link: Link, commit: wire.Commit, payload_bytes: int) -> None:
        note = memoryview(bytearray(payload_bytes))
        link.fill([note] if payload_bytes else [])
        reservation = None
        try:
            reservation = self._claimed(link, commit)
            reservation.commit(link, commit, bytes(note))
        except TransferFailed as exc:
            self._end(link, commit.push, reservation, exc)
        else:
            self._writers.done(link, commit.push)
            link.send(wire.Committed(push=commit.push), deadline=time.monotonic() + REPLY_TIMEOUT_S)

    def _abort(self, link: Link, abort: wire.Abort) -> None:
        self._writers.done(link, abort.push)
        try:
            reservation = self._claimed(link, abort)
        except ReservationGone:
            return  # over already: what an abort is for
        reservation.fail(TransferFailed(f"the sender gave up: {abort.reason}"), reported=ABORTED)

    def _take_claim(self, link: Link, claim: wire.Claim) -> None:
        """Binds a reservation to its sender, and tells one that writes by itself where to."""
        try:
            reservation = self._claimed(link, claim)
            if not link.one_sided:
                return
            self._writers.add(link, claim.push, reservation)
            granted = reservation.grant()
        except TransferFailed as exc:
            self._end(link, claim.push, None, exc)
            return
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        for group, rows in granted.items():
            for first in range(0, len(rows), wire.MAX_ROWS_PER_GRANT):
                some = wire.pack_u32(rows[first : first + wire.MAX_ROWS_PER_GRANT])
                link.send(wire.Granted(push=claim.push, group=group, rows=some), deadline=deadline)

    def _claimed(self, link: Link, message: wire.Claim | wire.Put | wire.Commit | wire.Abort) -> Reservation:
        reservation = self._table.find(message.token)
        reservation.claim(link, message, self._link_metrics[link])
        return reservation

    def _end(self, link: Link, push: int, reservation: Reservation | None, error: TransferFailed) -> None:
        """Ends one push; `reservation` is None when the push never had a right to one."""
        if reservation is not None:
            reservation.fail(error)
        self._link_metrics[link].refused(error_name(error))
        link.send(handshake.refused(push, error), deadline=time.monotonic() + REPLY_TIMEOUT_S)
