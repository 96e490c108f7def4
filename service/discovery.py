"""Where a worker's routers are: a list of names, each looked up again and again, or a registry in which routers appear.

    routers = source(config.routers, config.registry)
    await routers.follow(listed)    # for ever; calls listed(routers) whenever they are known anew

A source that cannot be asked says so in the log and tells nothing: what was known stays known.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.address import join, split
from service.etcd import EtcdRegistry
from twinpool.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_UP_EVERY_S = 3.0
LOOK_UP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAddress:
    address: str  # HOST:PORT
    name: str = ""  # the host whose certificate it has to show; empty: that of the address


class Source(Protocol):
    async def follow(self, listed: Callable[[Collection[RouterAddress]], None]) -> None: ...


def source(routers: Sequence[str], registry: str = "") -> Source:
    """The registry where there is one, else the names. Raises ConfigError on an address or a URL that is none."""
    if not routers and not registry:
        raise ConfigError("--routers is empty: name a router's HOST:PORT, or a --registry", field="routers")
    return RegisteredRouters(EtcdRegistry(registry)) if registry else NamedRouters(routers)


def towards(routers: Sequence[str], registry: str = "") -> str:
    """HOST:PORT of a peer that a worker surely talks to, from which it can tell its own address; empty: none."""
    return EtcdRegistry(registry).endpoints[0] if registry else next(iter(routers), "")


class NamedRouters:
    """HOST:PORT each. A name may stand for several routers: every address that it resolves to is one of its own."""

    def __init__(self, routers: Sequence[str], *, every_s: float = LOOK_UP_EVERY_S) -> None:
        """Raises ConfigError on a bad address."""
        self._routers = [split(router) for router in routers]
        for router, (_, port) in zip(routers, self._routers, strict=True):
            if not port:
                raise ConfigError(f"--routers: {router} has no port that can be reached", field="routers")
        self._every_s = every_s
        self._known: dict[tuple[str, int], list[RouterAddress]] = {}
        self._failing: set[str] = set()

    async def follow(self, listed: Callable[[Collection[RouterAddress]], None]) -> None:
        fixed = all(_is_ip(host) for host, _ in self._routers)
        while True:
            await asyncio.gather(*(self._look_up(host, port) for host, port in self._routers))
            listed([router for known in self._known.values() for router in known])
            if fixed:
                await asyncio.Event().wait()
            await asyncio.sleep(self._every_s)

    async def _look_up(self, host: str, port: int) -> None:
        if _is_ip(host):
            self._known[host, port] = [RouterAddress(address=join(host, port))]
            return
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                found = await asyncio.to_thread(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            if host not in self._failing:
                self._failing.add(host)
                reason = str(error) or f"no answer in {LOOK_UP_TIMEOUT_S:g} s"
                logger.warning("name of a router not resolved", extra={"host": host, "reason": reason})
            return
        self._failing.discard(host)
        # One family, or a router with an address in each would be joined twice.
        v4 = [entry for entry in found if entry[0] == socket.AF_INET] or found
        addresses = dict.fromkeys(join(str(entry[4][0]), port) for entry in v4)
        self._known[host, port] = [RouterAddress(address=address, name=host) for address in addresses]


class RegisteredRouters:
    """Those that are in a registry now."""

    def __init__(self, registry: EtcdRegistry) -> None:
        self._registry = registry

    async def follow(self, listed: Callable[[Collection[RouterAddress]], None]) -> None:
        await self._registry.follow(lambda found: listed([RouterAddress(address=address) for address in found]))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
