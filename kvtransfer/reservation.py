"""Reservations: rows set aside for one push, and the rule that nobody else ever writes them.

    OPEN ──claim of a sender────────> CLAIMED ──commit verified──> COMMITTED ──┐
      │                                  │                                     ├──release()──> RELEASED
      └──expiry, abort, wrong data, link lost──> FAILED ───────────────────────┘

A token opens its reservation once, for one push on one link; another that shows it is refused, whoever it is. Nobody
holds an OPEN one, so it expires soon; a CLAIMED one lives as long as its request, and as its sender's lease. Where the
receiver does the writing, bytes land only while the state is OPEN or CLAIMED; `release` moves it on first and then
waits for the frame that may be landing. Where the sender does (one-sided links), `release` tells it to stop and waits
for its word; without it the rows are in quarantine until the word comes or the sender is gone (writers.py).
"""

from __future__ import annotations

import enum
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtransfer import wire
from kvtransfer.digest import Manifest, commit_context, in_a_row, lowest_and_highest
from kvtransfer.handshake import refused
from kvtransfer.metrics import RELEASED, LinkMetrics, TransferMetrics, error_name
from kvtransfer.region import Region
from kvtransfer.target import Span
from kvtransfer.transports import Link
from twinpool.errors import (
    ChecksumMismatch,
    Internal,
    PeerLost,
    ReservationGone,
    TransferFailed,
    TransferTimeout,
)

log = logging.getLogger(__name__)

_T = TypeVar("_T")

FENCE_WAIT_S = 0.25  # how long release() lets a frame in flight finish before it cuts the link
CUT_WAIT_S = 5.0  # a cut link ends its read at once; longer means a bug
REVOKE_TIMEOUT_S = 0.25  # for telling a sender to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A complete, verified transfer."""

    note: bytes  # the sender's, opaque
    bytes: int  # payload that travelled for it
    rows: int
    seconds: float  # first rows to commit


class _State(enum.Enum):
    OPEN = enum.auto()
    CLAIMED = enum.auto()
    COMMITTED = enum.auto()
    FAILED = enum.auto()
    RELEASED = enum.auto()


_LIVE = (_State.OPEN, _State.CLAIMED)


