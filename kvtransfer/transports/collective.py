"""KV rows by torch.distributed, point to point: gloo on CPUs, nccl on CUDA, hccl on Ascend (process_group.py).

For fabrics that only these libraries drive, and for static groups: worker hosts that can all reach each other on any
port, and a set of workers that seldom changes, because every link costs a rendezvous, some threads and descriptors on
both ends. Never chosen by "auto".

 1. Messages travel on a TCP link of their own (with TLS where certificates are configured).
 2. After the handshake the receiver names a store and a secret prefix in it (Group); both ends make a group of two.
 3. The payload of a Put goes over the group, row by row: the receiver posts its rows only after the header passed all
    checks, straight into their memory. The rows' checksums are on the TCP link, behind the header.

What the group carries is not encrypted, and who knows the prefix may take an end's place before that end comes; the
checksums on the control link find rows that were changed. With certificates it has to be accepted explicitly.

Fence: a row is posted, and waited for, by the thread that owns the link, so that nothing is pending when `close` is
reached. A frozen sender ends that wait after FRAME_TIMEOUT_S, upon which the library breaks the connection: no byte
lands after that. `cut` takes as long, where it meets such a wait.
"""

from __future__ import annotations

import os
import queue
import secrets
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvtransfer import wire
from kvtransfer.digest import row_checksums
from kvtransfer.memory import SharedMemory
from kvtransfer.region import Region
from kvtransfer.transports import Caps, Link, Listener
from kvtransfer.transports.controlled import ControlledLink
from kvtransfer.transports.process_group import GroupOfTwo, check_backend, join_store, serve_store
from kvtransfer.transports.tcp import TcpLink, TcpTransport, parse_endpoint
from twinpool.certificates import Certificates
from twinpool.errors import ConfigError, PeerLost, TransferTimeout

SCHEME = "collective"
FRAME_TIMEOUT_S = 4.0  # for the rows of one frame; less than a reservation waits for a cut link
_STORE_TIMEOUT_S = 10.0


class CollectiveTransport:
    caps = Caps(one_sided=False, fences_on_close=True, sees_dead_peer=True)

    def __init__(self, backend: str, certificates: Certificates | None, accept_plaintext: bool) -> None:
        """Raises ConfigError when the backend cannot run here, or rows would leave TLS without anybody's consent."""
        check_backend(backend)
        if certificates is not None and not accept_plaintext:
            raise ConfigError(
                "KV transport 'collective' encrypts messages but not rows: choose tcp, or accept it with "
                "--kv-collective-plaintext",
                field="kv_transport",
            )
        self._backend = backend
        self._control = TcpTransport(certificates)
        self._regions: Sequence[Region] = ()

    def actual(self) -> str:
        return SCHEME

    def register(self, regions: Sequence[Region], memory: SharedMemory | None) -> None:
        self._regions = regions

    def listen(self, host: str, port: int, advertise: str | None, on_link: Callable[[Link], None]) -> Listener:
        try:
            store, store_port = serve_store(host, _STORE_TIMEOUT_S)
        except (OSError, RuntimeError) as exc:
            raise ConfigError(f"cannot serve the store of KV transport 'collective' on {host}: {exc}") from exc

        stores = [store]

        def wrap(control: Link) -> None:
            assert isinstance(control, TcpLink)
            on_link(ReceivingLink(control, self._backend, self._regions, stores[0], store_port))

        return CollectiveListener(self._control.listen(host, port, advertise, wrap), stores)

    def connect(self, endpoint: str, *, deadline: float) -> SendingLink:
        scheme, _, address = endpoint.partition("://")
        if scheme != SCHEME:
            raise PeerLost(f"{endpoint!r} is not a {SCHEME} endpoint ({SCHEME}://host:port)")
        control = self._control.connect(f"tcp://{address}", deadline=deadline)
        return SendingLink(control, self._backend, self._regions, parse_endpoint(f"tcp://{address}")[0])

    def close(self) -> None:
        """Holds nothing: groups belong to links."""


