"""All parts of one router, wired together, from its options to the ports it serves on."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from router.admission import Admission
from router.classifier import Classifier
from router.config import RouterConfig
from router.decode_session import DecodeSession
from router.front_door import FrontDoor
from router.metrics import RouterMetrics
from router.placement import Placement
from router.policies import Mode
from router.pools import Link, Pool, Registry, WorkerInfo
from router.prefill_call import PrefillClient
from router.prober import Prober
from router.registry_server import RegistryServer
from router.server import RouterServer
from router.sizing import Sizing
from router.tokenizer import ModelCard, Tokenizer
from service.serve import Service, Serving, channel, serve
from twinpool.v1.router_pb2_grpc import add_RouterServicer_to_server
from twinpool.v1.worker_pb2_grpc import add_RegistryServicer_to_server

logger = logging.getLogger(__name__)

_SIZE_EVERY_S = 1.0
ROUTER, REGISTRY = "twinpool.v1.Router", "twinpool.v1.Registry"


class Router:
    """Serves from `start` to `stop`. A process has one; tests run several on one event loop."""

    def __init__(self, config: RouterConfig, figures: RouterMetrics) -> None:
        """Reads the model's directory. Raises ConfigError."""
        self.config = config
        self._figures = figures
        self.certificates = config.load_certificates()
        folder = Path(config.tokenizer)
        card = ModelCard.load(config.model or folder.resolve().name, folder, config.max_context)
        tokenizer = Tokenizer(folder, card.vocab_size)
        classes = config.parsed_classes()
        clock = asyncio.get_running_loop().time
        self.registry = Registry(card.name, self._connect, lease_s=config.lease_ms / 1000, clock=clock)
        classifier = Classifier(classes, config.default_sla_class, config.long_input)
        placement = Placement(
            self.registry,
            classifier,
            prefill_slots=config.prefill_slots,
            decode_slots=config.decode_slots,
            policy=config.policy,
            lookahead_s=config.prefill_lookahead,
            local_below=config.local_below,
            aggregate=config.when_pool_empty == "aggregate",
        )
        self.admission = Admission(classes, placement, pool_wait_s=config.pool_wait, max_queued=config.max_queued)
        self._sizing = Sizing(
            self.registry,
            placement,
            classes,
            decode_slots=config.decode_slots,
            queued_s=lambda: self.admission.queued_s,
            window_s=config.demand_window,
            down_after_s=config.scale_down_after,
        )
        self.registry.on_change = self._on_change
        self.registry.on_room = self._on_room
        self.front_door = FrontDoor(
            card,
            tokenizer,
            classifier,
            self.registry,
            placement,
            self.admission,
            figures,
            self._sizing,
            max_attempts=config.max_attempts,
            isolate_tenants=config.isolate_tenants,
        )
        self.registry.proves = config.probe_timeout > 0
        self._prober = Prober(
            self.registry,
            figures,
            vocab_size=card.vocab_size,
            timeout_s=config.probe_timeout,
            alone=config.when_pool_empty == "aggregate",
        )
        self._joins = RegistryServer(self.registry, heartbeat_ms=config.heartbeat_ms, lease_ms=config.lease_ms)
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._serving: Serving | None = None

    @property
    def port(self) -> int:
        assert self._serving is not None, "not started"
        return self._serving.port

    async def start(self) -> None:
        """Serves. Raises ConfigError when the port is taken."""
        self._serving = await serve(
            [
                Service(name=ROUTER, add=add_RouterServicer_to_server, servicer=RouterServer(self.front_door)),
                Service(name=REGISTRY, add=add_RegistryServicer_to_server, servicer=self._joins, internal=True),
            ],
            host=self.config.host,
            port=self.config.port,
            cluster_key=self.config.cluster_key,
            certificates=self.certificates,
            client_certs=self.config.tls_client_certs,
        )
        self._tasks = [
            asyncio.ensure_future(self._watch(self._serving)),
            asyncio.ensure_future(self._expire_leases()),
            asyncio.ensure_future(self._size_pools()),
        ]

    async def stop(self, drain_s: float) -> None:
        """Refuses new requests, lets running ones end for at most `drain_s`, cancels the rest. Idempotent."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        await serving.set_serving(False)
        await self.front_door.drain(drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._prober.close()
        self._joins.close()
        await serving.stop(grace_s=0.5)
        self.admission.close()
        await self.registry.close()

    def _connect(self, info: WorkerInfo) -> Link:
        to_worker = channel(info.address, self.config.cluster_key, self.certificates)
        kind = DecodeSession if info.pool is Pool.DECODE else PrefillClient
        return kind(info.worker_id, to_worker)

    def _on_change(self) -> None:
        self.admission.pump()
        self._changed.set()

    def _on_room(self) -> None:
        if self.admission.all_queued:
            self.admission.pump()

    async def _watch(self, serving: Serving) -> None:
        """After every change: probes who has joined, and tells grpc.health.v1: the process serves as long as it lives,
        the Router service while a pair of workers can, or one pool alone."""
        aggregating = False
        while True:
            self._prober.look()
            await serving.set_serving(self.front_door.can_serve, ROUTER)
            if aggregating is not (aggregating := self.front_door.mode is Mode.AGGREGATED):
                self._figures.aggregating.set(aggregating)
                logger.warning("no pair of workers: one pool serves whole answers" if aggregating else "split again")
            self._changed.clear()
            await self._changed.wait()

    async def _size_pools(self) -> None:
        while True:
            self._sizing.update()
            await asyncio.sleep(_SIZE_EVERY_S)

    async def _expire_leases(self) -> None:
        pause_s = self.config.lease_ms / 8000
        while True:
            planned = time.monotonic() + pause_s
            await asyncio.sleep(pause_s)
            self.registry.expire(late_s=max(0.0, time.monotonic() - planned))
