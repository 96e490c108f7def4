"""Where workers join (twinpool.v1.Registry): one stream a worker, whose reports keep its lease alive."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from router import wire
from router.pools import Registry, Worker, WorkerInfo
from twinpool.errors import Incompatible, InvalidRequest, UnknownWorker
from twinpool.v1 import worker_pb2
from twinpool.v1.worker_pb2_grpc import RegistryServicer

logger = logging.getLogger(__name__)

_MOST_REFUSED = 1000  # that are remembered


class RegistryServer(RegistryServicer):
    def __init__(self, registry: Registry, *, heartbeat_ms: int, lease_ms: int) -> None:
        self._registry = registry
        self._terms = worker_pb2.RegistryReply(heartbeat_ms=heartbeat_ms, lease_ms=lease_ms)
        self._streams: set[asyncio.Task[Any]] = set()
        self._refused: dict[str, str] = {}  # worker id -> why, as the log says
        self._drains: dict[Worker, asyncio.Event] = {}  # of those that have a stream: it was asked to drain

    async def Join(self, requests: Any, context: Any) -> None:
        first = await context.read()
        if first is grpc.aio.EOF or not first.HasField("info"):
            raise InvalidRequest("the first message must hold info", field="info")
        worker = self._join(wire.worker_info(first.info), context)
        stream = asyncio.current_task()
        assert stream is not None
        worker.stream = stream
        self._streams.add(stream)
        try:
            self._take(worker, first)
            await context.write(self._terms)
            drain = self._drains[worker] = asyncio.Event()
            telling = asyncio.ensure_future(_tell(context, drain))
            try:
                while (report := await context.read()) is not grpc.aio.EOF:
                    self._take(worker, report)
            finally:
                telling.cancel()
        finally:
            self._streams.discard(stream)
            if worker.stream is stream:  # else a newer stream of the same process has taken over
                self._drains.pop(worker, None)
                self._registry.left(worker)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainReply:
        for worker, drain in self._drains.items():
            if worker.info.worker_id == request.worker_id:
                drain.set()
                return worker_pb2.DrainReply()
        known = ", ".join(sorted(worker.info.worker_id for worker in self._drains)) or "none"
        raise UnknownWorker(
            f"no worker {request.worker_id[:128]!r} is connected to this router; those that are: {known}",
            field="worker_id",
        )

    def close(self) -> None:
        """Ends every stream; the workers go on looking for a router."""
        for stream in list(self._streams):
            stream.cancel()

    def _join(self, info: WorkerInfo, context: Any) -> Worker:
        """A worker that is refused tries again and again; the log says so once for each reason."""
        try:
            worker = self._registry.join(info)
        except Incompatible as refusal:
            if self._refused.get(info.worker_id) != refusal.message:
                if len(self._refused) >= _MOST_REFUSED:
                    self._refused.clear()
                self._refused[info.worker_id] = refusal.message
                told = {"worker": info.worker_id, "peer": context.peer(), "reason": refusal.message}
                logger.warning("worker refused", extra=told)
            raise
        self._refused.pop(info.worker_id, None)
        return worker

    def _take(self, worker: Worker, report: worker_pb2.WorkerReport) -> None:
        if report.HasField("load"):
            self._registry.report(worker, wire.worker_load(report.load))


async def _tell(context: Any, drain: asyncio.Event) -> None:
    await drain.wait()
    await context.write(worker_pb2.RegistryReply(drain=True))