class CollectiveListener:
    """A TCP listener under the name of this transport."""

    def __init__(self, control: Listener, stores: list[Any]) -> None:
        """stores: the one that links are told of. It ends when the last link does, or with this listener."""
        self._control = control
        self._stores = stores
        self.endpoint = control.endpoint.replace("tcp://", f"{SCHEME}://", 1)

    def close(self) -> None:
        self._control.close()
        self._stores.clear()


class CollectiveLink(ControlledLink):
    """What both ends share. The receiver does the writing and waits for what it has posted, so close is a fence."""

    one_sided = False

    def __init__(self, control: TcpLink, backend: str, regions: Sequence[Region]) -> None:
        super().__init__(control)
        self._backend = backend
        self._row_bytes = [region.row_bytes for region in regions]
        self._group: GroupOfTwo | None = None

    def close(self) -> None:
        super().close()
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _join(self, store: Any, name: str, rank: int, deadline: float) -> None:
        local_host = self._control.local_host()
        timeout_s = max(0.01, deadline - time.monotonic())
        self._group = GroupOfTwo(self._backend, store, name, rank, local_host, timeout_s)


class ReceivingLink(CollectiveLink):
    """The decode worker's end."""

    def __init__(
        self, control: TcpLink, backend: str, regions: Sequence[Region], store: object, store_port: int
    ) -> None:
        super().__init__(control, backend, regions)
        self._store: Any = store
        self._store_port = store_port
        self._rows = (0, 0)  # of the Put just received: how many, and bytes of each

    def share(self, *, deadline: float) -> None:
        name = secrets.token_hex(16)
        self.send(wire.Group(port=self._store_port, name=name), deadline=deadline)
        self._join(self._store, name, 0, deadline)

    def receive(self, *, deadline: float | None = None) -> wire.Frame:
        frame = self._control.receive(deadline=deadline)
        self._rows = (0, 0)
        put = frame.message
        if not isinstance(put, wire.Put) or put.region >= len(self._row_bytes):
            return frame
        self._rows = num_rows, row_bytes = len(put.positions) // 4, self._row_bytes[put.region]
        return wire.Frame(put, frame.payload_bytes + num_rows * row_bytes)  # as if they were behind the header

    def fill_rows(self, rows: Sequence[memoryview]) -> tuple[Sequence[int], Sequence[int]]:
        sent = bytearray(wire.CHECKSUM_BYTES * len(rows))
        self._control.fill([memoryview(sent)])
        self._take(rows)
        return row_checksums(rows), wire.unpack_u64(bytes(sent))

    def skip(self, num_bytes: int) -> None:
        (num_rows, row_bytes), self._rows = self._rows, (0, 0)
        self._control.skip(num_bytes - num_rows * row_bytes)
        scratch = memoryview(bytearray(row_bytes))
        for _ in range(num_rows):
            self._take([scratch])

    def close(self) -> None:
        super().close()
        self._store = None

    def _take(self, rows: Sequence[memoryview]) -> None:
        if self._group is None:
            raise PeerLost(f"{self.peer} sent rows before its group was made")
        self._group.receive(rows, FRAME_TIMEOUT_S)


