"""The cluster key: a secret that routers and workers share, checked on every call between them.

    server side   ClusterKeyInterceptor(config.cluster_key, {"twinpool.v1.Decode"})   (serve.py adds it)
    client side   serve.channel(address, config.cluster_key)                          sends the key as metadata
    start-up      warn_if_open(logger, config.host, config.cluster_key)

Clients' services (Router), health and reflection need no key. The key itself is never logged.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import grpc

from service.address import is_loopback
from twinpool.errors import ConfigError, Unauthenticated, to_metadata

KEY_METADATA = "twinpool-cluster-key"


def key_metadata(cluster_key: str) -> tuple[tuple[str, str], ...]:
    """What a caller sends; nothing for an empty key. Raises ConfigError for a key that gRPC metadata cannot carry."""
    if not cluster_key:
        return ()
    if not cluster_key.isascii() or not cluster_key.isprintable() or cluster_key != cluster_key.strip():
        raise ConfigError("cluster_key: only printable ASCII without spaces around it is allowed", field="cluster_key")
    return ((KEY_METADATA, cluster_key),)


def warn_if_open(logger: logging.Logger, host: str, cluster_key: str) -> None:
    """Says loudly that anybody who can reach `host` may act as a worker or a router."""
    if not cluster_key and not is_loopback(host):
        logger.warning(
            "NO CLUSTER KEY: whoever can reach this address may act as a router or a worker; "
            "set the same TWINPOOL_CLUSTER_KEY on every process",
            extra={"host": host},
        )


class ClusterKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends calls of the named services with UNAUTHENTICATED unless they carry the key. An empty key lets all pass."""

    def __init__(self, cluster_key: str, services: Collection[str]) -> None:
        key_metadata(cluster_key)  # a key that no caller could send is an error now, not at the first call
        self._key = cluster_key.encode()
        self._services = frozenset(services)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        service = details.method.rpartition("/")[0].removeprefix("/")
        if not self._key or service not in self._services:
            return await continuation(details)
        for name, value in details.invocation_metadata or ():
            given = value if isinstance(value, bytes) else value.encode()
            if name == KEY_METADATA and hmac.compare_digest(given, self._key):
                return await continuation(details)
        return _REFUSAL


async def _refuse(_requests: object, context: Any) -> None:
    error = Unauthenticated("wrong or missing cluster key; set the same TWINPOOL_CLUSTER_KEY on routers and workers")
    await context.abort(error.code, error.message, to_metadata(error))


# Stream-stream, whatever the method is: a unary handler would first wait for a message that may never come.
_REFUSAL = grpc.stream_stream_rpc_method_handler(_refuse)
