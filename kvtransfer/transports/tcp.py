"""KV rows over TCP, between any two hosts, without a copy in user space on either side.

The receiver does the writing, so a closed link is a fence: no byte lands after it. A killed peer is seen at once (RST
or EOF), a vanished host by keepalive, a frozen process only by the deadlines of the layer above.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvtransfer.memory import SharedMemory
from kvtransfer.region import Region
from kvtransfer.transports import Caps, Link
from kvtransfer.transports.stream import StreamLink, StreamListener
from twinpool.certificates import Certificates
from twinpool.errors import ConfigError, PeerLost

log = logging.getLogger(__name__)

SCHEME = "tcp"
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a vanished host is noticed within 25 s
_WILDCARDS = ("", "0.0.0.0", "::")


class TcpTransport:
    caps = Caps(one_sided=False, fences_on_close=True, sees_dead_peer=True)

    def __init__(self, certificates: Certificates | None = None) -> None:
        """certificates: for TLS on every connection, in both directions; None: plain text."""
        self._certificates = certificates

    def actual(self) -> str:
        return SCHEME

    def register(self, regions: Sequence[Region], memory: SharedMemory | None) -> None:
        """Any memory will do."""

    def listen(self, host: str, port: int, advertise: str | None, on_link: Callable[[Link], None]) -> StreamListener:
        """advertise: host, or host:port, that senders reach this listener at; default: where it is bound."""
        return _listen(host, port, advertise, partial(_accepted, self._certificates), on_link)

    def connect(self, endpoint: str, *, deadline: float) -> TcpLink:
        host, port = parse_endpoint(endpoint)
        try:
            sock = socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))
        except OSError as exc:
            raise PeerLost(f"cannot connect to {endpoint}: {exc}") from exc
        return _link(sock, endpoint, self._certificates, server_side=False)


def _listen(
    host: str,
    port: int,
    advertise: str | None,
    make_link: Callable[[socket.socket, Any], Link | None],
    on_link: Callable[[Link], None],
) -> StreamListener:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"cannot listen for KV transfers on {host}:{port}: {exc}; choose another port") from exc
    name = advertise or (socket.gethostname() if host in _WILDCARDS else host)
    return StreamListener(sock, _format_endpoint(name, sock.getsockname()[1]), make_link, on_link)


def _accepted(certificates: Certificates | None, sock: socket.socket, address: tuple[str, int]) -> TcpLink | None:
    try:
        return _link(sock, address[0], certificates, server_side=True)
    except OSError:  # gone already
        return None


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
        super().__init__(sock, peer)

    def local_host(self) -> str:
        """The address of this end."""
        host: str = self._sock.getsockname()[0]
        return host


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
