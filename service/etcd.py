"""Routers and workers meet through etcd: a router keeps its address there under a lease, workers watch the addresses.

    registry = EtcdRegistry("etcd://10.0.0.1:2379,10.0.0.2:2379/production")
    await registry.announce("10.0.0.7:7070")    # a router, for as long as it serves
    await registry.follow(listed)               # a worker, for ever: listed({"10.0.0.7:7070", ...})

etcd only says who is there. Membership itself is the stream between a worker and a router, and neither ends with etcd:
while it cannot be reached everything goes on as it was last known, and the log says so.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from service.address import split
from twinpool.errors import ConfigError

logger = logging.getLogger(__name__)

LEASE_S = 10  # a router that died is listed for so long at most
CALL_TIMEOUT_S = 3.0
READ_AGAIN_S = 10.0  # all of it, whatever the watch has said: a frozen server sends nothing
RETRY_FIRST_S = 0.2
RETRY_MOST_S = 5.0
_DEFAULT_PORT = 2379
_DEFAULT_PREFIX = "twinpool"


class EtcdRegistry:
    """One deployment's part of an etcd cluster: keys /PREFIX/routers/ADDRESS. Endpoints are tried in turn."""

    def __init__(self, url: str) -> None:
        """url: etcd://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...][/PREFIX]. Raises ConfigError."""
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        if parts.scheme != "etcd" or not hosts or parts.query or parts.fragment:
            raise ConfigError(
                "--registry is not etcd://HOST:PORT,.../PREFIX, such as etcd://10.0.0.1:2379", field="registry"
            )
        try:
            self.endpoints = [":".join(map(str, split(host, _DEFAULT_PORT))) for host in hosts.split(",")]
        except ConfigError as error:
            raise ConfigError(f"--registry: {error.message}", field="registry") from error
        self._user, _, self._password = (unquote(part) for part in credentials.partition(":"))
        self._prefix = f"/{parts.path.strip('/') or _DEFAULT_PREFIX}/routers/"
        self._library = _library()
        self._lost = False

    async def announce(self, address: str) -> None:
        """Keeps `address` listed until cancelled; then it is taken out at once, if etcd can be reached."""

        async def keep(client: Any) -> None:
            lease = await client.lease(LEASE_S)
            try:
                await client.put(f"{self._prefix}{address}".encode(), address.encode(), lease=lease)
                self._reached()
                logger.info("announced in the registry", extra={"address": address})
                while True:
                    await asyncio.sleep(LEASE_S / 3)
                    async with asyncio.timeout(CALL_TIMEOUT_S):
                        refreshed = await lease.refresh()
                    if refreshed.TTL <= 0:  # etcd came back without it, or we stood still
                        return
            except asyncio.CancelledError:
                with suppress(*self._failures):
                    async with asyncio.timeout(CALL_TIMEOUT_S):
                        await lease.revoke()
                raise

        await self._for_ever(keep)

    async def follow(self, listed: Callable[[frozenset[str]], None]) -> None:
        """Calls `listed` with all addresses, at first and after every change."""

        async def read(client: Any) -> None:
            changed = asyncio.Event()
            watch = asyncio.create_task(self._watch(client, changed))
            watch.add_done_callback(lambda _: changed.set())
            try:
                while not watch.done():
                    changed.clear()
                    found = await client.get_prefix(self._prefix.encode())
                    self._reached()
                    listed(frozenset(entry.value.decode() for entry in found))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(READ_AGAIN_S):
                            await changed.wait()
                await watch
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

        await self._for_ever(read)

    async def _watch(self, client: Any, changed: asyncio.Event) -> None:
        async for _ in await client.watch_prefix(self._prefix.encode()):
            changed.set()

    async def _for_ever(self, work: Callable[[Any], Awaitable[None]]) -> None:
        delay_s = RETRY_FIRST_S
        for number in range(1 << 62):
            endpoint = self.endpoints[number % len(self.endpoints)]
            try:
                async with self._client(endpoint) as client:
                    await work(client)
            except self._failures as error:
                if not self._lost:
                    reason = str(error) or type(error).__name__
                    event = "registry cannot be reached; going on with what is known"
                    logger.error(event, extra={"endpoint": endpoint, "reason": reason})
                    self._lost, delay_s = True, RETRY_FIRST_S
            await asyncio.sleep(delay_s * random.uniform(0.5, 1))
            delay_s = min(2 * delay_s, RETRY_MOST_S)

    def _reached(self) -> None:
        if self._lost:
            logger.info("registry reached again")
        self._lost = False

    @asynccontextmanager
    async def _client(self, endpoint: str) -> AsyncIterator[Any]:
        host, _, port = endpoint.rpartition(":")
        client = self._library.Client(
            host,
            int(port),
            username=self._user or None,
            password=self._password or None,
            timeout=CALL_TIMEOUT_S,
            options={"grpc.enable_http_proxy": 0},
        )
        try:
            yield client
        finally:
            with suppress(*self._failures):
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await client.close()

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        return (self._library.ClientError, OSError, TimeoutError)


@asynccontextmanager
async def listed(registry: EtcdRegistry | None, address: str) -> AsyncIterator[None]:
    """Within it `address` is announced in `registry`, where there is one."""
    task = asyncio.create_task(registry.announce(address)) if registry is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _library() -> Any:
    try:
        return importlib.import_module("aetcd")
    except ImportError as error:
        raise ConfigError(
            "--registry etcd://... needs the package aetcd: pip install 'twinpool[etcd]'", field="registry"
        ) from error
