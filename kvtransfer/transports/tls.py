"""A stream over TCP inside TLS 1.3, where both sides show a certificate of the deployment's CA.

The CA is the trust: names in certificates are not compared with addresses, because any worker may talk to any other.
The handshake of TLS comes with the first message that is sent or received, in the thread that owns the link and by its
deadline: a stranger who connects and says nothing holds up no accept loop. The cluster key is proved on top of it.

An SSL connection serves one thread at a time, while a link sends from one thread and receives in another. So the
socket never waits by itself: every call is tried under a lock, and whoever has to wait polls outside of it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence

from kvtransfer import wire
from kvtransfer.transports.stream import LOOKS
from kvtransfer.transports.tcp import TcpLink
from twinpool.errors import PeerLost, TransferTimeout, TwinpoolError, Unauthenticated

_READ_BYTES = 64 << 10
_WANTS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_ENDS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)  # not about TLS: the connection is gone


class TlsLink(TcpLink):
    """Encrypts what TcpLink sends in the clear; payloads are decrypted straight into their rows."""

    def __init__(self, sock: socket.socket, peer: str, context: ssl.SSLContext, *, server_side: bool) -> None:
        super().__init__(sock, peer)
        sock.setblocking(False)
        self._tls = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        self._sock = self._tls
        self._is_plain = False
        self._io = threading.Lock()  # held for every call on the SSL connection, never while waiting
        self._is_secure = False
        self._refusal: TwinpoolError | None = None  # why the handshake failed
        self._has_heard = False  # the other side has accepted this one's certificate: it speaks

    def send(self, message: wire.Message, payload: Sequence[memoryview] = (), *, deadline: float) -> None:
        self._secure(deadline)
        super().send(message, payload, deadline=deadline)

    def advance(self) -> bool:
        while self._unsent:
            piece = self._unsent[0]
            assert isinstance(piece, memoryview)  # rows go past the TLS library only where the socket is plain
            try:
                with self._io:
                    sent = self._tls.send(piece) if piece else 0
            except _WANTS:
                return False
            except OSError as exc:
                raise self._broken(exc) from exc
            if sent == len(piece):
                self._unsent.popleft()
            else:
                self._unsent[0] = piece[sent:]
        return True

    def fill(self, destination: Sequence[memoryview]) -> None:
        for piece in destination:
            rest = piece
            while rest:
                rest = rest[self._receive_some(rest, None) :]

    def receive_ready(self) -> list[wire.Message]:
        try:
            with self._io:
                data = self._tls.recv(_READ_BYTES)
                while more := self._tls.pending():  # decrypted already: the socket is not readable for it
                    data += self._tls.recv(more)
        except _WANTS:
            return []
        except OSError as exc:
            raise self._broken(exc) from exc
        if not data:
            raise PeerLost(f"{self.peer} closed the link")
        return self._replies.feed(data)

    def cut(self) -> None:
        with self._closing, contextlib.suppress(OSError):
            # Not SSLSocket.shutdown: that would also make later calls read the encrypted bytes as they are.
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)

    def close(self) -> None:
        self._unsent.clear()
        with self._closing, self._io:
            self._tls.close()

    def _read(self, num_bytes: int, deadline: float | None) -> bytearray:
        self._secure(deadline)
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            view = view[self._receive_some(view, deadline) :]
        return data

    def _receive_some(self, view: memoryview, deadline: float | None) -> int:
        while True:
            try:
                with self._io:
                    received: int = self._tls.recv_into(view)
            except _WANTS as exc:
                self._wait_to(exc, deadline)
                continue
            except OSError as exc:
                raise self._broken(exc) from exc
            if not received:
                raise PeerLost(f"{self.peer} closed the link")
            self._has_heard = True
            self._heard_at = time.monotonic()
            return received

    def _secure(self, deadline: float | None) -> None:
        """The handshake of TLS, once. Raises Unauthenticated, at every later call too, when it does not succeed."""
        if self._is_secure:
            return
        if self._refusal is not None:
            raise self._refusal
        try:
            if self._tls.server_side:
                self._turn_away_plain_text(deadline)
            self._shake_hands(deadline)
        except TwinpoolError as exc:
            self._refusal = exc
            raise
        self._is_secure = True

    def _shake_hands(self, deadline: float | None) -> None:
        while True:
            try:
                with self._io:
                    self._tls.do_handshake()
            except _WANTS as exc:
                self._wait_to(exc, deadline)
            except OSError as exc:
                raise self._broken(exc) from exc
            else:
                return

    def _turn_away_plain_text(self, deadline: float | None) -> None:
        """A sender without certificates is told so in its own language, or it would see an end without a reason."""
        self._wait_for(select.POLLIN, deadline)
        with contextlib.suppress(OSError):
            if socket.socket.recv(self._tls, len(wire.MAGIC), socket.MSG_PEEK) != wire.MAGIC:
                return
            reason = "the receiver takes KV rows over TLS only: set --tls-cert, --tls-key and --tls-ca on all workers"
            refused = wire.Refused(push=0, error=Unauthenticated.__name__, reason=reason)
            socket.socket.send(self._tls, wire.encode(refused))
            raise Unauthenticated(f"{self.peer} does not speak TLS: set --tls-cert, --tls-key and --tls-ca there too")

    def _wait_to(self, want: OSError, deadline: float | None) -> None:
        self._wait_for(select.POLLIN if isinstance(want, ssl.SSLWantReadError) else select.POLLOUT, deadline)

    def _wait_for(self, event: int, deadline: float | None) -> None:
        descriptor = self._tls.fileno()
        if descriptor < 0:
            raise PeerLost(f"the link to {self.peer} was closed by this side")
        poll = select.poll()
        poll.register(descriptor, event)
        timeout_s = self.lease_s / LOOKS if deadline is None else max(0.0, deadline - time.monotonic())
        while not poll.poll(timeout_s * 1000):
            if deadline is not None:
                raise TransferTimeout(f"{self.peer} did not answer in time")
            self._check_lease()

    def _broken(self, error: OSError) -> TwinpoolError:
        """What an error of the socket means: before the other side was heard it may be about certificates."""
        if not self._has_heard:
            for each in (error, self._last_words(error)):
                if isinstance(each, ssl.SSLCertVerificationError):
                    return Unauthenticated(
                        f"the certificate of {self.peer} is not accepted: {each.verify_message}; "
                        "it has to be signed by the CA of --tls-ca"
                    )
                if isinstance(each, ssl.SSLError) and not isinstance(each, _ENDS) and each.reason:
                    return Unauthenticated(f"{self._reason(each.reason)} ({each.reason})")
        return PeerLost(f"the link to {self.peer} broke: {error}")

    def _last_words(self, error: OSError) -> OSError | None:
        """The alert that the other side may have sent before it closed, when this side only saw that it is closed."""
        if not self._is_secure or (isinstance(error, ssl.SSLError) and not isinstance(error, _ENDS)):
            return None
        try:
            with self._io:
                self._tls.recv(1)
        except OSError as exc:
            return exc
        return None

    def _reason(self, reason: str) -> str:
        if "ALERT" in reason:
            return (
                f"{self.peer} refuses the certificate of this process: the CA of --tls-ca there has to have signed it"
            )
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return f"{self.peer} shows no certificate: set --tls-cert, --tls-key and --tls-ca there too"
        return f"{self.peer} does not speak TLS 1.3: set --tls-cert, --tls-key and --tls-ca there too"
