"""Rows over several TCP connections at once, for networks where one does not fill the way, and for TLS, which takes a
processor for each.

 1. After the handshake the sender asks for so many streams (Widen); the receiver answers with a secret that is good for
    them only, and only now (Streams).
 2. The sender opens the others to the same endpoint, each with TLS where the first has it, and shows the secret (Join).
    The receiver hands such a connection over to the link that expects it, which goes on when all are there.
 3. The first connection stays the control link, and carries every n-th row itself. Each other one carries its stripe
    of the rows of a Put, behind a header that says which Put it belongs to (Stripe).

A Put is over when all its stripes are; a connection that breaks, or is silent for a lease while its stripe is awaited,
ends the link and all its connections. So cutting the link is a fence, as with one.
"""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from kvtransfer import wire
from kvtransfer.memory import SharedMemory
from kvtransfer.region import Region
from kvtransfer.transports import Link, tcp
from kvtransfer.transports.controlled import ControlledLink
from kvtransfer.transports.stream import StreamListener
from kvtransfer.transports.tcp import TcpLink, TcpTransport
from twinpool.certificates import Certificates
from twinpool.errors import PeerLost, Unauthenticated

_JOIN_TIMEOUT_S = 5.0  # for all streams of a link
_LOOK_S = 0.05  # between two looks at whether a link that waits for its streams was cut
_STRIPE_WAIT_S = 0.02  # for the other streams, before the link's thread looks at its pushes again
_GRACE_S = 60.0  # beyond the deadline of a frame, by which the link's thread cuts it
_CLOSE_TIMEOUT_S = 5.0  # a cut connection ends at once; longer means a bug


class StripedTcpTransport:
    """What is called "tcp": accepts links of any number of streams."""

    def __init__(self, certificates: Certificates | None = None, streams: int = 1) -> None:
        """streams: connections of every link that this process makes."""
        self._plain = TcpTransport(certificates)
        self._streams = streams
        self._joins = Joins()
        self.caps = self._plain.caps

    def actual(self) -> str:
        return self._plain.actual()

    def register(self, regions: Sequence[Region], memory: SharedMemory | None) -> None:
        """Any memory will do."""

    def listen(self, host: str, port: int, advertise: str | None, on_link: Callable[[Link], None]) -> StreamListener:
        return tcp.listen(tcp.SCHEME, (host, port, advertise), self._accepted, on_link)

    def connect(self, endpoint: str, *, deadline: float) -> TcpLink | StripedSenderLink:
        link = self._plain.connect(endpoint, deadline=deadline)
        return link if self._streams == 1 else StripedSenderLink(link, self._streams, partial(self._dial, endpoint))

    def close(self) -> None:
        """Holds nothing."""

    def _dial(self, endpoint: str, deadline: float) -> TcpLink:
        return self._plain.connect(endpoint, deadline=deadline)

    def _accepted(self, sock: socket.socket, peer: str) -> Link:
        return TcpReceiverLink(self._plain.accepted(sock, peer), self._joins)


class Joins:
    """Connections on their way to the links that expect them. Thread safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expected: dict[bytes, dict[int, TcpLink | None]] = {}

    def expect(self, count: int) -> bytes:
        """A secret for streams 1 to `count`."""
        secret = secrets.token_bytes(wire.TOKEN_BYTES)
        with self._changed:
            self._expected[secret] = dict.fromkeys(range(1, count + 1))
        return secret

    def add(self, join: wire.Join, stream: TcpLink) -> None:
        """Raises Unauthenticated for one that nobody expects, or that is here already."""
        with self._changed:
            streams = self._expected.get(join.secret, {})
            if join.index not in streams or streams[join.index] is not None:
                raise Unauthenticated(f"{stream.peer} joins a KV link that expects no such stream")
            streams[join.index] = stream
            self._changed.notify_all()

    def wait(self, secret: bytes, deadline: float, is_cut: Callable[[], bool]) -> None:
        """Until all are here, or it is of no use any more."""
        with self._changed:
            streams = self._expected[secret]
            while None in streams.values() and not is_cut() and time.monotonic() < deadline:
                self._changed.wait(_LOOK_S)

    def take(self, secret: bytes) -> list[TcpLink]:
        """Those that came; no other is let in."""
        with self._changed:
            return [stream for stream in self._expected.pop(secret).values() if stream is not None]


class Lane:
    """A stream and the thread that moves its stripes, one at a time."""

    def __init__(self, stream: TcpLink, on_error: Callable[[BaseException], None]) -> None:
        self.stream = stream
        self._on_error = on_error
        self._jobs: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._ended = threading.Event()
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, name=f"kv-stream {stream.peer}", daemon=True)
        self._thread.start()

    def begin(self, job: Callable[[], Any]) -> None:
        self._ended.clear()
        self._jobs.put(job)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the job has ended, in whatever way."""
        return self._ended.wait(timeout_s)

    def result(self) -> Any:
        return self._result

    def close(self) -> None:
        """Ends what is begun."""
        self.stream.cut()
        self._jobs.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self.stream.close()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._result = job()
            except Exception as exc:
                self._on_error(exc)
            finally:
                self._ended.set()


