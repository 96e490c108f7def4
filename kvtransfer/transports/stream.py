"""Messages over one connected stream socket, the payload of each in band behind its header.

The sender's sendmsg gathers straight from its cache memory, the receiver's recvmsg scatters straight into its own: no
copy in user space on either side. Rows are hashed piece by piece on both sides, while a piece is in the processor's
cache for the socket anyway (native.py; else in a pass of their own). What kind of socket it is, and what else a link
does, is its transport's business.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from typing import Any

from kvtransfer import native, wire
from kvtransfer.digest import row_checksums
from kvtransfer.lease import LEASE_S, PeerSilent
from kvtransfer.progress import Place
from kvtransfer.transports import Link
from twinpool.errors import PeerLost, TransferTimeout

log = logging.getLogger(__name__)

LOOKS = 4  # in a lease, whether it is over
_IOV_MAX = os.sysconf("SC_IOV_MAX")
_SCRATCH_BYTES = 256 << 10
_LOOK_S = 150e-6  # for the next message of a busy link: see csrc/look.h
_BUSY_S = 1e-3


class StreamListener:
    """Accepts connections on a thread of its own."""

    def __init__(
        self,
        sock: socket.socket,
        endpoint: str,
        make_link: Callable[[socket.socket, Any], Link | None],
        on_link: Callable[[Link], None],
    ) -> None:
        """sock: bound and listening, owned from here on. make_link(socket, address): None refuses the connection."""
        self.endpoint = endpoint
        self._sock = sock
        self._make_link = make_link
        self._on_link = on_link
        self._thread = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._sock.accept()
            except ConnectionAbortedError:
                continue
            except OSError as exc:
                if exc.errno in (errno.EBADF, errno.EINVAL):  # closed or shut down
                    return
                log.warning("cannot accept a KV link: %s", exc)  # out of descriptors: the backlog waits
                time.sleep(0.05)
                continue
            link = self._make_link(sock, address)
            if link is None:
                sock.close()
            else:
                self._on_link(link)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join(timeout=5)
        self._sock.close()


class StreamLink:
    """One connection. The socket stays in blocking mode; calls that must not wait say so one by one (MSG_DONTWAIT)."""

    one_sided = False
    checksums_follow = False
    takes_several = True
    frame_share = 1

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._sock = sock
        self._is_plain = type(sock) is socket.socket  # its descriptor carries the bytes as they are
        self._unsent: deque[memoryview | native.SendingRows] = deque()  # in the order in which it goes out
        self._replies = wire.FrameBuffer()
        self._scratch: memoryview | None = None
        self._place: Place | None = None  # where rows are written by the other end: see progress.py
        self._is_busy = False  # the last message came soon after the one before
        self._closing = threading.Lock()
        self._whole = threading.Lock()  # held while `send` sends one message: it may be called from several threads
        sock.settimeout(None)
        self.agree(LEASE_S)

    def fileno(self) -> int:
        return self._sock.fileno()

    def start(self, message: wire.Message, payload: Sequence[memoryview] = ()) -> None:
        size = sum(map(len, payload))
        self._unsent.append(memoryview(wire.encode(message, size)))
        self._unsent.extend(payload)

    def start_rows(
        self, message: wire.Put | wire.Stripe, rows: Sequence[memoryview], there: Sequence[int], *, deadline: float
    ) -> Sequence[int]:
        head = wire.encode(message, len(rows) * (rows[0].nbytes + wire.CHECKSUM_BYTES))
        sending = native.sending(head, rows) if self._is_plain else None
        checksums: Sequence[int]
        if sending is not None:
            self._unsent.append(sending)
            checksums = sending.checksums
            return checksums
        checksums = row_checksums(rows)
        self._unsent.extend([memoryview(head), *rows, memoryview(wire.pack_u64(checksums))])
        return checksums

    def advance(self) -> bool:
        while self._unsent:
            first = self._unsent[0]
            try:
                if isinstance(first, native.SendingRows):
                    if not first.advance(self._sock.fileno()):
                        return False
                    self._unsent.popleft()
                else:
                    plain: Iterable[Any] = takewhile(lambda each: isinstance(each, memoryview), self._unsent)
                    sent = self._sock.sendmsg(list(islice(plain, _IOV_MAX)), (), socket.MSG_DONTWAIT)
                    _consume(self._unsent, sent)
            except BlockingIOError:
                return False
            except OSError as exc:
                raise self._lost(exc) from exc
        return True

    def send(self, message: wire.Message, payload: Sequence[memoryview] = (), *, deadline: float) -> None:
        with self._whole:
            self.start(message, payload)
            while not self.advance():
                self._wait(select.POLLOUT, deadline)

    def receive(self, *, deadline: float | None = None) -> wire.Frame:
        began_at = time.monotonic()
        if deadline is None and self._is_busy and self._is_plain:
            native.look(self._sock.fileno(), _LOOK_S)
        prefix = wire.parse_prefix(self._read(wire.PREFIX_BYTES, deadline))
        self._is_busy = time.monotonic() < began_at + _BUSY_S
        message = wire.parse_header(prefix.kind, self._read(prefix.header_bytes, deadline))
        return wire.Frame(message, prefix.payload_bytes)

    def fill(self, destination: Sequence[memoryview]) -> None:
        unfilled = deque(destination)
        while unfilled:
            try:
                received = self._sock.recvmsg_into(list(islice(unfilled, _IOV_MAX)), 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                self._check_lease()
                continue
            except OSError as exc:
                raise self._lost(exc) from exc
            if not received:
                raise PeerLost(f"{self.peer} closed the link in the middle of a frame")
            self._heard_at = time.monotonic()
            _consume(unfilled, received)

    def fill_rows(self, rows: Sequence[memoryview]) -> tuple[Sequence[int], Sequence[int]]:
        try:
            checksums = None
            if self._is_plain:
                checksums = native.receive_rows(self._sock.fileno(), rows, self._silence(), in_place=self._place)
        except OSError as exc:
            raise self._lost(exc) from exc
        except EOFError:
            raise PeerLost(f"{self.peer} closed the link in the middle of a frame") from None
        if checksums is not None:
            self._heard_at = time.monotonic()
            return checksums
        sent = bytearray(wire.CHECKSUM_BYTES * len(rows))
        self.fill([memoryview(sent)] if self.checksums_follow else [*rows, memoryview(sent)])
        return row_checksums(rows), wire.unpack_u64(bytes(sent))

    def skip(self, num_bytes: int) -> None:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        while num_bytes:
            piece = self._scratch[: min(num_bytes, _SCRATCH_BYTES)]
            self.fill([piece])
            num_bytes -= len(piece)

    def receive_ready(self) -> list[wire.Message]:
        try:
            data = self._sock.recv(wire.MAX_HEADER_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as exc:
            raise self._lost(exc) from exc
        if not data:
            raise PeerLost(f"{self.peer} closed the link")
        return self._replies.feed(data)

    def agree(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._heard_at = time.monotonic()
        # The kernel's own timeout, unlike settimeout, costs no poll before every call and lets MSG_WAITALL work.
        seconds, rest = divmod(lease_s / LOOKS, 1)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), int(1e6 * rest)))

    def beat(self) -> None:
        if not self._whole.acquire(blocking=False):
            return
        try:
            if not self._unsent:
                self.start(wire.Heartbeat())
            self.advance()  # the rest of it, if any, leaves with what is sent next
        finally:
            self._whole.release()

    def share(self, *, deadline: float) -> None:
        """Rows travel in band: there is nothing to share."""

    def expect(self, row_bytes: Sequence[int]) -> None:
        """Every frame says how long it is."""

    def attach(self, *, deadline: float) -> None:
        """Rows travel in band: there is nothing to attach to."""

    def write(self, region: int, rows: Sequence[int], sources: Sequence[memoryview], *, deadline: float) -> list[int]:
        raise TypeError("rows travel in band on this link")

    def fenced(self, timeout_s: float) -> bool:
        """The receiver does the writing: once the link is cut no byte can land."""
        return True

    def drained(self, timeout_s: float) -> bool:
        """What was sent has been copied."""
        return True

    def cut(self) -> None:
        with self._closing, contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._unsent.clear()
        with self._closing:  # or `cut` could shut down whoever gets this descriptor next
            self._sock.close()

    def _read(self, num_bytes: int, deadline: float | None) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            if deadline is not None:
                self._wait(select.POLLIN, deadline)
            try:
                received = self._sock.recv_into(
                    view, 0, socket.MSG_WAITALL if deadline is None else socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                self._check_lease()
                continue
            except OSError as exc:
                raise self._lost(exc) from exc
            if not received:
                raise PeerLost(f"{self.peer} closed the link")
            self._heard_at = time.monotonic()
            view = view[received:]
        return data

    def hear(self) -> None:
        """The other end had no reason to speak until now: its lease begins anew."""
        self._heard_at = time.monotonic()

    def wait_for_room(self, deadline: float) -> None:
        self._wait(select.POLLOUT, deadline)

    def _silence(self) -> Callable[[int], None]:
        """For every time the socket's timeout passes in one long read: raises, unless bytes came since the last."""
        before = 0

        def check(num_bytes: int) -> None:
            nonlocal before
            if num_bytes > before:
                before, self._heard_at = num_bytes, time.monotonic()
            self._check_lease()

        return check

    def _check_lease(self) -> None:
        if time.monotonic() >= self._heard_at + self.lease_s:
            raise PeerSilent.after(self.peer, self.lease_s)

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._sock, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TransferTimeout(f"{self.peer} did not answer in time")

    def _lost(self, error: OSError) -> PeerLost:
        return PeerLost(f"the link to {self.peer} broke: {error}")


def _consume(pieces: deque[Any], num_bytes: int) -> None:
    """Drops the first `num_bytes` bytes of `pieces`, which are memoryviews so far."""
    while num_bytes:
        first = pieces.popleft()
        if num_bytes < len(first):
            pieces.appendleft(first[num_bytes:])
            return
        num_bytes -= len(first)
