"""What the sync and the async client share about a call: where it goes, until when, how often, and how it fails.

1. `Routers` holds the addresses, the channel to each, and which answered last.
2. Each call makes one `Attempts`. `start` sends one try with the time that is left; after a failure `failed` says how
   long to wait before the next, or raises the typed error.
3. An unreachable router (UNAVAILABLE) is left for the next one at once. When all have failed, and when a router is full
   (RESOURCE_EXHAUSTED), a round is over; `retries` more rounds follow, after a jittered, growing wait or the one that
   the router asked for. No wait goes past the deadline. Once a token was delivered nothing is tried again.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import grpc

from twinpool import certificates, errors
from twinpool.v1 import router_pb2 as v1
from twinpool.v1.router_pb2_grpc import RouterStub

DEFAULT_ADDRESS = "127.0.0.1:7070"
_DEFAULT_PORT = 7070
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_MAX_MESSAGE_BYTES = 64 << 20  # as the router's
_CONNECT_TIMEOUT_MS = 5000
_RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class ConnectionOptions(TypedDict, total=False):
    """Keyword arguments of Client and AsyncClient."""

    timeout_s: float  # the most a call may take, retries included; a request's deadline_s replaces it; default 600
    retries: int  # further rounds when routers are unreachable or full and no token was delivered; default 2
    keepalive_s: float  # a router silent for about twice this while a call waits is dead; default 10, at least 1
    metadata: Sequence[tuple[str, str]]  # sent with every call, for a proxy in front of the router
    credentials: grpc.ChannelCredentials | None  # default: TLS as TWINPOOL_TLS_CA (_CERT, _KEY) say, else plain text


class Routers:
    """The routers a client knows, with one channel to each, opened when first used.

    `library` opens the channels: grpc or grpc.aio. `preferred` is written by whichever call last got an answer.
    """

    def __init__(
        self,
        address: str | Sequence[str] | None,
        library: Any,
        *,
        timeout_s: float = 600.0,
        retries: int = 2,
        keepalive_s: float = 10.0,
        metadata: Sequence[tuple[str, str]] = (),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        if address is None:
            address = os.environ.get("TWINPOOL_ROUTERS") or DEFAULT_ADDRESS
        texts = address.split(",") if isinstance(address, str) else address
        self.addresses = [_with_port(text.strip()) for text in texts if text.strip()]
        if not self.addresses:
            raise errors.ConfigError("no router address given; name one as HOST:PORT", field="address")
        self.preferred = 0
        self.metadata = tuple(metadata)
        self._timeout_s = timeout_s
        self._retries = retries
        self._keepalive_ms = int(keepalive_s * 1000)
        self._library = library
        self._credentials = credentials or _credentials_from_environment()
        self._lock = threading.Lock()
        self._channels: dict[int, tuple[Any, Any]] = {}  # address index -> (channel, stub)
        self._closed = False

    def attempts(self, deadline_s: float | None = None) -> Attempts:
        """The tries of a new call, within the request's deadline or else the client's timeout."""
        return Attempts(self, self._retries, self._timeout_s if deadline_s is None else deadline_s)

    def stub(self, index: int) -> Any:
        with self._lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            if index not in self._channels:
                channel = self.open(self.addresses[index])
                self._channels[index] = (channel, RouterStub(channel))
            return self._channels[index][1]

    def detach(self) -> list[Any]:
        """The open channels, for the caller to close; nothing can be called any more."""
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, {}
        return [channel for channel, _ in channels.values()]

    def open(self, address: str) -> Any:
        """A channel of its own to a router, secured as the client's are; the caller closes it."""
        options = [
            # Pings while a call waits, so that a frozen router or a dead link ends the call. keepalive_time alone was
            # seen not to notice a frozen peer; with ping_timeout_ms it does.
            ("grpc.keepalive_time_ms", self._keepalive_ms),
            ("grpc.keepalive_timeout_ms", self._keepalive_ms),
            ("grpc.http2.ping_timeout_ms", self._keepalive_ms),
            ("grpc.http2.max_pings_without_data", 0),
            # A router that comes back is found within a second or two; the minimum is also the time to connect.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),  # else clients of one process would share each other's keepalive
        ]
        if address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]"):
            options.append(("grpc.enable_http_proxy", 0))  # a proxy cannot reach this machine's loopback
        if self._credentials is None:
            return self._library.insecure_channel(address, options)
        return self._library.secure_channel(address, self._credentials, options)


