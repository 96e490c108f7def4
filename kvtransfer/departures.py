"""What leaves on one link, in which order: the prefill worker's queues of one decode worker, and the frames of them.

Messages without rows go first. Then the pushes take turns, a frame each: frames are bounded, so that a short request
does not wait behind a long one and an abort is quick. A few frames that together are no larger than one leave together.
Where a push has to be told first where its rows go (one-sided links), its next frame is made while the answer is on its
way. The link's thread owns all of it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtransfer import native, wire
from kvtransfer.digest import commit_context
from kvtransfer.mapping import LinkMapping
from kvtransfer.metrics import LinkMetrics
from kvtransfer.push import Note, Push, Rows
from kvtransfer.region import Region, RowViews
from kvtransfer.transports import Link
from twinpool.errors import TransferFailed

FRAME_BYTES = 8 << 20  # rows are put into one frame up to this size (one row at least): 64 ms of a 1 Gbit/s link
FRAME_GRACE_S = 2.0  # a frame whose push has ended may take this long to leave before the link is cut
ANSWER_S = 150e-6  # how long the thread looks for the answer to a claim or a commit before it sleeps


@dataclass(frozen=True, slots=True)
class _Frame:
    """Rows that are to be sent, and their message."""

    region: int
    positions: Sequence[int]
    put: wire.Put
    sources: RowViews

    @property
    def num_bytes(self) -> int:
        return len(self.sources) * self.sources.row_bytes


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A frame that is being sent, with rows or without. The checksums are complete when it is out."""

    push: Push
    frame: _Frame | None
    checksums: Sequence[int] = ()


