"""KV rows over TCP, between any two hosts, without a copy in user space on either side.

The sender's sendmsg gathers straight from its cache memory, the receiver's recvmsg_into scatters straight into its own.
The receiver does the writing, so a closed link is a fence: no byte lands after it. A killed peer is seen at once (RST
or EOF), a vanished host by keepalive, a frozen process only by the deadlines of the layer above.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from kvtransfer import wire
from kvtransfer.region import Region
from kvtransfer.transports import Caps, Link
from twinpool.errors import ConfigError, PeerLost, TransferTimeout

log = logging.getLogger(__name__)

SCHEME = "tcp"
MAX_SILENCE_S = 300  # a receiver's longest wait for the next byte; senders close idle links long before
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a vanished host is noticed within 25 s
_IOV_MAX = os.sysconf("SC_IOV_MAX")
_SCRATCH_BYTES = 256 << 10
_WILDCARDS = ("", "0.0.0.0", "::")


class TcpTransport:
    caps = Caps(one_sided=False, fences_on_close=True, sees_dead_peer=True)

    def actual(self) -> str:
        return SCHEME

    def register(self, regions: Sequence[Region]) -> None:
        """Any memory will do."""

    def listen(self, host: str, port: int, advertise: str | None, on_link: Callable[[Link], None]) -> TcpListener:
        return TcpListener(host, port, advertise, on_link)

    def connect(self, endpoint: str, *, deadline: float) -> TcpLink:
        host, port = parse_endpoint(endpoint)
        try:
            sock = socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))
        except OSError as exc:
            raise PeerLost(f"cannot connect to {endpoint}: {exc}") from exc
        return TcpLink(sock, endpoint)


class TcpListener:
    """Accepts connections on a thread of its own."""

    def __init__(self, host: str, port: int, advertise: str | None, on_link: Callable[[Link], None]) -> None:
        """advertise: host, or host:port, that senders reach this listener at; default: where it is bound."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._sock = socket.create_server((host, port), family=family, backlog=128)
        except (OSError, OverflowError) as exc:
            raise ConfigError(f"cannot listen for KV transfers on {host}:{port}: {exc}; choose another port") from exc
        bound_port = self._sock.getsockname()[1]
        name = advertise or (socket.gethostname() if host in _WILDCARDS else host)
        self.endpoint = _format_endpoint(name, bound_port)
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
            try:
                link = TcpLink(sock, address[0])
            except OSError:  # gone already
                sock.close()
            else:
                self._on_link(link)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join(timeout=5)
        self._sock.close()


class TcpLink:
    """One connection. The socket stays in blocking mode; calls that must not wait say so one by one (MSG_DONTWAIT)."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._sock = sock
        self._unsent: deque[memoryview] = deque()
        self._replies = wire.FrameBuffer()
        self._scratch: memoryview | None = None
        self._closing = threading.Lock()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEPALIVE.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        # The kernel's own timeout, unlike settimeout, costs no poll before every call and lets MSG_WAITALL work.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", MAX_SILENCE_S, 0))

    def fileno(self) -> int:
        return self._sock.fileno()

    def start(self, message: wire.Message, payload: Sequence[memoryview] = ()) -> None:
        size = sum(map(len, payload))
        self._unsent.append(memoryview(wire.encode(message, size)))
        self._unsent.extend(payload)

    def advance(self) -> bool:
        while self._unsent:
            try:
                sent = self._sock.sendmsg(list(islice(self._unsent, _IOV_MAX)), (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError as exc:
                raise self._lost(exc) from exc
            _consume(self._unsent, sent)
        return True

    def send(self, message: wire.Message, payload: Sequence[memoryview] = (), *, deadline: float) -> None:
        self.start(message, payload)
        while not self.advance():
            self._wait(select.POLLOUT, deadline)

    def receive(self, *, deadline: float | None = None) -> wire.Frame:
        prefix = wire.parse_prefix(self._read(wire.PREFIX_BYTES, deadline))
        message = wire.parse_header(prefix.kind, self._read(prefix.header_bytes, deadline))
        return wire.Frame(message, prefix.payload_bytes)

    def fill(self, destination: Sequence[memoryview]) -> None:
        unfilled = deque(destination)
        while unfilled:
            try:
                received = self._sock.recvmsg_into(list(islice(unfilled, _IOV_MAX)), 0, socket.MSG_WAITALL)[0]
            except OSError as exc:
                raise self._lost(exc) from exc
            if not received:
                raise PeerLost(f"{self.peer} closed the link in the middle of a frame")
            _consume(unfilled, received)

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
            except OSError as exc:
                raise self._lost(exc) from exc
            if not received:
                raise PeerLost(f"{self.peer} closed the link")
            view = view[received:]
        return data

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._sock, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TransferTimeout(f"{self.peer} did not answer in time")

    def _lost(self, error: OSError) -> PeerLost:
        if isinstance(error, BlockingIOError):
            return PeerLost(f"{self.peer} was silent for {MAX_SILENCE_S} s")
        return PeerLost(f"the link to {self.peer} broke: {error}")


def _consume(pieces: deque[memoryview], num_bytes: int) -> None:
    """Drops the first `num_bytes` bytes of `pieces`."""
    while num_bytes:
        first = pieces.popleft()
        if num_bytes < len(first):
            pieces.appendleft(first[num_bytes:])
            return
        num_bytes -= len(first)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """("10.0.0.1", 7073) of "tcp://10.0.0.1:7073"; PeerLost when it is no such thing."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != SCHEME or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise PeerLost(f"{endpoint!r} is not a tcp endpoint (tcp://host:port)")
    return host.strip("[]"), int(port)


def _format_endpoint(name: str, port: int) -> str:
    if re.fullmatch(r"(\[.+\]|[^:]+):\d+", name):
        return f"{SCHEME}://{name}"
    host = f"[{name}]" if ":" in name and not name.startswith("[") else name
    return f"{SCHEME}://{host}:{port}"
