"""One link of the prefill worker to one decode worker, and the thread that runs it.

The thread connects, then loops: take what the pushes have queued (descriptors, never bytes), end pushes whose deadline
has passed, send what is next (departures.py), look for answers. A full socket is the backpressure: the thread then
waits for room, answers, new work or the next deadline, whichever comes first: a slow receiver delays nothing but its
own frames.
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

from kvtransfer import handshake, wire
from kvtransfer.departures import Departures
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

DRAIN_POLL_S = 5.0  # how often the log says that source rows of a closed link are still pinned
IDLE_S = 60.0  # a link without pushes is closed after this long


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
        self._departures: Departures | None = None  # once there is a link
        self._idle_since = time.monotonic()
        self._heard_at = math.inf  # last bytes of the receiver; once linked
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
            link, self.transport, mapping = self._connect()
            self._link_metrics = self._metrics.link(self.transport, self.peer)
            self._departures = Departures(link, self._pushes, self._regions, mapping, self._link_metrics, self._give_up)
            with self._lock:
                self._link = link
            self._pump(link, self._departures)
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
        if self._departures is not None:
            self._departures.end()
        self._reports.forget()

    def _pump(self, link: Link, departures: Departures) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(link.fileno(), select.POLLIN)
        waits_for_room = False
        self._heard_at = time.monotonic()
        while not self._closing:
            self._take_inbox(departures)
            self._end_late(departures)
            if time.monotonic() >= departures.sent_at + link.lease_s / BEATS:
                departures.beat()
            more = departures.send_some()
            if departures.is_sending != waits_for_room:
                waits_for_room = departures.is_sending
                poll.modify(link.fileno(), select.POLLIN | (select.POLLOUT if waits_for_room else 0))
            timeout_s = 0.0 if more or departures.look_for_answer() else self._wait_s(link, departures)
            for descriptor, events in poll.poll(timeout_s * 1000):
                if descriptor == link.fileno() and events != select.POLLOUT:
                    self._heard_at = time.monotonic()
                    for message in link.receive_ready():
                        self._take_answer(link, departures, message)
            if time.monotonic() >= self._heard_at + link.lease_s:  # and nothing of it lies unread
                raise PeerSilent.after(self._address, link.lease_s)
            if self._is_idle(departures):
                return

    def _take_inbox(self, departures: Departures) -> None:
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
                departures.add(push)
            elif push.number not in self._pushes:
                pass  # it has ended
            elif isinstance(item, GiveUp):
                self._give_up(push, item.error, ABORTED)
            else:
                departures.queue(push, item)

    def _take_grant(self, departures: Departures, message: wire.Granted) -> None:
        push = self._pushes.get(message.push)
        if push is None:
            return  # it has ended on this side, and the receiver was told
        if message.group not in push.granted:
            raise wire.Malformed(f"Granted for group {message.group!r}, which the target does not have")
        if push.is_granted():
            raise wire.Malformed("Granted for a push that has all its rows")
        push.granted[message.group].extend(wire.unpack_u32(message.rows))
        if push.is_granted():
            departures.granted(push)

    def _take_answer(self, link: Link, departures: Departures, message: wire.Message) -> None:
        if isinstance(message, wire.Granted) and link.one_sided:
            self._take_grant(departures, message)
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
                departures.abort(push, "refused")  # its owner waits to hear that nothing is written any more
            refusal = handshake.refusal(message)
            self._reports.refused(error_name(refusal))
            self._end(push, refusal)
        elif push.is_committed:
            self._end(push, None)
        else:
            raise wire.Malformed("Committed for a push that is not")

    def _end_late(self, departures: Departures) -> None:
        now = time.monotonic()
        for push in [push for push in self._pushes.values() if push.deadline <= now]:
            self._give_up(
                push,
                TransferTimeout(
                    f"{self._address} did not confirm the KV rows of request {push.target.request_id!r} in time"
                ),
            )
        if departures.is_sending and departures.deadline <= now:
            raise PeerLost(f"{self._address} takes no more bytes")

    def _give_up(self, push: Push, error: TransferFailed, reported: str = "") -> None:
        """Ends a push from this side and has the receiver told."""
        if self._departures is not None:
            self._departures.abort(push, error.message)
        self._end(push, error, reported)

    def _end(self, push: Push, error: TwinpoolError | None, reported: str = "") -> None:
        """reported: what metrics call the error, if not by its class."""
        del self._pushes[push.number]
        if not self._pushes:
            self._idle_since = time.monotonic()
        if self._departures is None or not self._departures.forget(push):
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

    def _wait_s(self, link: Link, departures: Departures) -> float:
        """Until the next thing happens by itself."""
        until = min((push.deadline for push in self._pushes.values()), default=self._idle_since + IDLE_S)
        until = min(until, self._heard_at + link.lease_s)
        until = min(until, departures.deadline if departures.is_sending else departures.sent_at + link.lease_s / BEATS)
        return max(0.0, until - time.monotonic())

    def _is_idle(self, departures: Departures) -> bool:
        """True, once, when the link has had nothing to do for long; no push can be opened after that."""
        if self._pushes or departures.is_sending or time.monotonic() < self._idle_since + IDLE_S:
            return False
        with self._lock:
            self._ended = not self._inbox
            return self._ended
