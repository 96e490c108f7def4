"""A gRPC process: its event loop, its server, and the channels to its peers.

    async def main(stop: asyncio.Event) -> None:
        serving = await serve(
            [Service(name="twinpool.v1.Decode", add=add_DecodeServicer_to_server, servicer=servicer, internal=True)],
            host=config.host, port=config.port, cluster_key=config.cluster_key,
        )
        announce_ready("10.0.0.7:7072", http.port, config.ready_file)
        try:
            await stop.wait()                  # SIGTERM or SIGINT
            await serving.set_serving(False)   # health says NOT_SERVING while the process drains
        finally:
            await serving.stop(grace_s=5)

    run(main)

Handlers raise errors of twinpool/errors.py; the server turns them into a status with metadata. Anything else becomes
INTERNAL with a short id under which the log has the traceback. Peers use `channel(address, cluster_key, certificates)`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from service.address import bind_error, check_bindable, join
from service.security import ClusterKeyInterceptor, key_metadata
from twinpool.certificates import Certificates
from twinpool.errors import ConfigError, Internal, InvalidRequest, TwinpoolError, to_metadata

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
MAX_DETAILS_CHARS = 2000  # a status travels in HTTP/2 headers, which peers limit to 8 KiB

# A frozen peer (SIGSTOP, a paused container) answers no ping. Keepalive alone was seen not to notice it, because
# another ping of gRPC's own was pending; ping_timeout_ms ends that one too.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 3000),
    ("grpc.keepalive_timeout_ms", 4000),
    ("grpc.http2.ping_timeout_ms", 4000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_MESSAGES = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
_SERVER_OPTIONS = [
    *_KEEPALIVE,
    *_MESSAGES,
    ("grpc.so_reuseport", 0),  # else a second process would share the port without a word
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    # Calls that wait to be accepted. At the library's 1000 it resets some of a burst, which clients see as CANCELLED;
    # who may wait and for how long is the router's to say.
    ("grpc.server.max_pending_requests", 32_768),
    ("grpc.server.max_pending_requests_hard_limit", 65_536),
]
_CHANNEL_OPTIONS = [
    *_KEEPALIVE,
    *_MESSAGES,
    ("grpc.enable_http_proxy", 0),  # peers are reached directly, whatever http_proxy says
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # also how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.dns_min_time_between_resolutions_ms", 2000),  # not 30 s: a restarted container may have another address
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A gRPC service to serve. `internal`: only for callers with the cluster key."""

    name: str  # full name, "twinpool.v1.Router"
    add: Callable[[Any, grpc.aio.Server], None]  # the generated add_XServicer_to_server
    servicer: Any
    internal: bool = False


class Serving:
    """A server that accepts calls. Its owner calls `stop`."""

    def __init__(self, server: grpc.aio.Server, port: int, names: Sequence[str], health: Any) -> None:
        self.server = server
        self.port = port
        self._names = names
        self._health = health

    async def set_serving(self, serving: bool, *services: str) -> None:
        """What grpc.health.v1 answers for `services`; without any, for the whole process ("") and all its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in services or ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Takes no new call, and cancels those still running after `grace_s`. Idempotent."""
        await self.set_serving(False)
        await self.server.stop(grace_s)


async def serve(
    services: Sequence[Service],
    *,
    host: str,
    port: int,
    cluster_key: str = "",
    certificates: Certificates | None = None,
    client_certs: bool = True,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> Serving:
    """Serves `services`, health and reflection on host:port (0: a free port). Raises ConfigError when it is taken.

    certificates: for TLS; client_certs: callers have to show one of the same CA.
    """
    internal = [service.name for service in services if service.internal]
    guard = ClusterKeyInterceptor(cluster_key, internal)
    server = grpc.aio.server(interceptors=[guard, _ErrorInterceptor(), *interceptors], options=_SERVER_OPTIONS)
    for service in services:
        service.add(service.servicer, server)
    names = [service.name for service in services]
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    check_bindable(host, port, "port")
    try:
        if certificates is None:
            actual_port = server.add_insecure_port(join(host, port))
        else:
            actual_port = server.add_secure_port(join(host, port), _server_credentials(certificates, client_certs))
    except RuntimeError as error:  # somebody was faster
        raise bind_error(OSError(str(error)), host, port, "port") from error
    await server.start()
    serving = Serving(server, actual_port, names, health_servicer)
    await serving.set_serving(True)
    return serving


def _server_credentials(certificates: Certificates, client_certs: bool) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(certificates.key_pem, certificates.cert_pem)],
        root_certificates=certificates.ca_pem,
        require_client_auth=client_certs,
    )