class _StripedLink(ControlledLink):
    """What both ends share."""

    one_sided = False

    def __init__(self, control: TcpLink) -> None:
        super().__init__(control)
        self._lanes: list[Lane] = []
        self._num_puts = 0
        self._error: BaseException | None = None  # of the first stream that failed
        self._is_cut = False

    def cut(self) -> None:
        self._is_cut = True
        self._control.cut()
        for lane in self._lanes:
            lane.stream.cut()

    def close(self) -> None:
        self._is_cut = True
        for lane in self._lanes:
            lane.close()
        self._control.close()

    def drained(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while any(lane.is_alive() for lane in self._lanes):
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_S)
        return True

    def _failed(self, error: BaseException) -> None:
        """One stream has: no other is waited for."""
        self._error = self._error or error
        self.cut()

    def _stripe(self, rows: Sequence[memoryview], index: int) -> Sequence[memoryview]:
        return rows[index :: len(self._lanes) + 1]

    def _num_striped(self, num_rows: int, index: int) -> int:
        """Rows of a Put of so many that stream `index` carries."""
        return len(range(index, num_rows, len(self._lanes) + 1))

    def _busy(self, num_rows: int) -> list[tuple[int, Lane]]:
        """Streams with rows of a Put of so many, besides the control link."""
        return list(enumerate(self._lanes, 1))[: num_rows - 1]