class SendingLink(CollectiveLink):
    """The prefill worker's end. A thread of its own waits for the rows to leave, as the libraries have only waits."""

    def __init__(self, control: TcpLink, backend: str, regions: Sequence[Region], store_host: str) -> None:
        super().__init__(control, backend, regions)
        self._store_host = store_host
        self._frames: queue.SimpleQueue[Sequence[memoryview] | None] = queue.SimpleQueue()
        self._leaving = False  # rows of the message begun are with the thread
        self._left: queue.SimpleQueue[PeerLost | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._done = -1  # eventfd: rows have left
        self._events: select.epoll | None = None  # of the socket and the eventfd
        self._watches_room = False

    def fileno(self) -> int:
        return self._control.fileno() if self._events is None else self._events.fileno()

    def expect(self, row_bytes: Sequence[int]) -> None:
        raise TypeError("rows of other sizes are refused on this link")

    def attach(self, *, deadline: float) -> None:
        answer = self._control.receive(deadline=deadline).message
        if not isinstance(answer, wire.Group):
            raise PeerLost(f"{self.peer} sent {type(answer).__name__} instead of Group")
        try:
            store = join_store(self._store_host, answer.port, max(0.01, deadline - time.monotonic()))
        except RuntimeError as exc:
            raise PeerLost(f"cannot reach the store of {self.peer}: {exc}") from exc
        self._join(store, answer.name, 1, deadline)
        self._done = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events = select.epoll(2)
        self._events.register(self._control.fileno(), select.EPOLLIN)
        self._events.register(self._done, select.EPOLLIN)
        self._thread = threading.Thread(target=self._send_rows, name=f"kv-group {self.peer}", daemon=True)
        self._thread.start()

    def send(self, message: wire.Message, payload: Sequence[memoryview] = (), *, deadline: float) -> None:
        if not isinstance(message, wire.Put):
            super().send(message, payload, deadline=deadline)
            return
        self.start(message, payload)
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        while not self.advance():
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TransferTimeout(f"{self.peer} did not take rows in time")

    def start(self, message: wire.Message, payload: Sequence[memoryview] = ()) -> None:
        """Of a Put's payload all but the checksums at its end goes over the group."""
        if isinstance(message, wire.Put) and payload:
            rows, payload = self._parted(message, payload)
            self._leaving = True
            self._frames.put(rows)
        self._control.start(message, payload)

    def start_rows(
        self, message: wire.Put, rows: Sequence[memoryview], there: Sequence[int], *, deadline: float
    ) -> Sequence[int]:
        checksums = row_checksums(rows)
        self._leaving = True
        self._frames.put(rows)
        self._control.start(message, [memoryview(wire.pack_u64(checksums))])
        return checksums

    def advance(self) -> bool:
        is_out = self._control.advance()
        self._watch_room(not is_out)
        if not is_out:
            return False
        if self._leaving:
            try:
                os.eventfd_read(self._done)
            except BlockingIOError:
                return False
            failure = self._left.get()  # it was put there first
            self._leaving = False
            if failure is not None:
                raise failure
        return True

    def drained(self, timeout_s: float) -> bool:
        if self._thread is None:
            return True
        self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        if self._events is None:
            super().close()
            return
        self._control.close()
        self._events.close()
        self._events = None
        self._frames.put(None)  # the thread ends after what it waits for, and closes the rest
        if not self._leaving and self._thread is not None:
            self._thread.join()

    def _send_rows(self) -> None:
        assert self._group is not None
        while (rows := self._frames.get()) is not None:
            failure = None
            try:
                self._group.send(rows, FRAME_TIMEOUT_S)
            except PeerLost as exc:
                failure = exc
            self._left.put(failure)
            os.eventfd_write(self._done, 1)
        self._group.close()
        os.close(self._done)

    def _watch_room(self, wanted: bool) -> None:
        if self._events is not None and wanted != self._watches_room:
            self._watches_room = wanted
            self._events.modify(self._control.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def _parted(
        self, message: wire.Put, payload: Sequence[memoryview]
    ) -> tuple[Sequence[memoryview], Sequence[memoryview]]:
        whole = memoryview(bytearray(b"".join(payload)))  # only where faults are injected: they copied it before
        num_rows = len(message.positions) // 4
        rows, checksums = whole[: -wire.CHECKSUM_BYTES * num_rows], whole[-wire.CHECKSUM_BYTES * num_rows :]
        size = len(rows) // num_rows
        return [rows[row * size : (row + 1) * size] for row in range(num_rows)], [checksums]