class Reservation:
    """One request's rows, waiting for one push. Made by KvReceiver.reserve; thread safe.

    `target` is what the sender needs. Exactly one of on_commit and on_failed is called, once, on a transfer thread and
    without locks, unless `release` comes first. The rows may be reused only when `release` returned True, or else when
    on_fenced was called.
    """

    def __init__(
        self,
        *,
        regions: Sequence[Region],
        request_id: str,
        attempt: int,
        rows: Mapping[str, tuple[int, ...]],
        expected_from: Mapping[str, int],
        tokens: Mapping[str, int],
        timeout_s: float,
        claim_within_s: float,
        on_commit: Callable[[Commit], None],
        on_failed: Callable[[TransferFailed], None],
        on_fenced: Callable[[], None],
        forget: Callable[[Reservation], None],
        metrics: TransferMetrics,
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.token = secrets.token_bytes(wire.TOKEN_BYTES)
        self._deadline = time.monotonic() + timeout_s
        self._claim_by = time.monotonic() + claim_within_s
        self.target = b""  # set by KvReceiver
        self._timeout_s = timeout_s
        self._claim_within_s = claim_within_s
        self._regions = regions
        self._rows = rows
        self._first = expected_from
        self._tokens = tokens
        self._on_commit = on_commit
        self._on_failed = on_failed
        self._on_fenced = on_fenced
        self._forget = forget
        self._metrics = metrics
        self._lock = threading.Condition()
        self._state = _State.OPEN
        self._claim: tuple[Link, int] | None = None  # link and push that own it
        self._link_metrics: LinkMetrics | None = None  # of that link
        self._claimed_at = 0.0
        self._began_at = 0.0  # first frame of rows
        self._landing = False  # a frame's bytes may be entering the rows
        self._granted = False  # a sender may be writing the rows by itself
        self._quarantined = False  # released while it might
        self._num_bytes = 0
        self._manifest = Manifest(len(rows.get(region.group, ())) for region in regions)

    @property
    def expires_at(self) -> float:
        """When its time is over: soon, until a sender has claimed it."""
        return min(self._deadline, self._claim_by) if self._state is _State.OPEN else self._deadline

    def spans(self) -> dict[str, Span]:
        return {
            group: Span(first=self._first.get(group, 0), size=len(rows), tokens=self._tokens.get(group, 0))
            for group, rows in self._rows.items()
        }

    def release(self) -> bool:
        """Gives the rows back to their owner. True: no byte of this reservation can land any more.

        False: the sender writes by itself and did not confirm in time that it has stopped. The rows stay in quarantine;
        on_fenced is called once, from a transfer thread, when they are safe.
        Idempotent. Waits for a frame in flight at most FENCE_WAIT_S, then cuts that link. No other callback begins
        after it.
        """
        with self._lock:
            was_claimed = self._state is _State.CLAIMED
            self._state = _State.RELEASED
            self._forget(self)
            claim, granted = self._claim, self._granted
            is_quarantined = self._quarantined and granted
        if was_claimed:
            self._report_end(RELEASED)
        if claim is None or is_quarantined:
            return claim is None
        if granted:
            self._revoke(*claim)
            return self._fenced_soon(claim[0])
        self._wait_for_landing(claim[0])
        return True

    def _revoke(self, link: Link, push: int) -> None:
        """Tells the sender to stop. It answers with Abort."""
        try:
            error = ReservationGone("the reservation was released")
            link.send(refused(push, error), deadline=time.monotonic() + REVOKE_TIMEOUT_S)
        except PeerLost:
            pass  # its end fences
        except TransferTimeout:
            link.cut()  # the frame may be torn; and who takes no answers is of no use

    def _fenced_soon(self, link: Link) -> bool:
        with self._lock:
            if self._lock.wait_for(lambda: not self._granted, FENCE_WAIT_S):
                return True
            self._quarantined = True
            self._count_quarantined(1)
        log.warning(
            "the rows of request %r are in quarantine: %s does not confirm that it has stopped writing",
            self.request_id,
            link.peer,
        )
        return False

    def _wait_for_landing(self, link: Link) -> None:
        with self._lock:
            if self._lock.wait_for(lambda: not self._landing, FENCE_WAIT_S):
                return
            log.warning("cutting the KV link to %s: its frame for a released reservation does not end", link.peer)
            link.cut()
            if not self._lock.wait_for(lambda: not self._landing, CUT_WAIT_S):
                raise Internal("a KV frame still lands after its link was cut: the rows must not be used again")

    def fence(self) -> None:
        """The sender writes no more."""
        with self._lock:
            self._granted = False
            self._lock.notify_all()
            if not self._quarantined:
                return
            self._quarantined = False
            self._count_quarantined(-1)
        log.info("the rows of request %r are out of quarantine", self.request_id)
        try:
            self._on_fenced()
        except Exception:
            log.exception("the owner of a KV reservation raised from its callback")

    def grant(self) -> dict[str, tuple[int, ...]]:
        """The rows that the sender is to write, for every group in order of position. It may do so from now on."""
        with self._lock:
            if self._state is not _State.CLAIMED:
                raise ReservationGone("the reservation is over")
            self._granted = True
        return {group: rows[self._first.get(group, 0) :] for group, rows in self._rows.items()}

    def _count_quarantined(self, sign: int) -> None:
        if self._link_metrics is not None:
            self._link_metrics.quarantined(sign, sign * sum(map(len, self._rows.values())))

    def claim(
        self, link: Link, message: wire.Claim | wire.Put | wire.Commit | wire.Abort, metrics: LinkMetrics
    ) -> None:
        """Binds the reservation to the push of its first frame, on a link with these metrics.

        ReservationGone for any other.
        """
        with self._lock:
            if message.request_id != self.request_id or message.attempt != self.attempt:
                raise ReservationGone("the reservation belongs to another request or attempt")
            if self._state is _State.OPEN:
                self._state = _State.CLAIMED
                self._claim = (link, message.push)
                self._claimed_at = time.monotonic()
                self._link_metrics = metrics
                metrics.began(self.attempt)
            elif self._state is not _State.CLAIMED:
                raise ReservationGone("the reservation is over")
            elif self._claim != (link, message.push):
                raise ReservationGone("the reservation is in use by another push")

    def land(self, put: wire.Put, take: Callable[[Sequence[memoryview]], tuple[Sequence[int], Sequence[int]]]) -> None:
        """Has `take` put the rows of `put` where they belong; it returns their checksums there and as sent.

        Raises TransferFailed before anything is written when the rows are not expected, ReservationGone when the
        reservation ended meanwhile, ChecksumMismatch when other bytes arrived than were sent.
        """
        region = self._regions[put.region]
        positions = in_a_row(wire.unpack_u32(put.positions))
        with self._lock:
            if self._state is not _State.CLAIMED:
                raise ReservationGone("the reservation is over")
            rows = self._rows_at(region, put.region, positions)
            self._began_at = self._began_at or time.monotonic()
            self._landing = True
        try:
            landed, checksums = take(region.rows(rows))
            if list(landed) != list(checksums):
                damaged = next(each[0] for each in zip(positions, landed, checksums, strict=True) if each[1] != each[2])
                raise ChecksumMismatch(
                    f"row {damaged} of region {region.name!r} of request {self.request_id!r} arrived damaged"
                )
            self._manifest.add(put.region, positions, checksums)
            self._num_bytes += len(rows) * region.row_bytes
        finally:
            with self._lock:
                self._landing = False
                self._lock.notify_all()

    def _rows_at(self, region: Region, index: int, positions: Sequence[int]) -> Sequence[int]:
        rows = self._rows.get(region.group, ())
        first = self._first.get(region.group, 0)
        low, high = lowest_and_highest(positions)
        if low < first or high >= len(rows):
            raise TransferFailed(
                f"positions {low} to {high} of region {region.name!r} were sent "
                f"where {first} to {len(rows) - 1} are expected"
            )
        repeated = self._manifest.first_repeated(index, positions)
        if repeated is not None:
            raise TransferFailed(f"position {repeated} of region {region.name!r} was sent twice")
        if isinstance(positions, range):
            return rows[positions.start : positions.stop]
        return [rows[position] for position in positions]

    def commit(self, link: Link, message: wire.Commit, note: bytes) -> None:
        """Checks that everything arrived exactly once and unchanged, then tells the owner. Raises what is wrong."""
        self._check_complete(message, note)
        with self._lock:
            if self._state is not _State.CLAIMED:
                raise ReservationGone("the reservation is over")
            self._state = _State.COMMITTED
            self._granted = False  # a sender commits after its last write
            self._forget(self)
            now = time.monotonic()
            seconds = now - (self._began_at or now)
        done = Commit(note=note, bytes=self._num_bytes, rows=sum(self._manifest.counts()), seconds=seconds)
        if self._link_metrics is not None:
            self._link_metrics.finished(seconds, None)
        _call(self._on_commit, done)

    def _check_complete(self, message: wire.Commit, note: bytes) -> None:
        counts = self._manifest.counts()
        if list(wire.unpack_u32(message.counts)) != counts:
            raise TransferFailed(f"the sender committed other row counts than the {sum(counts)} rows that arrived")
        for index, region in enumerate(self._regions):
            missing = self._manifest.first_missing(index, self._first.get(region.group, 0))
            if missing is not None:
                raise TransferFailed(f"position {missing} of region {region.name!r} never arrived")
        if message.digest != self._manifest.digest(commit_context(self.request_id, self.attempt, note)):
            raise ChecksumMismatch(f"the digest of request {self.request_id!r} does not fit the rows that arrived")

    def fail(self, error: TransferFailed, *, only_in: tuple[_State, ...] = _LIVE, reported: str = "") -> bool:
        """Ends it, if it is live, and tells the owner. The owner still has to release it.

        reported: what metrics call the error, if not by its class.
        """
        with self._lock:
            if self._state not in only_in:
                return False
            self._state = _State.FAILED
            self._forget(self)
        self._report_end(reported or error_name(error))
        _call(self._on_failed, error)
        return True

    def _report_end(self, error: str) -> None:
        if self._link_metrics is not None:
            self._link_metrics.finished(time.monotonic() - self._claimed_at, error)

    def expire(self, now: float) -> None:
        """Ends it if its time is over."""
        rows = f"the KV rows of request {self.request_id!r}, attempt {self.attempt}"
        cause = "unclaimed" if self._claim is None else "late"
        if self._deadline <= now:
            expired = self.fail(TransferTimeout(f"{rows}, did not arrive in {self._timeout_s:g} s"))
        elif self._claim_by <= now:
            unclaimed = TransferTimeout(f"no prefill worker claimed {rows}, in {self._claim_within_s:g} s")
            expired = self.fail(unclaimed, only_in=(_State.OPEN,))
        else:
            return
        if expired:
            self._metrics.expired(cause)

    def lose(self, link: Link, reason: str) -> None:
        """The link broke: ends the reservation if that link had claimed it."""
        if self._claim is not None and self._claim[0] is link:
            self.fail(PeerLost(reason))


def _call(callback: Callable[[_T], None], value: _T) -> None:
    """An owner's fault must not take the link, and with it other requests, down."""
    try:
        callback(value)
    except Exception:
        log.exception("the owner of a KV reservation raised from its callback")
