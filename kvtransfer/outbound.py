"""One link of the prefill worker to one decode worker, and the thread that runs it.

The thread connects, then loops: take what the pushes have queued (descriptors, never bytes), end pushes whose deadline
has passed, send one frame, or a few that together are no larger, look for answers. Frames are bounded and pushes take
turns, so that a short request does not wait behind a long one and an abort is quick. A full socket is the backpressure:
the thread then waits for room, answers, new work or the next deadline, whichever comes first: a slow receiver delays
nothing but its own frames.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer import handshake, native, wire
from kvtransfer.digest import commit_context
from kvtransfer.lease import BEATS, PeerSilent
from kvtransfer.mapping import LinkMapping
from kvtransfer.metrics import ABORTED, NONE, LinkMetrics, TransferMetrics, error_name
from kvtransfer.push import GiveUp, Note, Push, PushResult, Rows
from kvtransfer.region import Region
from kvtransfer.target import Target
from kvtransfer.transports import Link
from twinpool.errors import (
    Incompatible,
    PeerLost,
    ReservationGone,
    TransferFailed,
    TransferTimeout,
    TwinpoolError,
    Unauthenticated,
)

log = logging.getLogger(__name__)

FRAME_BYTES = 8 << 20  # rows are put into one frame up to this size (one row at least): 64 ms of a 1 Gbit/s link
ANSWER_S = 150e-6  # how long the thread looks for the answer to a claim or a commit before it sleeps
FRAME_GRACE_S = 2.0  # a frame whose push has ended may take this long to leave before the link is cut
DRAIN_POLL_S = 5.0  # how often the log says that source rows of a closed link are still pinned
IDLE_S = 60.0  # a link without pushes is closed after this long


@dataclass(frozen=True, slots=True)
class _Frame:
    """Rows that are being sent. The checksums are complete when they are out."""

    region: int
    positions: tuple[int, ...]
    checksums: Sequence[int]
    num_bytes: int


class Outbound:
    """Public methods are for any thread; the rest is the link thread's."""

    def __init__(
        self,
        address: str,
        peer: str,
        connect: Callable[[], tuple[Link, str, LinkMapping | None]],
        regions: Sequence[Region],
        metrics: TransferMetrics,
        on_end: Callable[[Outbound], None],
    ) -> None:
        """address, peer: the receiver in logs, and in metrics.

        connect: makes the link and gets it through the handshake, and says over which transport; runs on the new
        thread.
        """
        self.peer = peer
        self.transport = NONE  # until there is a link
        self._address = address
        self._connect = connect
        self._regions = regions
        self._outgoing = regions  # what frames are sent from: on a mapped link rows made for the receiver
        self._mapping: LinkMapping | None = None
        self._metrics = metrics
        self._link_metrics: LinkMetrics | None = None  # once there is a link
        self._on_end = on_end
        self._lock = threading.Lock()  # guards the next six
        self._inbox: deque[tuple[Push, Rows | Note | GiveUp | None]] = deque()
        self._signalled = False
        self._ended = False
        self._closing = False
        self._link: Link | None = None
        self._num_opened = 0
        self._wake_read, self._wake_write = os.pipe()
        self._pushes: dict[int, Push] = {}
        self._queues: dict[int, deque[Rows | Note]] = {}
        self._turns: deque[int] = deque()  # pushes with something queued, each once
        self._control: deque[wire.Claim | wire.Abort | wire.Heartbeat] = deque()  # goes out before any rows
        self._queued_rows = self._queued_bytes = 0
        self._sending = False
        self._answer_is_near = False  # a claim that rows wait for has left, or a commit
        self._leaving: list[tuple[Push, _Frame | None]] = []  # of the frames being sent, those of a push, with its rows
        self._frame_began_at = self._frame_deadline = 0.0
        self._idle_since = time.monotonic()
        self._heard_at = self._sent_at = math.inf  # last bytes of the receiver, last frame for it; once linked
        self._thread = threading.Thread(target=self._run, name=f"kv-send {address}", daemon=True)

    def start(self, target: Target, deadline: float) -> Push:
        """Starts the thread with a first push, which ends with the link's error should it not come about."""
        with self._lock:
            push = self._open(target, deadline)
        self._thread.start()
        return push

    def open(self, target: Target, deadline: float) -> Push | None:
        """Another push on this link, or None when the link has ended."""
        with self._lock:
            return None if self._ended or self._closing else self._open(target, deadline)

    def enqueue(self, push: Push, item: Rows | Note | GiveUp) -> None:
        with self._lock:
            if not self._ended:
                self._put_in_inbox(push, item)

    def close(self) -> None:
        """Fails what is open and ends the thread."""
        with self._lock:
            self._closing = True
            if not self._ended:
                self._signal()
            if self._link is not None:
                self._link.cut()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout=timeout_s)

    def _open(self, target: Target, deadline: float) -> Push:
        self._num_opened += 1
        push = Push(self, target, self._regions, self._num_opened, deadline)
        self._put_in_inbox(push, None)
        return push

    def _put_in_inbox(self, push: Push, item: Rows | Note | GiveUp | None) -> None:
        self._inbox.append((push, item))
        self._signal()

    def _signal(self) -> None:
        if not self._signalled:
            self._signalled = True
            os.write(self._wake_write, b"\0")

    # --- the link's thread ---

    def _run(self) -> None:
        error: TwinpoolError = PeerLost(f"the link to {self._address} was closed by this side")
        link, reported = None, None
        try:
            link, self.transport, self._mapping = self._connect()
            self._link_metrics = self._metrics.link(self.transport, self.peer)
            if self._mapping is not None:
                self._outgoing = self._mapping.regions
            with self._lock:
                self._link = link
            self._pump(link)
        except PeerSilent as exc:
            error, reported = PeerLost(exc.message), error_name(exc)
            self._reports.lease_lost()
            log.warning("%s", exc.message)
        except TwinpoolError as exc:
            error, reported = exc, None if self._closing else error_name(exc)
            if isinstance(exc, Unauthenticated | Incompatible | ReservationGone):
                self._reports.refused(error_name(exc))
        except wire.Malformed as exc:
            error, reported = PeerLost(f"{self._address} sent what is no frame: {exc}"), error_name(exc)
        except Exception as exc:
            log.exception("the KV link to %s failed", self._address)
            error, reported = TransferFailed(f"the link to {self._address} failed: {exc!r}"), error_name(exc)
        finally:
            self._end_link(link, error, reported)

    @property
    def _reports(self) -> LinkMetrics:
        if self._link_metrics is None:  # the link did not come about
            self._link_metrics = self._metrics.link(self.transport, self.peer)
        return self._link_metrics

    def _end_link(self, link: Link | None, error: TwinpoolError, reported: str | None) -> None:
        with self._lock:
            self._ended = True
            self._link = None
            late, self._inbox = self._inbox, deque()
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._reports.down(reported)
        if link is not None:
            link.close()
            while not link.drained(DRAIN_POLL_S):
                log.warning("rows for %s may still be read, though its link was closed", self._address)
        self._on_end(self)
        for push, _ in late:
            self._pushes.setdefault(push.number, push)  # opened too late to be known, or ended already
        for push in self._pushes.values():
            self._report(push, error, error_name(error))
            push.closed.set()  # last: who has waited for it finds the error
        for push, _ in self._leaving:
            push.closed.set()
        self._count_queued(-self._queued_rows, -self._queued_bytes)
        self._reports.forget()

    def _pump(self, link: Link) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(link.fileno(), select.POLLIN)
        waits_for_room = False
        self._heard_at = self._sent_at = time.monotonic()
        while not self._closing:
            self._take_inbox(link)
            self._end_late()
            self._beat(link)
            more = self._send_some(link)
            if self._sending != waits_for_room:
                waits_for_room = self._sending
                poll.modify(link.fileno(), select.POLLIN | (select.POLLOUT if waits_for_room else 0))
            timeout_s = 0.0 if more or self._looks_for_answer(link) else self._wait_s(link)
            for descriptor, events in poll.poll(timeout_s * 1000):
                if descriptor == link.fileno() and events != select.POLLOUT:
                    self._heard_at = time.monotonic()
                    for message in link.receive_ready():
                        self._take_answer(link, message)
            if time.monotonic() >= self._heard_at + link.lease_s:  # and nothing of it lies unread
                raise PeerSilent.after(self._address, link.lease_s)
            if self._is_idle():
                return

    def _looks_for_answer(self, link: Link) -> bool:
        """An answer that a push has just begun to wait for comes in less time than it takes to sleep and wake up."""
        if self._sending or not self._answer_is_near:
            return False
        self._answer_is_near = False
        return native.look(link.fileno(), ANSWER_S)

    def _take_inbox(self, link: Link) -> None:
        with self._lock:
            if not self._signalled:
                return
            os.read(self._wake_read, 1)
            self._signalled = False
            items, self._inbox = self._inbox, deque()
        for push, item in items:
            if item is None:
                self._pushes[push.number] = push
                self._begin(push)
                self._queues[push.number] = deque()
                if self._mapping is not None:
                    push.collected = self._mapping.collect(push.target.spans)
                self._claim(push)
            elif push.number not in self._pushes:
                pass  # it has ended
            elif isinstance(item, GiveUp):
                self._give_up(push, item.error, ABORTED)
            else:
                self._queue(link, push, item)

    def _queue(self, link: Link, push: Push, item: Rows | Note) -> None:
        if isinstance(item, Rows):
            try:
                accepted = push.accept(item)
            except TransferFailed as exc:
                self._give_up(push, exc)
                return
            if accepted is None:
                return
            item = accepted
            self._count_queued(len(item.rows), len(item.rows) * self._outgoing[item.region].row_bytes)
        queue = self._queues[push.number]
        if not queue and self._may_send(link, push):
            self._turns.append(push.number)
        queue.append(item)

    def _beat(self, link: Link) -> None:
        """A frame that is being sent says as much, or cannot because the receiver has not read what came before."""
        if not self._sending and not self._control and time.monotonic() >= self._sent_at + link.lease_s / BEATS:
            self._control.append(wire.Heartbeat())

    def _send_some(self, link: Link) -> bool:
        """Goes on with the frames begun, or begins the next. True when there is more to send without waiting."""
        if not self._sending:
            if not self._begin_frame(link):
                return False
            while self._may_begin_another(link):
                self._begin_frame(link)
        if not link.advance():
            return False
        self._sending = False
        leaving, self._leaving = self._leaving, []
        self._sent_at = time.monotonic()
        for push, frame in leaving:
            if frame is not None:
                push.manifest.add(frame.region, frame.positions, frame.checksums)
                push.num_rows += len(frame.positions)
                push.num_bytes += frame.num_bytes
                push.sending_s += (self._sent_at - self._frame_began_at) / len(leaving)
                self._reports.moved(len(frame.positions), frame.num_bytes)
            if push.number not in self._pushes:  # it ended while its last frame left
                push.closed.set()
        return bool(self._control or self._turns)

    def _may_begin_another(self, link: Link) -> bool:
        """Frames of rows leave together, up to the size of one large one: what lies between two of them takes long for
        a processor whose cache is full of rows. A push's rows of one region do not: the second may repeat the first.
        Nor do mapped rows, which are made in memory that all frames share.
        """
        if not link.takes_several or self._mapping is not None or self._control or not self._turns:
            return False
        push = self._pushes.get(self._turns[0])
        item = None if push is None else self._queues[push.number][0]
        if not isinstance(item, Rows):
            return False
        left = link.frame_share * FRAME_BYTES
        for other, frame in self._leaving:
            if frame is None or (other is push and frame.region == item.region):
                return False
            left -= frame.num_bytes
        return bool(self._leaving) and len(item.rows) * self._outgoing[item.region].row_bytes <= left

    def _begin_frame(self, link: Link) -> bool:
        while self._control or self._turns:
            if self._control:
                message = self._control.popleft()
                self._answer_is_near = link.one_sided and isinstance(message, wire.Claim)
                link.start(message)
                if not self._leaving:
                    self._frame_deadline = (
                        math.inf
                    )  # it holds no rows, and a receiver that is alive but slow will take it
                self._sending = True
                return True
            push = self._pushes.get(self._turns.popleft())
            if push is None:
                continue
            if not self._leaving:
                self._frame_began_at, self._frame_deadline = time.monotonic(), math.inf
            item = self._queues[push.number].popleft()
            frame = None
            if isinstance(item, Note):
                self._begin_commit(link, push, item)
            elif (frame := self._begin_put(link, push, item)) is None:
                continue
            if self._queues[push.number]:
                self._turns.append(push.number)
            self._leaving.append((push, frame))
            self._frame_deadline = min(self._frame_deadline, push.deadline + FRAME_GRACE_S)
            self._sending = True
            return True
        return False

    def _begin_put(self, link: Link, push: Push, item: Rows) -> _Frame | None:
        region = self._outgoing[item.region]
        size = min(wire.MAX_ROWS_PER_PUT, region.num_rows, max(1, link.frame_share * FRAME_BYTES // region.row_bytes))
        positions, rows = item.positions[:size], item.rows[:size]
        if len(item.rows) > size:
            self._queues[push.number].appendleft(Rows(item.region, item.positions[size:], item.rows[size:]))
        self._count_queued(-len(rows), -len(rows) * region.row_bytes)
        repeated = push.manifest.first_repeated(item.region, positions)
        if repeated is not None:
            self._give_up(push, TransferFailed(f"position {repeated} of region {region.name!r} was put twice"))
            return None
        if self._mapping is not None and push.collected is not None:
            rows = self._mapping.gather(push.collected, item.region, positions)
        sources = region.rows(rows)
        put = wire.Put(
            push=push.number,
            token=push.target.token,
            request_id=push.target.request_id,
            attempt=push.target.attempt,
            region=item.region,
            positions=wire.pack_u32(positions),
            checksums=b"",
        )
        there = push.destinations(region, positions) if link.one_sided else ()
        checksums = link.start_rows(put, sources, there, deadline=push.deadline)
        return _Frame(item.region, positions, checksums, len(rows) * region.row_bytes)

    def _begin_commit(self, link: Link, push: Push, item: Note) -> None:
        target = push.target
        push.is_committed = self._answer_is_near = True
        link.start(
            wire.Commit(
                push=push.number,
                token=target.token,
                request_id=target.request_id,
                attempt=target.attempt,
                counts=wire.pack_u32(push.manifest.counts()),
                digest=push.manifest.digest(commit_context(target.request_id, target.attempt, item.note)),
            ),
            [memoryview(item.note)] if item.note else [],
        )

    def _claim(self, push: Push) -> None:
        target = push.target
        self._control.append(
            wire.Claim(push=push.number, token=target.token, request_id=target.request_id, attempt=target.attempt)
        )

    def _may_send(self, link: Link, push: Push) -> bool:
        return not link.one_sided or push.is_granted()

    def _take_grant(self, message: wire.Granted) -> None:
        push = self._pushes.get(message.push)
        if push is None:
            return  # it has ended on this side, and the receiver was told
        if message.group not in push.granted:
            raise wire.Malformed(f"Granted for group {message.group!r}, which the target does not have")
        if push.is_granted():
            raise wire.Malformed("Granted for a push that has all its rows")
        push.granted[message.group].extend(wire.unpack_u32(message.rows))
        if push.is_granted() and self._queues[push.number]:
            self._turns.append(push.number)

    def _take_answer(self, link: Link, message: wire.Message) -> None:
        if isinstance(message, wire.Granted) and link.one_sided:
            self._take_grant(message)
            return
        if isinstance(message, wire.Heartbeat):
            return
        if isinstance(message, wire.Refused) and message.push == 0:
            raise handshake.refusal(message)
        if not isinstance(message, wire.Committed | wire.Refused):
            raise wire.Malformed(f"{type(message).__name__} where an answer was expected")
        push = self._pushes.get(message.push)
        if push is None:
            return  # it has ended on this side
        if isinstance(message, wire.Refused):
            if link.one_sided:
                self._abort(push, "refused")  # its owner waits to hear that nothing is written any more
            refusal = handshake.refusal(message)
            self._reports.refused(error_name(refusal))
            self._end(push, refusal)
        elif push.is_committed:
            self._end(push, None)
        else:
            raise wire.Malformed("Committed for a push that is not")

    def _end_late(self) -> None:
        now = time.monotonic()
        for push in [push for push in self._pushes.values() if push.deadline <= now]:
            self._give_up(
                push,
                TransferTimeout(
                    f"{self._address} did not confirm the KV rows of request {push.target.request_id!r} in time"
                ),
            )
        if self._sending and self._frame_deadline <= now:
            raise PeerLost(f"{self._address} takes no more bytes")

    def _give_up(self, push: Push, error: TransferFailed, reported: str = "") -> None:
        """Ends a push from this side and has the receiver told."""
        self._abort(push, error.message)
        self._end(push, error, reported)

    def _abort(self, push: Push, reason: str) -> None:
        target = push.target
        self._control.append(
            wire.Abort(
                push=push.number,
                token=target.token,
                request_id=target.request_id,
                attempt=target.attempt,
                reason=reason[: wire.MAX_REASON_CHARS],
            )
        )

    def _end(self, push: Push, error: TwinpoolError | None, reported: str = "") -> None:
        """reported: what metrics call the error, if not by its class."""
        del self._pushes[push.number]
        for item in self._queues.pop(push.number):
            if isinstance(item, Rows):
                self._count_queued(-len(item.rows), -len(item.rows) * self._outgoing[item.region].row_bytes)
        if not self._pushes:
            self._idle_since = time.monotonic()
        if any(push is each for each, _ in self._leaving):  # `closed` follows when its frame is out
            self._frame_deadline = min(self._frame_deadline, time.monotonic() + FRAME_GRACE_S)
        else:
            push.closed.set()
        self._report(push, error, None if error is None else reported or error_name(error))

    def _begin(self, push: Push) -> None:
        push.has_begun = True
        self._reports.began(push.target.attempt)

    def _report(self, push: Push, error: TwinpoolError | None, reported: str | None) -> None:
        def report(result: PushResult) -> None:
            if not push.has_begun:
                self._begin(push)
            self._reports.finished(result.seconds, reported)
            if error is None and push.sending_s > 0:
                self._reports.paced(result.bytes / push.sending_s)

        push.finish(error, report)

    def _count_queued(self, rows: int, num_bytes: int) -> None:
        if rows:
            self._queued_rows += rows
            self._queued_bytes += num_bytes
            self._reports.queued(rows, num_bytes)

    def _wait_s(self, link: Link) -> float:
        """Until the next thing happens by itself."""
        until = min((push.deadline for push in self._pushes.values()), default=self._idle_since + IDLE_S)
        until = min(until, self._heard_at + link.lease_s)
        until = min(until, self._frame_deadline if self._sending else self._sent_at + link.lease_s / BEATS)
        return max(0.0, until - time.monotonic())

    def _is_idle(self) -> bool:
        """True, once, when the link has had nothing to do for long; no push can be opened after that."""
        if self._pushes or self._sending or time.monotonic() < self._idle_since + IDLE_S:
            return False
        with self._lock:
            self._ended = not self._inbox
            return self._ended
