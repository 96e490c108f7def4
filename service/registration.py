"""A worker's membership with its routers: one lease with each, kept up for as long as the worker lives.

    address = advertised(config.advertise, config.host, serving.port, towards=config.routers[0])
    info = WorkerInfo(worker_id=config.worker_id or f"decode-{address}", address=address,
                      incarnation=new_incarnation(), ...)
    routers = source(config.routers, config.registry)     # discovery.py: they may come and go
    registration = Registration(routers=routers, info=info, load=worker.load, cluster_key=config.cluster_key)
    await registration.start()      # returns at once: a router may come later
    registration.report_now()       # something routers should know before the next heartbeat, such as draining
    await registration.stop()       # routers forget the worker at once

Life of a lease:
1. Open Registry.Join and send info and load.
2. The router admits (heartbeat_ms, lease_ms), or refuses with FAILED_PRECONDITION and the reason.
3. Send the load every heartbeat, and at `report_now`.
4. The stream ends: the router stopped, froze (keepalive notices) or went away. Back to 1 after a short, growing, random
   delay, for ever; after a refusal a long one, because somebody has to change a setting first.
5. A router that is not listed any more is dropped when its lease has ended, and not before: a name server or a registry
   may be wrong about one that is there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

import grpc

from service.discovery import RouterAddress, Source
from service.serve import channel
from twinpool.certificates import Certificates, hint
from twinpool.errors import Incompatible, InvalidRequest, TwinpoolError, Unauthenticated, Unavailable, from_status
from twinpool.v1.worker_pb2 import WorkerInfo, WorkerLoad, WorkerReport
from twinpool.v1.worker_pb2_grpc import RegistryStub

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0  # for the router's answer to a join
HEARTBEAT_LEAST_S = 0.01  # whatever a router asks for
RETRY_FIRST_S = 0.1
RETRY_MOST_S = 2.0
RETRY_REFUSED_S = 20.0

_REFUSALS = (Incompatible, Unauthenticated, InvalidRequest)


def new_incarnation() -> int:
    """A number larger than that of any earlier start of this worker: nanoseconds since 1970."""
    return time.time_ns()


class Registration:
    """Keeps one worker registered with every router that `routers` lists. Owned by one event loop."""

    def __init__(
        self,
        *,
        routers: Source,
        info: WorkerInfo,
        load: Callable[[], WorkerLoad],
        cluster_key: str = "",
        certificates: Certificates | None = None,
        retry_refused_s: float = RETRY_REFUSED_S,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """`load` is called on the event loop before every report: be quick. `on_drain`: a router asks this worker to
        finish what it has and leave; may be called more than once."""
        self._routers = routers
        self._info = info
        self._load = load
        self._cluster_key = cluster_key
        self._certificates = certificates
        self._retry_refused_s = retry_refused_s
        self._on_drain = on_drain
        self._listed: set[str] = set()
        self._wake: dict[str, asyncio.Event] = {}
        self._joined: set[str] = set()
        self._leases: dict[str, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None

    @property
    def joined(self) -> frozenset[str]:
        """The routers that have admitted this worker and have not gone since."""
        return frozenset(self._joined)

    async def start(self) -> None:
        """Begins to join; returns before any router has answered."""
        self._following = asyncio.create_task(self._follow(), name="join: follow the list of routers")

    def report_now(self) -> None:
        """Sends the load to every router without waiting for the next heartbeat."""
        for wake in self._wake.values():
            wake.set()

    async def stop(self) -> None:
        """Leaves every router. Idempotent."""
        tasks = [*([self._following] if self._following else []), *self._leases.values()]
        self._following = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            try:
                await self._routers.follow(self._take_list)
            except Exception:
                logger.exception("the list of routers cannot be followed")
            await asyncio.sleep(RETRY_MOST_S)

    def _take_list(self, routers: Collection[RouterAddress]) -> None:
        self._listed = {router.address for router in routers}
        for router in routers:
            if router.address not in self._leases:
                self._wake[router.address] = asyncio.Event()
                task = asyncio.create_task(self._stay_joined(router), name=f"join {router.address}")
                self._leases[router.address] = task
                task.add_done_callback(partial(self._dropped, router.address))
        for address in self._leases.keys() - self._listed - self._joined:
            self._leases[address].cancel()

    def _dropped(self, address: str, _: asyncio.Task[None]) -> None:
        self._joined.discard(address)
        self._wake.pop(address)
        self._leases.pop(address)
        if self._following is not None:  # else this worker stops
            logger.info("router dropped, as it is not listed any more", extra={"router": address})

    async def _stay_joined(self, peer: RouterAddress) -> None:
        delay_s, reported, router = RETRY_FIRST_S, "", peer.address
        async with channel(router, self._cluster_key, self._certificates, peer.name) as to_router:
            stub = RegistryStub(to_router)
            while True:
                try:
                    await self._lease(stub, router)
                    error: TwinpoolError = Unavailable("the router ended the lease")
                except TwinpoolError as failure:
                    error = failure
                except Exception:  # a bug, in `load` for one: it must not end the membership without a word
                    logger.exception("registration failed", extra={"router": router})
                    error = Unavailable("see the error above")
                if router in self._joined:
                    self._joined.discard(router)
                    delay_s, reported = RETRY_FIRST_S, ""
                if router not in self._listed:
                    return
                refused = isinstance(error, _REFUSALS)
                if error.message != reported:  # once, not at every attempt
                    reported = error.message
                    level = logging.ERROR if refused else logging.WARNING
                    event = "router refuses this worker" if refused else "no lease with router"
                    reason = error.message + hint(error.message)
                    logger.log(level, event, extra={"router": router, "reason": reason})
                await asyncio.sleep(self._retry_refused_s if refused else delay_s * random.uniform(0.5, 1))
                delay_s = min(delay_s * 2, RETRY_MOST_S)

    async def _lease(self, stub: RegistryStub, router: str) -> None:
        """Joins `router` and reports until it ends the stream in good order; raises the error that ended it else."""
        call: Any = stub.Join()
        ended: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await call.write(WorkerReport(info=self._info, load=self._load()))
                terms = await call.read()
            if terms is grpc.aio.EOF:
                return None
            self._joined.add(router)
            logger.info("joined router", extra={"router": router, "heartbeat_ms": terms.heartbeat_ms})
            wake = self._wake[router]
            ended = asyncio.create_task(self._until_end(call))
            ended.add_done_callback(lambda _: wake.set())
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(terms.heartbeat_ms / 1000, HEARTBEAT_LEAST_S)):
                        await wake.wait()
                wake.clear()
                if ended.done():
                    return ended.result()
                await call.write(WorkerReport(load=self._load()))
        except TimeoutError as error:
            raise Unavailable(f"no answer from {router} in {ANSWER_TIMEOUT_S:g} s") from error
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # A failed write names no useful status; the call itself does.
            raise from_status(await call.code(), await call.details() or "", await call.trailing_metadata()) from error
        finally:
            call.cancel()
            if ended is not None:
                ended.cancel()
                await asyncio.gather(ended, return_exceptions=True)

    async def _until_end(self, call: Any) -> None:
        """Returns when the peer ends the stream with OK; raises AioRpcError for any other status."""
        while (reply := await call.read()) is not grpc.aio.EOF:
            if reply.drain:
                self._on_drain()
