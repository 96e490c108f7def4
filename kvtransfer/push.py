"""One request's rows on their way out, as the prefill worker sees them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer import wire
from kvtransfer.digest import Manifest, in_a_row, lowest_and_highest
from kvtransfer.region import Region
from kvtransfer.target import Span, Target
from twinpool.errors import TransferFailed, TwinpoolError

if TYPE_CHECKING:
    from kvtransfer.mapping import Collected
    from kvtransfer.outbound import Outbound

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """How a push ended. Times are time.monotonic()."""

    error: TwinpoolError | None  # TransferFailed, Incompatible or Unauthenticated; None: the receiver has verified all
    bytes: int  # of rows that left
    rows: int
    seconds: float  # first put to the end, with the making of the link if there was none
    first_put_at: float
    done_at: float
    transport: str  # that carried it; metrics.NONE if there never was a link
    peer: str  # what the receiver calls itself, else its host


@dataclass(frozen=True, slots=True)
class Rows:
    """Descriptor of rows that may travel; the rows themselves stay where they are until they do.

    Of a mapped push, once it is queued: both are positions, and the rows are gathered when they travel.
    """

    region: int
    positions: Sequence[int]  # a range where they follow one another: every step of the way is shorter for those
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class Note:
    """Descriptor of a commit."""

    note: bytes


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Descriptor of an end from this side."""

    error: TransferFailed


class Push:
    """Made by KvSender.open. `put` and `commit` belong to one thread, `abort` to anybody; none of them waits.

    Ends once: committed, refused, failed, timed out or aborted. `error` tells early, `on_done` of `commit` finally.
    `closed` is set when no source row is read any more, which is after the end by one frame at most.
    """

    def __init__(
        self, outbound: Outbound, target: Target, regions: Sequence[Region], number: int, deadline: float
    ) -> None:
        self.closed = threading.Event()
        self.target = target
        self.number = number  # on its link
        self.deadline = deadline
        self._outbound = outbound
        self._regions = regions
        self._lock = threading.Lock()
        self.first_put_at: float | None = None
        self._on_done: Callable[[PushResult], None] | None = None
        self._result: PushResult | None = None
        # The rest is the link thread's.
        self.manifest = Manifest(self._span(region).size for region in regions)
        self.is_committed = False  # the commit is on its way
        self.granted: dict[str, list[int]] = {group: [] for group in target.spans}  # rows of the receiver, if one-sided
        self.collected: Collected | None = None  # on a mapped link, which puts are complete
        self.num_bytes = 0
        self.num_rows = 0
        self.sending_s = 0.0  # while its rows were leaving
        self.has_begun = False  # and was reported

    @property
    def expected_from(self) -> Mapping[str, int]:
        """For every group the first position that the receiver wants; it holds what is below."""
        return {group: span.first for group, span in self.target.spans.items()}

    @property
    def error(self) -> TwinpoolError | None:
        """Why the push failed, as soon as that is known."""
        return None if self._result is None else self._result.error

    def put(self, region: int, positions: Sequence[int], rows: Sequence[int]) -> None:
        """Rows `rows` of region number `region` are final: they go to `positions` of the reservation.

        positions: in rows of this side, should the receiver's hold more or fewer tokens (mapping.py).
        What the receiver holds already is left out. The caller keeps the rows unchanged until `closed`.
        A push that has failed ignores it. Raises ValueError for rows that do not exist here.
        """
        source = self._regions[region]
        if len(positions) != len(rows) or (rows and not 0 <= min(rows) <= max(rows) < source.num_rows):
            raise ValueError(
                f"{len(rows)} rows for {len(positions)} positions; "
                f"region {source.name!r} has rows 0 to {source.num_rows - 1}"
            )
        if rows:
            self.first_put_at = self.first_put_at or time.monotonic()
            self._outbound.enqueue(self, Rows(region, in_a_row(positions), tuple(rows)))

    def accept(self, item: Rows) -> Rows | None:
        """What of `item`, and of what was put before, can travel now, in positions of the receiver; None: nothing.

        Called by the link's thread. Raises TransferFailed for positions that the reservation does not have.
        """
        if self.collected is not None:
            complete = tuple(self.collected.add(item.region, item.positions, item.rows))
            return Rows(item.region, complete, complete) if complete else None
        source = self._regions[item.region]
        span = self._span(source)
        low, high = lowest_and_highest(item.positions)
        if not 0 <= low <= high < span.size:
            raise TransferFailed(
                f"positions {low} to {high} of region {source.name!r} do not fit into the {span.size} rows that were "
                "reserved"
            )
        if low >= span.first:
            return item
        wanted = [each for each in zip(item.positions, item.rows, strict=True) if each[0] >= span.first]
        return Rows(item.region, *zip(*wanted, strict=True)) if wanted else None

    def commit(self, note: bytes, on_done: Callable[[PushResult], None]) -> None:
        """After the last put. `on_done` is called once: by the link's thread, or in here when the push has ended.

        Keep `on_done` short. note: opaque bytes for the receiver, at most wire.MAX_NOTE_BYTES (else ValueError).
        """
        if len(note) > wire.MAX_NOTE_BYTES:
            raise ValueError(f"a note of {len(note)} bytes; {wire.MAX_NOTE_BYTES} are allowed")
        with self._lock:
            if self._on_done is not None:
                raise ValueError("the push has been committed before")
            self._on_done = on_done
            result = self._result
        if result is not None:
            _call(on_done, result)
        else:
            self._outbound.enqueue(self, Note(note))

    def abort(self, reason: str) -> None:
        """Ends the push, if it has not ended; the receiver is told at once. Idempotent."""
        self._outbound.enqueue(self, GiveUp(TransferFailed(f"aborted: {reason}")))

    def is_granted(self) -> bool:
        """The receiver has told where every position goes (one-sided links)."""
        return all(len(self.granted[group]) == span.size - span.first for group, span in self.target.spans.items())

    def destinations(self, region: Region, positions: Sequence[int]) -> list[int]:
        """The receiver's rows for these positions, once granted."""
        granted, first = self.granted[region.group], self._span(region).first
        if isinstance(positions, range):
            return granted[positions.start - first : positions.stop - first]
        return [granted[position - first] for position in positions]

    def finish(self, error: TwinpoolError | None, report: Callable[[PushResult], None]) -> None:
        """The end, and `report` of it before the owner knows. Called by the link's thread; ignored after the first."""
        done_at = time.monotonic()
        first_put_at = done_at if self.first_put_at is None else self.first_put_at
        result = PushResult(
            error=error,
            bytes=self.num_bytes,
            rows=self.num_rows,
            seconds=done_at - first_put_at,
            first_put_at=first_put_at,
            done_at=done_at,
            transport=self._outbound.transport,
            peer=self._outbound.peer,
        )
        with self._lock:
            if self._result is not None:
                return
            self._result = result
            on_done = self._on_done
        report(result)
        if on_done is not None:
            _call(on_done, result)

    def _span(self, region: Region) -> Span:
        return self.target.spans.get(region.group, Span(first=0, size=0))


def _call(on_done: Callable[[PushResult], None], result: PushResult) -> None:
    """An owner's fault must not take the link, and with it other pushes, down."""
    try:
        on_done(result)
    except Exception:
        log.exception("on_done of a KV push raised")