class Departures:
    def __init__(
        self,
        link: Link,
        pushes: Mapping[int, Push],
        regions: Sequence[Region],
        mapping: LinkMapping | None,
        metrics: LinkMetrics,
        give_up: Callable[[Push, TransferFailed], None],
    ) -> None:
        """pushes: those that have not ended; regions: the cache's; give_up: ends a push that cannot go on."""
        self.is_sending = False
        self.sent_at = time.monotonic()  # the last frame
        self.deadline = math.inf  # of the frames being sent
        self._link = link
        self._pushes = pushes
        self._regions = regions if mapping is None else mapping.regions  # that frames are sent from
        self._mapping = mapping
        self._metrics = metrics
        self._give_up = give_up
        self._queues: dict[int, deque[Rows | Note]] = {}
        self._turns: deque[int] = deque()  # pushes with something that may be sent, each once
        self._control: deque[wire.Claim | wire.Abort | wire.Heartbeat] = deque()
        self._made: dict[int, _Frame] = {}  # the next of pushes that wait for their first answer
        self._leaving: list[_Leaving] = []
        self._began_at = 0.0
        self._answer_is_near = False  # a claim that rows wait for has left, or a commit
        self._queued_rows = self._queued_bytes = 0

    def add(self, push: Push) -> None:
        """A new push: it claims its reservation."""
        self._queues[push.number] = deque()
        if self._mapping is not None:
            push.collected = self._mapping.collect(push.target.spans)
        target = push.target
        self._control.append(
            wire.Claim(push=push.number, token=target.token, request_id=target.request_id, attempt=target.attempt)
        )

    def queue(self, push: Push, item: Rows | Note) -> None:
        if isinstance(item, Rows):
            try:
                accepted = push.accept(item)
            except TransferFailed as exc:
                self._give_up(push, exc)
                return
            if accepted is None:
                return
            item = accepted
            self._count(len(item.rows), self._num_bytes(item))
        had_some = self._has_some(push)
        self._queues[push.number].append(item)
        if not had_some and (push.is_granted() or not self._link.one_sided):
            self._turns.append(push.number)

    def granted(self, push: Push) -> None:
        """It knows where its rows go."""
        if self._has_some(push):
            self._turns.append(push.number)

    def abort(self, push: Push, reason: str) -> None:
        """The receiver is told."""
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

    def beat(self) -> None:
        """A frame that is being sent says as much, or cannot because the receiver has not read what came before."""
        if not self.is_sending and not self._control:
            self._control.append(wire.Heartbeat())

    def forget(self, push: Push) -> bool:
        """It has ended. True: a frame of it is still leaving, and `closed` follows when that is out."""
        made = self._made.pop(push.number, None)
        if made is not None:
            self._count(-len(made.positions), -made.num_bytes)
        for item in self._queues.pop(push.number):
            if isinstance(item, Rows):
                self._count(-len(item.rows), -self._num_bytes(item))
        is_leaving = self.holds_rows_of(push)
        if is_leaving:
            self.deadline = min(self.deadline, time.monotonic() + FRAME_GRACE_S)
        return is_leaving

    @property
    def has_some(self) -> bool:
        """Rows are queued, or frames are being sent."""
        return bool(self._queued_rows or self._leaving)

    def holds_rows_of(self, push: Push) -> bool:
        """They are being sent."""
        return any(push is each.push for each in self._leaving)

    def end(self) -> None:
        """The link has ended, and reads no row any more."""
        for each in self._leaving:
            each.push.closed.set()
        self._count(-self._queued_rows, -self._queued_bytes)

    def send_some(self) -> bool:
        """Goes on with the frames begun, or begins the next. True when there is more to send without waiting."""
        if not self.is_sending:
            if not self._begin_next():
                return False
            while self._may_begin_another():
                self._begin_next()
        if not self._link.advance():
            return False
        self.is_sending = False
        leaving, self._leaving = self._leaving, []
        self.sent_at = time.monotonic()
        for each in leaving:
            push, frame = each.push, each.frame
            if frame is not None:
                push.manifest.add(frame.region, frame.positions, each.checksums)
                push.num_rows += len(frame.positions)
                push.num_bytes += frame.num_bytes
                push.sending_s += (self.sent_at - self._began_at) / len(leaving)
                self._metrics.moved(len(frame.positions), frame.num_bytes)
            if push.number not in self._pushes:  # it ended while its last frame left
                push.closed.set()
        return bool(self._control or self._turns)

    def look_for_answer(self) -> bool:
        """An answer that a push has just begun to wait for comes in less time than it takes to sleep and wake up."""
        if self.is_sending or not self._answer_is_near:
            return False
        self._answer_is_near = False
        self._make_ahead()
        return native.look(self._link.fileno(), ANSWER_S)

    def _make_ahead(self) -> None:
        """The first frame of every push that waits to be told where its rows go."""
        if self._mapping is not None:
            return
        for number, push in self._pushes.items():
            queue = self._queues[number]
            item = queue[0] if queue and number not in self._made and not push.is_granted() else None
            if isinstance(item, Rows):
                queue.popleft()
                self._made[number] = frame = self._make(push, item)
                frame.sources.addresses()

    def _may_begin_another(self) -> bool:
        """Frames of rows leave together, up to the size of one large one: what lies between two of them takes long for
        a processor whose cache is full of rows. A push's rows of one region do not: the second may repeat the first.
        Nor do mapped rows, which are made in memory that all frames share.
        """
        link = self._link
        if not link.takes_several or self._mapping is not None or self._control or not self._turns:
            return False
        push = self._pushes.get(self._turns[0])
        if push is None:
            return False
        following = self._made.get(push.number) or self._queues[push.number][0]
        if isinstance(following, Note):
            return False
        left = link.frame_share * FRAME_BYTES
        for other in self._leaving:
            if other.frame is None or (other.push is push and other.frame.region == following.region):
                return False
            left -= other.frame.num_bytes
        num_bytes = following.num_bytes if isinstance(following, _Frame) else self._num_bytes(following)
        return bool(self._leaving) and num_bytes <= left

    def _begin_next(self) -> bool:
        while self._control or self._turns:
            if self._control:
                message = self._control.popleft()
                self._answer_is_near = self._link.one_sided and isinstance(message, wire.Claim)
                self._link.start(message)
                self.deadline = math.inf  # it holds no rows, and a receiver that is alive but slow will take it
                self.is_sending = True
                return True
            push = self._pushes.get(self._turns.popleft())
            if push is None:
                continue
            if not self._leaving:
                self._began_at, self.deadline = time.monotonic(), math.inf
            leaving = self._begin(push)
            if leaving is None:
                continue
            if self._queues[push.number]:
                self._turns.append(push.number)
            self._leaving.append(leaving)
            self.deadline = min(self.deadline, push.deadline + FRAME_GRACE_S)
            self.is_sending = True
            return True
        return False

    def _begin(self, push: Push) -> _Leaving | None:
        """Its next frame; None when the push has ended over it."""
        frame = self._made.pop(push.number, None)
        if frame is None:
            item = self._queues[push.number].popleft()
            if isinstance(item, Note):
                self._begin_commit(push, item)
                return _Leaving(push, None)
            frame = self._make(push, item)
        self._count(-len(frame.positions), -frame.num_bytes)
        repeated = push.manifest.first_repeated(frame.region, frame.positions)
        if repeated is not None:
            name = self._regions[frame.region].name
            self._give_up(push, TransferFailed(f"position {repeated} of region {name!r} was put twice"))
            return None
        there = push.destinations(self._regions[frame.region], frame.positions) if self._link.one_sided else ()
        return _Leaving(push, frame, self._link.start_rows(frame.put, frame.sources, there, deadline=push.deadline))

    def _make(self, push: Push, item: Rows) -> _Frame:
        """A frame of the first of these rows; the others go back to the head of the queue."""
        region = self._regions[item.region]
        share = self._link.frame_share * FRAME_BYTES // region.row_bytes
        size = min(wire.MAX_ROWS_PER_PUT, region.num_rows, max(1, share))
        positions, rows = item.positions[:size], item.rows[:size]
        if len(item.rows) > size:
            self._queues[push.number].appendleft(Rows(item.region, item.positions[size:], item.rows[size:]))
        if self._mapping is not None and push.collected is not None:
            rows = self._mapping.gather(push.collected, item.region, positions)
        target = push.target
        put = wire.Put(
            push=push.number,
            token=target.token,
            request_id=target.request_id,
            attempt=target.attempt,
            region=item.region,
            positions=wire.pack_u32(positions),
            checksums=b"",
        )
        return _Frame(item.region, positions, put, region.rows(rows))

    def _begin_commit(self, push: Push, note: Note) -> None:
        target = push.target
        push.is_committed = self._answer_is_near = True
        self._link.start(
            wire.Commit(
                push=push.number,
                token=target.token,
                request_id=target.request_id,
                attempt=target.attempt,
                counts=wire.pack_u32(push.manifest.counts()),
                digest=push.manifest.digest(commit_context(target.request_id, target.attempt, note.note)),
            ),
            [memoryview(note.note)] if note.note else [],
        )

    def _has_some(self, push: Push) -> bool:
        return push.number in self._made or bool(self._queues[push.number])

    def _num_bytes(self, item: Rows) -> int:
        return len(item.rows) * self._regions[item.region].row_bytes

    def _count(self, rows: int, num_bytes: int) -> None:
        if rows:
            self._queued_rows += rows
            self._queued_bytes += num_bytes
            self._metrics.queued(rows, num_bytes)
