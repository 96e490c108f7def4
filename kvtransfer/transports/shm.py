"""KV rows through shared memory, between two processes of one host: the sender copies them straight into place.

 1. The receiver's cache lies in a SharedMemory. It listens on an abstract unix socket with a random name, which leaves
    nothing behind when the process dies, and takes connections of its own user only.
 2. After the handshake it passes three descriptors: the memory, the writing end of a pipe, the lifeline, and a page of
    memory for this link, its progress.
 3. The sender maps the memory and asks for each push which rows it may write (Claim, Granted). A Put leaves first; then
    its rows are copied into place. How far it is shows in the progress page, so that the receiver hashes one row while
    the next is copied, without a system call at either end; the checksums follow as the payload.

The sender does the writing, so closing the socket fences nothing: a sender that is frozen in the middle of a copy goes
on with it when it thaws. It fences one push by Abort or Commit, and all of them by giving up the lifeline, which it
does after unmapping; the kernel does so for a process that is gone, after its last instruction. Until then its rows
stay in quarantine. The endpoint names the host by its boot id; whether the socket can really be reached shows in
connecting: containers with network namespaces of their own cannot, and go over TCP.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvtransfer import native, wire
from kvtransfer.memory import MappedMemory, SharedMemory
from kvtransfer.progress import Progress
from kvtransfer.region import Region
from kvtransfer.transports import Caps, Link
from kvtransfer.transports.stream import StreamLink, StreamListener
from twinpool.errors import ConfigError, PeerLost

log = logging.getLogger(__name__)

SCHEME = "shm"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ENDPOINT = re.compile(rf"{SCHEME}://([0-9a-f-]{{36}})/([0-9a-f]{{32}})")
_NUM_PASSED = 3  # descriptors
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class ShmTransport:
    caps = Caps(one_sided=True, fences_on_close=False, sees_dead_peer=True, any_source=True)

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None
        self._regions: Sequence[Region] = ()

    def actual(self) -> str:
        return SCHEME if hasattr(os, "memfd_create") and _BOOT_ID.exists() else "none"

    def register(self, regions: Sequence[Region], memory: SharedMemory | None) -> None:
        self._regions = regions
        self._memory = memory

    def listen(self, host: str, port: int, advertise: str | None, on_link: Callable[[Link], None]) -> StreamListener:
        """host, port and advertise are of no use to senders on the same host."""
        offsets = [None if self._memory is None else self._memory.offset_of(each.buffer) for each in self._regions]
        if self._memory is None or None in offsets:
            raise ConfigError("the cache is not in memory that can be shared: KV transport 'shm' cannot serve")
        layout = wire.Memory(
            size=self._memory.num_bytes,
            offsets=wire.pack_u64([offset for offset in offsets if offset is not None]),
            num_rows=wire.pack_u32([region.num_rows for region in self._regions]),
        )
        return _listen(self._memory, layout, on_link)

    def connect(self, endpoint: str, *, deadline: float) -> ShmSenderLink:
        boot_id, name = parse_endpoint(endpoint)
        if boot_id != this_host():
            raise PeerLost(f"{endpoint} is on another host")
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(_address(name))
            _check_user(sock)
        except OSError as exc:
            sock.close()
            raise PeerLost(f"cannot reach {endpoint}, which needs the same network namespace: {exc}") from exc
        return ShmSenderLink(sock, endpoint, self._regions)

    def close(self) -> None:
        """The memory is its owner's."""


def _listen(memory: SharedMemory, layout: wire.Memory, on_link: Callable[[Link], None]) -> StreamListener:
    name = secrets.token_hex(16)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(_address(name))
        sock.listen(128)
    except OSError as exc:
        sock.close()
        raise ConfigError(f"cannot listen for KV transfers on an abstract unix socket: {exc}") from exc
    return StreamListener(sock, f"{SCHEME}://{this_host()}/{name}", partial(_accepted, memory, layout), on_link)


def _accepted(memory: SharedMemory, layout: wire.Memory, sock: socket.socket, _peer: object) -> ShmReceiverLink | None:
    try:
        return ShmReceiverLink(sock, f"process {_check_user(sock)}", memory, layout)
    except OSError as exc:
        log.warning("refusing a KV link: %s", exc)
        return None


class ShmReceiverLink(StreamLink):
    """The decode worker's end: shares the memory and watches the lifeline."""

    one_sided = True
    checksums_follow = True

    def __init__(self, sock: socket.socket, peer: str, memory: SharedMemory, layout: wire.Memory) -> None:
        super().__init__(sock, peer)
        self._memory = memory
        self._layout = layout
        self._lifeline = -1
        self._progress: Progress | None = None

    def share(self, *, deadline: float) -> None:
        self._progress = Progress()
        self._lifeline, theirs = os.pipe()
        try:
            socket.send_fds(self._sock, [b"\0"], [self._memory.fileno(), theirs, self._progress.fileno()])
        except OSError as exc:
            raise PeerLost(f"cannot pass the cache memory to {self.peer}: {exc}") from exc
        finally:
            os.close(theirs)
        self.send(self._layout, deadline=deadline)

    def receive(self, *, deadline: float | None = None) -> wire.Frame:
        frame = super().receive(deadline=deadline)
        if isinstance(frame.message, wire.Put) and self._progress is not None:
            self._place = self._progress.next()
        return frame

    def fenced(self, timeout_s: float) -> bool:
        if self._lifeline < 0:
            return True  # nothing was shared
        poll = select.poll()
        poll.register(self._lifeline, 0)  # a hang-up is always reported
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        super().close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._progress is not None:
            self._progress.close()
            self._progress = None


