"""The cluster key: a secret that routers and workers share, checked on every call between them.

    server side   ClusterKeyInterceptor(config.cluster_key, {"twinpool.v1.Decode"})   (serve.py adds it)
    client side   serve.channel(address, config.cluster_key)                          sends the key as metadata
    start-up      warn_if_open(logger, config.host, config.cluster_key)

Clients' services (Router), health and reflection need no key. The key itself is never logged.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

import grpc

from service.address import is_loopback
from twinpool.errors import ConfigError, Unauthenticated, to_metadata

KEY_METADATA = "twinpool-cluster-key"
_QUIET_S = 10.0  # between two lines about refusals: whoever reaches the port may try for ever

logger = logging.getLogger(__name__)


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
        self._refused = 0  # since the last line about it
        self._said_at = float("-inf")

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
        # Stream-stream, whatever the method is: a unary handler would first wait for a message that may never come.
        return grpc.stream_stream_rpc_method_handler(partial(self._refuse, details.method))

    async def _refuse(self, method: str, _requests: object, context: Any) -> None:
        self._refused += 1
        if time.monotonic() >= self._said_at + _QUIET_S:
            told = {"peer": context.peer(), "method": method[:128], "refused": self._refused}
            logger.warning("refused: wrong or missing cluster key", extra=told)
            self._refused, self._said_at = 0, time.monotonic()
        error = Unauthenticated(
            "wrong or missing cluster key; set the same TWINPOOL_CLUSTER_KEY on routers and workers"
        )
        await context.abort(error.code, error.message, to_metadata(error))
