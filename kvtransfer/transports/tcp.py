"""KV rows over TCP, between any two hosts, without a copy in user space on either side.

The receiver does the writing, so a closed link is a fence: no byte lands after it. A killed peer is seen at once (RST
or EOF), a vanished host by keepalive, a frozen process only by the deadlines of the layer above.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import time
from collections.abc import Callable, Sequence

from kvtransfer.memory import SharedMemory
from kvtransfer.region import Region
from kvtransfer.transports import Caps, Link
from kvtransfer.transports.stream import StreamLink, StreamListener
from twinpool.certificates import Certificates
from twinpool.errors import ConfigError, PeerLost

log = logging.getLogger(__name__)

SCHEME = "tcp"
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a vanished host is noticed within 25 s
# Between processes of one host: what is on its way stays in the cache that they share. (The kernel takes this for data
# and as much again for its own. Over a network it finds out by itself how much the way holds.)
_LOCAL_SEND_BYTES = 512 << 10
_LOCAL_FRAME_SHARE = 4  # 32 MiB, some 8 ms: what both ends do between two frames would take a fifth of the time
_WILDCARDS = ("", "0.0.0.0", "::")


class TcpTransport:
    caps = Caps(one_sided=False, fences_on_close=True, sees_dead_peer=True, any_source=True)

    def __init__(self, certificates: Certificates | None = None) -> None:
        """certificates: for TLS on every connection, in both directions; None: plain text."""
        self._certificates = certificates

    def actual(self) -> str:
        return SCHEME

    def register(self, regions: Sequence[Region], memory: SharedMemory | None) -> None:
        """Any memory will do."""

    def listen(self, host: str, port: int, advertise: str | None, on_link: Callable[[Link], None]) -> StreamListener:
        """advertise: host, or host:port, that senders reach this listener at; default: where it is bound."""
        return listen(SCHEME, (host, port, advertise), self.accepted, on_link)

    def connect(self, endpoint: str, *, deadline: float) -> TcpLink:
        sock = dial(endpoint, SCHEME, deadline)
        return _link(sock, endpoint, self._certificates, server_side=False)

    def close(self) -> None:
        """Holds nothing."""

    def accepted(self, sock: socket.socket, peer: str) -> TcpLink:
        """The link of a connection that was accepted; peer: the sender's host."""
        return _link(sock, peer, self._certificates, server_side=True)


def dial(endpoint: str, scheme: str, deadline: float) -> socket.socket:
    """A connection to `endpoint`, or PeerLost."""
    address = parse_endpoint(endpoint, scheme)
    try:
        return socket.create_connection(address, timeout=max(0.001, deadline - time.monotonic()))
    except OSError as exc:
        raise PeerLost(f"cannot connect to {endpoint}: {exc}") from exc


def listen(
    scheme: str,
    address: tuple[str, int, str | None],
    make_link: Callable[[socket.socket, str], Link],
    on_link: Callable[[Link], None],
) -> StreamListener:
    """address: host, port, and the host, or host:port, that senders reach it at (default: where it is bound).

    make_link(socket, host of the sender).
    """
    host, port, advertise = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"cannot listen for KV transfers on {host}:{port}: {exc}; choose another port") from exc
    endpoint = _format_endpoint(scheme, advertise or reachable_name(host), sock.getsockname()[1])

    def accepted(sock: socket.socket, address: tuple[str, int]) -> Link | None:
        try:
            return make_link(sock, address[0])
        except OSError:  # gone already
            return None

    return StreamListener(sock, endpoint, accepted, on_link)


def reachable_name(host: str) -> str:
    """How others reach what listens on `host`."""
    return socket.gethostname() if host in _WILDCARDS else host


def _link(sock: socket.socket, peer: str, certificates: Certificates | None, *, server_side: bool) -> TcpLink:
    if certificates is None:
        return TcpLink(sock, peer)
    from kvtransfer.transports.tls import TlsLink  # which is a TcpLink

    context = certificates.server if server_side else certificates.client
    return TlsLink(sock, peer, context, server_side=server_side)


class TcpLink(StreamLink):
    """A stream over TCP."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEPALIVE.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        with contextlib.suppress(OSError):  # gone already: whoever uses it first will see
            if sock.getsockname()[0] == sock.getpeername()[0]:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BYTES)
                self.frame_share = _LOCAL_FRAME_SHARE
        super().__init__(sock, peer)

    def local_host(self) -> str:
        """The address of this end."""
        host: str = self._sock.getsockname()[0]
        return host


def parse_endpoint(endpoint: str, scheme: str = SCHEME) -> tuple[str, int]:
    """("10.0.0.1", 7073) of "tcp://10.0.0.1:7073"; PeerLost when it is no such thing."""
    found, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if found != scheme or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise PeerLost(f"{endpoint!r} is not a {scheme} endpoint ({scheme}://host:port)")
    return host.strip("[]"), int(port)


def _format_endpoint(scheme: str, name: str, port: int) -> str:
    if re.fullmatch(r"(\[.+\]|[^:]+):\d+", name):
        return f"{scheme}://{name}"
    host = f"[{name}]" if ":" in name and not name.startswith("[") else name
    return f"{scheme}://{host}:{port}"