class ShmSenderLink(StreamLink):
    """The prefill worker's end: writes into the memory that it was given."""

    one_sided = True
    checksums_follow = True
    frame_share = 8

    def __init__(self, sock: socket.socket, peer: str, regions: Sequence[Region]) -> None:
        super().__init__(sock, peer)
        self._row_bytes = [region.row_bytes for region in regions]
        self._memory: MappedMemory | None = None
        self._progress: Progress | None = None
        self._lifeline = -1
        self._offsets: tuple[int, ...] = ()
        self._num_rows: tuple[int, ...] = ()

    def expect(self, row_bytes: Sequence[int]) -> None:
        self._row_bytes = list(row_bytes)

    def attach(self, *, deadline: float) -> None:
        self._wait(select.POLLIN, deadline)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._sock, 1, _NUM_PASSED, socket.MSG_CMSG_CLOEXEC)
        except OSError as exc:
            raise self._lost(exc) from exc
        try:
            if len(descriptors) != _NUM_PASSED:
                raise PeerLost(f"{self.peer} passed {len(descriptors)} descriptors instead of {_NUM_PASSED}")
            layout = self.receive(deadline=deadline).message
            if not isinstance(layout, wire.Memory):
                raise PeerLost(f"{self.peer} sent {type(layout).__name__} instead of Memory")
            self._map(descriptors[0], descriptors[2], layout)
            self._lifeline = descriptors.pop(1)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map(self, memory: int, progress: int, layout: wire.Memory) -> None:
        self._offsets = wire.unpack_u64(layout.offsets)
        self._num_rows = wire.unpack_u32(layout.num_rows)
        if not len(self._offsets) == len(self._num_rows) == len(self._row_bytes):
            raise PeerLost(f"{self.peer} shares {len(self._offsets)} regions; {len(self._row_bytes)} are expected")
        regions = zip(self._offsets, self._num_rows, self._row_bytes, strict=True)
        if any(offset + num_rows * row_bytes > layout.size for offset, num_rows, row_bytes in regions):
            raise PeerLost(f"{self.peer} places a region outside of the {layout.size} bytes that it shares")
        try:
            self._memory = MappedMemory(memory, layout.size)
            self._progress = Progress(progress)
        except (OSError, ValueError) as exc:
            raise PeerLost(f"cannot map the cache memory of {self.peer}: {exc}") from exc

    def start_rows(
        self, message: wire.Put | wire.Stripe, rows: Sequence[memoryview], there: Sequence[int], *, deadline: float
    ) -> Sequence[int]:
        """The receiver hashes each row while the next is copied."""
        if not isinstance(message, wire.Put):
            raise TypeError("rows do not travel in stripes through shared memory")
        memory, offsets = self._places(message.region, there, rows)
        head = wire.encode(message, len(rows) * wire.CHECKSUM_BYTES)
        place = None if self._progress is None else self._progress.next()
        sending = native.sending(head, rows, memory.places(offsets, rows[0].nbytes), place)
        checksums: Sequence[int]
        if sending is not None:
            self._unsent.append(sending)
            checksums = sending.checksums
            return checksums
        checksums = memory.write(offsets, rows)
        self._unsent.extend([memoryview(head), memoryview(wire.pack_u64(checksums))])
        return checksums

    def write(self, region: int, rows: Sequence[int], sources: Sequence[memoryview], *, deadline: float) -> list[int]:
        memory, offsets = self._places(region, rows, sources)
        return memory.write(offsets, sources)

    def _places(
        self, region: int, rows: Sequence[int], sources: Sequence[memoryview]
    ) -> tuple[MappedMemory, list[int]]:
        """Where the rows lie in the receiver's memory."""
        if region >= len(self._row_bytes) or self._memory is None:
            raise wire.Malformed(f"rows of region {region} before any memory was shared")
        row_bytes, first = self._row_bytes[region], self._offsets[region]
        num_bytes = sources[0].nbytes  # each: they are of one region
        for row in (min(rows), max(rows)):
            if not 0 <= row < self._num_rows[region] or num_bytes != row_bytes:
                raise wire.Malformed(f"row {row} of region {region} with {num_bytes} bytes")
        return self._memory, [first + row * row_bytes for row in rows]

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        if self._lifeline >= 0:
            os.close(self._lifeline)  # only now: this tells the receiver that its rows are safe
            self._lifeline = -1
        super().close()


def this_host() -> str:
    """The boot id: the same for every process under one running kernel, and for no others."""
    return _BOOT_ID.read_text().strip()


def parse_endpoint(endpoint: str) -> tuple[str, str]:
    """(boot id, socket name); PeerLost when it is no such thing."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        raise PeerLost(f"{endpoint!r} is not a shm endpoint (shm://boot id/name)")
    return match[1], match[2]


def _address(name: str) -> str:
    return f"\0twinpool-kv-{name}"


def _check_user(sock: socket.socket) -> int:
    """The pid of the other end. PermissionError when it runs as another user, like on a socket of mode 0600."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(packed)
    if user != os.geteuid():
        raise PermissionError(errno.EACCES, f"the other end runs as user {user}, this process as {os.geteuid()}")
    return int(pid)