class TcpReceiverLink(_StripedLink):
    """The decode worker's end of a connection: a link, or, once it has joined, a stream of another."""

    def __init__(self, control: TcpLink, joins: Joins) -> None:
        super().__init__(control)
        self._joins = joins
        self._is_new = True
        self._is_given_away = False
        self._num_rows = 0  # of the Put that is being received, when it comes in stripes

    def share(self, *, deadline: float) -> None:
        """Rows travel in band: there is nothing to share."""

    def receive(self, *, deadline: float | None = None) -> wire.Frame:
        self._num_rows = 0
        frame = self._control.receive(deadline=deadline)
        if isinstance(frame.message, wire.Join) and self._is_new:
            self._joins.add(frame.message, self._control)
            self._is_given_away = True
            raise PeerLost("the connection is a stream of another link now")
        self._is_new = False
        if isinstance(frame.message, wire.Widen) and not self._lanes:
            self._widen(frame.message.count - 1)
            frame = self._control.receive(deadline=deadline)
        if isinstance(frame.message, wire.Put) and self._lanes:
            frame = self._whole(frame.message, frame.payload_bytes)
        return frame

    def _widen(self, count: int) -> None:
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        secret = self._joins.expect(count)
        try:
            self.send(wire.Streams(secret=secret), deadline=deadline)
            self._joins.wait(secret, deadline, lambda: self._is_cut)
        finally:
            streams = self._joins.take(secret)
        if len(streams) < count:
            for stream in streams:
                stream.close()
            raise PeerLost(f"{len(streams)} of {count} further streams of {self.peer} came")
        for stream in streams:
            stream.agree(self.lease_s)
        self._lanes = [Lane(stream, self._failed) for stream in streams]
        if self._is_cut:  # meanwhile: those that came were not
            self.cut()

    def _whole(self, put: wire.Put, payload_bytes: int) -> wire.Frame:
        """The frame as if all its rows followed it."""
        self._num_puts += 1
        self._num_rows = len(put.positions) // 4
        mine = self._num_striped(self._num_rows, 0)
        if payload_bytes % mine:
            raise wire.Malformed(f"Put with {payload_bytes} bytes of {mine} rows")
        return wire.Frame(put, payload_bytes // mine * self._num_rows)

    def fill_rows(self, rows: Sequence[memoryview]) -> tuple[Sequence[int], Sequence[int]]:
        if not self._lanes:
            return self._control.fill_rows(rows)
        busy = self._busy(len(rows))
        for index, lane in busy:
            lane.begin(partial(self._take, lane.stream, self._num_puts, self._stripe(rows, index)))
        parts = []
        try:
            parts.append(self._control.fill_rows(self._stripe(rows, 0)))
        except BaseException as exc:
            self._failed(exc)
        for _, lane in busy:
            lane.wait(None)  # it ends by the lease of its stream: before that bytes may land
        if self._error is not None:
            raise self._error
        self._control.hear()  # it was not listened to meanwhile
        return _merged([*parts, *(lane.result() for _, lane in busy)], len(rows))

    def skip(self, num_bytes: int) -> None:
        if not self._num_rows:
            self._control.skip(num_bytes)
            return
        each = num_bytes // self._num_rows
        self._control.skip(each * self._num_striped(self._num_rows, 0))
        for index, lane in self._busy(self._num_rows):
            size = each * self._num_striped(self._num_rows, index)
            _stripe_of(lane.stream, self._num_puts, size)
            lane.stream.skip(size)
        self._control.hear()

    @staticmethod
    def _take(stream: TcpLink, put: int, rows: Sequence[memoryview]) -> tuple[Sequence[int], Sequence[int]]:
        _stripe_of(stream, put, len(rows) * (rows[0].nbytes + wire.CHECKSUM_BYTES))
        return stream.fill_rows(rows)

    def cut(self) -> None:
        if not self._is_given_away:
            super().cut()

    def close(self) -> None:
        if not self._is_given_away:
            super().close()


def _stripe_of(stream: TcpLink, put: int, num_bytes: int) -> None:
    """The header of the stripe of that Put, with so many bytes behind it."""
    stream.hear()  # it had nothing to say until now
    frame = stream.receive()
    if not isinstance(frame.message, wire.Stripe) or (frame.message.put, frame.payload_bytes) != (put, num_bytes):
        raise wire.Malformed(f"{type(frame.message).__name__} where a stripe of {num_bytes} bytes was expected")


class StripedSenderLink(_StripedLink):
    """The prefill worker's end."""

    def __init__(self, control: TcpLink, count: int, dial: Callable[[float], TcpLink]) -> None:
        """count: of streams, the control link among them; dial(deadline): another connection."""
        super().__init__(control)
        self.frame_share = control.frame_share
        self._count = count
        self._dial = dial
        self._parts: list[Sequence[int]] = []  # checksums of the rows that the control link carries
        self._sending: list[tuple[int, Lane]] = []
        self._checksums: list[int] = []
        self._ends = select.poll()  # of the connections besides the control link, which says nothing of them

    def expect(self, row_bytes: Sequence[int]) -> None:
        """Every frame says how long it is."""

    def attach(self, *, deadline: float) -> None:
        self.send(wire.Widen(count=self._count), deadline=deadline)
        while isinstance(answer := self._control.receive(deadline=deadline).message, wire.Heartbeat):
            pass
        if not isinstance(answer, wire.Streams):
            raise PeerLost(f"{self.peer} answered with {type(answer).__name__} instead of Streams")
        for index in range(1, self._count):
            stream = self._dial(deadline)
            self._lanes.append(Lane(stream, self._failed))
            stream.send(wire.Join(secret=answer.secret, index=index), deadline=deadline)
            self._ends.register(stream.fileno(), select.POLLRDHUP)

    def start(self, message: wire.Message, payload: Sequence[memoryview] = ()) -> None:
        """Also looks whether all connections still stand: an idle link finds out by its next heartbeat."""
        if self._ends.poll(0):
            raise PeerLost(f"a connection of the link to {self.peer} broke")
        super().start(message, payload)

    def start_rows(
        self, message: wire.Put, rows: Sequence[memoryview], there: Sequence[int], *, deadline: float
    ) -> Sequence[int]:
        self._num_puts += 1
        self._sending = self._busy(len(rows))
        for index, lane in self._sending:
            lane.begin(partial(self._send, lane.stream, self._num_puts, self._stripe(rows, index), deadline))
        self._parts = [self._control.start_rows(message, self._stripe(rows, 0), there, deadline=deadline)]
        self._checksums = [0] * len(rows)
        return self._checksums

    @staticmethod
    def _send(stream: TcpLink, put: int, rows: Sequence[memoryview], deadline: float) -> Sequence[int]:
        checksums = stream.start_rows(wire.Stripe(put=put), rows, (), deadline=deadline)
        while not stream.advance():
            stream.wait_for_room(deadline + _GRACE_S)
        return checksums

    def advance(self) -> bool:
        if not self._control.advance():
            return False
        for _, lane in self._sending:
            if not lane.wait(_STRIPE_WAIT_S):
                return False
        if self._error is not None:
            raise self._error
        if self._parts:
            parts = [*self._parts, *(lane.result() for _, lane in self._sending)]
            self._parts, self._sending = [], []
            for index, part in enumerate(parts):
                self._checksums[index :: self._count] = list(part)
        return True


def _merged(parts: Sequence[tuple[Sequence[int], Sequence[int]]], num_rows: int) -> tuple[list[int], list[int]]:
    """Checksums computed and sent, of the stripes, in the order of the rows."""
    computed, sent = [0] * num_rows, [0] * num_rows
    for index, (here, there) in enumerate(parts):
        computed[index :: len(parts)], sent[index :: len(parts)] = here, there
    return computed, sent