def _credentials_from_environment() -> grpc.ChannelCredentials | None:
    """For a router that serves over TLS: its CA, and where it asks callers for one a certificate with its key."""
    paths = {name: os.environ.get(f"TWINPOOL_TLS_{name}") for name in ("CA", "KEY", "CERT")}
    if not paths["CA"]:
        return None
    try:
        ca, key, cert = (Path(path).read_bytes() if path else None for path in paths.values())
    except OSError as error:
        raise errors.ConfigError(
            f"{error.filename}: {error.strerror}; check TWINPOOL_TLS_CA, TWINPOOL_TLS_CERT and TWINPOOL_TLS_KEY"
        ) from error
    if (key is None) != (cert is None):
        raise errors.ConfigError("TWINPOOL_TLS_CERT and TWINPOOL_TLS_KEY belong together: set both or neither")
    return grpc.ssl_channel_credentials(ca, private_key=key, certificate_chain=cert)


class Attempts:
    """The tries of one call."""

    def __init__(self, routers: Routers, retries: int, timeout_s: float) -> None:
        self._routers = routers
        self._index = routers.preferred
        self._rounds_left = retries
        self._round = 0
        self._tried = 1  # addresses in this round
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def address(self) -> str:
        return self._routers.addresses[self._index]

    def start(self, method: str, request: Any) -> Any:
        """Sends one try; what the stub returns. A request that carries a deadline gets what is left of it."""
        # never below a millisecond: gRPC itself then reports that the time is up
        remaining_s = max(0.001, self._end - time.monotonic())
        if isinstance(request, v1.GenerateRequest) and request.deadline_ms:
            request.deadline_ms = max(1, int(remaining_s * 1000))
        call = getattr(self._routers.stub(self._index), method)
        return call(request, timeout=remaining_s, metadata=self._routers.metadata)

    def failed(self, failure: grpc.RpcError, *, final: bool = False) -> float:
        """Seconds to wait before the next try; raises the typed error when there is none, or when this was `final`."""
        error = self._typed(failure)
        if final or error.code not in _RETRYABLE:
            raise error from failure
        wait_s = 0.0
        if error.code is grpc.StatusCode.UNAVAILABLE and self._tried < len(self._routers.addresses):
            self._tried += 1
            self._index = (self._index + 1) % len(self._routers.addresses)
        elif self._rounds_left > 0:
            wait_s = self._backoff_s(error.retry_after_s)
            self._rounds_left -= 1
            self._round += 1
            self._tried = 1
        else:
            raise error from failure
        if time.monotonic() + wait_s >= self._end:
            raise error from failure
        return wait_s

    def answered(self) -> None:
        """This router answers: later calls begin with it."""
        self._routers.preferred = self._index

    def _backoff_s(self, asked_s: float | None) -> float:
        if asked_s is not None:
            return asked_s * random.uniform(1.0, 1.25)  # not all of the refused at the same moment
        return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0**self._round) * random.uniform(0.5, 1.0)

    def _typed(self, failure: Any) -> errors.TwinpoolError:
        """The error of a failed call; what gRPC itself reports gets a message that says what to do."""
        code, details = failure.code(), failure.details() or ""
        metadata = failure.trailing_metadata() or ()
        if any(key == errors.KIND_KEY for key, _ in metadata):
            return errors.from_status(code, details, metadata)
        if code is grpc.StatusCode.UNAVAILABLE:
            return errors.Unavailable(
                f"no router answers at {self.address} ({_reason(details)}); "
                "start one (`twinpool up`) or check the address"
            )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(
                f"no whole answer from {self.address} within {self._timeout_s:g} s; "
                "allow more with deadline_s or timeout_s"
            )
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
            return errors.InvalidRequest(f"the request or its answer is too large to send: {details}", field="prompt")
        return errors.from_status(code, details, metadata)


def _with_port(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, str(_DEFAULT_PORT)
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535 or "/" in address:
        raise errors.ConfigError(
            f"router address {address!r} is not HOST:PORT (such as {DEFAULT_ADDRESS})", field="address"
        )
    return f"{host}:{port}"


def _reason(details: str) -> str:
    """The end of gRPC's long story: "connection refused" rather than every address it tried."""
    reason = details.rpartition("last error: ")[2] or "no reason given"
    return (reason.rpartition("connect: ")[2] or reason) + certificates.hint(reason)