def announce_ready(address: str, metrics_port: int, ready_file: str = "") -> None:
    """Logs "ready" and, when asked, writes {address, metrics_port, pid} to `ready_file`, whole or not at all.

    Raises ConfigError when the file cannot be written.
    """
    if ready_file:
        path = Path(ready_file)
        draft = path.parent / f".{path.name}.{os.getpid()}"
        try:
            draft.write_text(json.dumps({"address": address, "metrics_port": metrics_port, "pid": os.getpid()}))
            draft.replace(path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; check --ready-file", field="ready_file"
            ) from error
    logger.info("ready", extra={"address": address, "metrics_port": metrics_port})


def run(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs `main(stop)` on uvloop until it returns. SIGTERM and SIGINT set `stop`; a second one cancels `main`."""

    async def with_signals() -> None:
        stop = asyncio.Event()
        task = asyncio.ensure_future(main(stop))

        def on_signal(name: str) -> None:
            logger.info("stopping", extra={"signal": name, "at_once": stop.is_set()})
            if stop.is_set():
                task.cancel()
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number.name)
        try:
            await task
        except asyncio.CancelledError:
            if not stop.is_set():
                raise

    uvloop.run(with_signals())


class _ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends a call whose handler raised with the status, details and metadata of the error."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind)
            if inspect.iscoroutinefunction(behavior):
                mapped: Callable[..., Any] = _mapped_call
            elif inspect.isasyncgenfunction(behavior):
                mapped = _mapped_stream
            else:
                continue
            if handler.request_streaming:
                return handler._replace(**{kind: mapped(behavior, details.method, _as_it_is)})
            # Parsed by us, not by grpc, which answers UNKNOWN to a message that cannot be.
            wrapped = mapped(behavior, details.method, handler.request_deserializer)
            return handler._replace(request_deserializer=None, **{kind: wrapped})
        return handler


def _as_it_is(requests: Any) -> Any:
    return requests


def _mapped_call(
    behavior: Callable[..., Awaitable[Any]], method: str, parse: Callable[[Any], Any]
) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await behavior(parse(request), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return call


def _mapped_stream(behavior: Callable[..., Any], method: str, parse: Callable[[Any], Any]) -> Callable[..., Any]:
    async def stream(request: Any, context: Any) -> Any:
        try:
            async with aclosing(behavior(parse(request), context)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return stream


async def _abort(context: Any, error: Exception, method: str) -> None:
    if isinstance(error, DecodeError):
        error = InvalidRequest(f"the message to {method} cannot be parsed: {error}")
    if not isinstance(error, TwinpoolError):
        error_id = secrets.token_hex(4)
        logger.error("unexpected error", exc_info=error, extra={"error_id": error_id, "method": method})
        error = Internal(f"internal error {error_id} in {method}; the server's log has the details under this id")
    await context.abort(error.code, error.message[:MAX_DETAILS_CHARS], to_metadata(error))


def channel(
    address: str, cluster_key: str = "", certificates: Certificates | None = None, name: str = ""
) -> grpc.aio.Channel:
    """A channel to a peer process; every call on it carries the cluster key. Its owner closes it.

    certificates: for TLS. The peer's has to be of the same CA and for the host of `address`, or for `name` if there is
    one: the name that the address was found by.
    """
    if certificates is None:
        inner = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    else:
        credentials = grpc.ssl_channel_credentials(
            certificates.ca_pem, private_key=certificates.key_pem, certificate_chain=certificates.cert_pem
        )
        named = [("grpc.ssl_target_name_override", name)] if name else []
        inner = grpc.aio.secure_channel(address, credentials, options=[*_CHANNEL_OPTIONS, *named])
    return _KeyedChannel(inner, key_metadata(cluster_key))


class _KeyedChannel(grpc.aio.Channel):  # type: ignore[misc]
    """Adds metadata to every call. No client interceptor: those put a queue into the path of every stream message."""

    def __init__(self, inner: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._inner = inner
        self._metadata = metadata

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._keyed(self._inner.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._keyed(self._inner.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._keyed(self._inner.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._keyed(self._inner.stream_stream(*args, **kwargs))

    def _keyed(self, start_call: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Sequence[tuple[str, str]] | None = None, **kwargs: Any) -> Any:
            return start_call(*args, metadata=(*(metadata or ()), *self._metadata), **kwargs)

        return call

    async def __aenter__(self) -> _KeyedChannel:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()
