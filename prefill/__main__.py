"""python -m prefill: one prefill worker."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import twinpool
from engine.engine import Engine
from engine.quantization import W8A8
from kvtransfer import KvSender, transports
from kvtransfer.cache_regions import regions
from prefill.config import PrefillConfig
from prefill.metrics import PrefillMetrics
from prefill.server import PrefillServer, encode_note
from prefill.worker import Worker
from service import cores, log, metrics
from service.address import advertised, check_free
from service.config import load, run_main
from service.discovery import source, towards
from service.drain import until_idle, until_stopped
from service.registration import Registration, new_incarnation
from service.security import warn_if_open
from service.serve import Service, announce_ready, run, serve
from twinpool import model_store
from twinpool.certificates import Certificates
from twinpool.errors import ConfigError
from twinpool.v1.router_pb2 import POOL_PREFILL
from twinpool.v1.worker_pb2 import WorkerInfo
from twinpool.v1.worker_pb2_grpc import add_PrefillServicer_to_server

logger = logging.getLogger(__name__)

SNAPSHOTS = 4  # rows of sequences for each prompt side by side: its own, and what prefixes are taken up from


def main() -> None:
    config = load(PrefillConfig, "prefill")
    log.setup(config.log_level, "prefill", config.worker_id)
    if not config.model:
        raise ConfigError("--model is missing: name a Hugging Face directory", field="model")
    cores.pin(config.cores)
    run(partial(_serve, config))


async def _serve(config: PrefillConfig, stop: asyncio.Event) -> None:
    warn_if_open(logger, config.host, config.cluster_key)
    certificates = config.load_certificates()
    routers = source(config.routers, config.registry)
    check_free(config.host, port=config.port, metrics_port=config.metrics_port)
    engine = _load(config)
    registry = metrics.new_registry()
    metrics.show_expiry(registry, certificates)
    async with AsyncExitStack() as closing:  # in reverse order
        figures = PrefillMetrics(registry)
        sender = KvSender(
            regions(engine.cache),
            fingerprint=engine.fingerprint,
            cluster_key=config.cluster_key,
            transport=config.kv_transport,
            options=_transport_options(config, certificates),
            lease_s=config.kv_lease,
            metrics=figures.transfers,
        )
        closing.callback(sender.close)
        worker = Worker(
            engine,
            sender,
            config.limits,
            figures,
            encode_note=encode_note,
            max_requests=config.max_requests,
        )
        worker.start()
        closing.callback(worker.close)
        http = metrics.serve_metrics(config.host, config.metrics_port, registry, healthy=lambda: worker.alive)
        closing.callback(http.close)
        server = PrefillServer(worker, request_timeout_s=config.request_timeout)
        service = Service(name="twinpool.v1.Prefill", add=add_PrefillServicer_to_server, servicer=server, internal=True)
        serving = await serve(
            [service],
            host=config.host,
            port=config.port,
            cluster_key=config.cluster_key,
            certificates=certificates,
        )
        closing.push_async_callback(serving.stop, grace_s=1)
        address = advertised(
            config.advertise, config.host, serving.port, towards=towards(config.routers, config.registry)
        )
        info = _info(config, engine, address, worker.max_context)
        sender.introduce_as(info.worker_id)
        log.setup(config.log_level, "prefill", info.worker_id)  # by now it has one, and its lines say so
        registration = Registration(
            routers=routers,
            info=info,
            load=server.load,
            cluster_key=config.cluster_key,
            certificates=certificates,
            on_drain=stop.set,
        )
        await registration.start()
        closing.push_async_callback(registration.stop)
        announce_ready(address, http.port, config.ready_file)
        await until_stopped(stop, lambda: worker.alive)
        server.draining = True
        registration.report_now()
        await serving.set_serving(False)
        await until_idle(lambda: worker.num_open, config.drain_timeout)


def _load(config: PrefillConfig) -> Engine:
    return Engine.load(
        Path(config.model),
        backend=config.backend,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        weights=config.weights,
        fastest_weights=W8A8,
        latent_form="plain",
        block_size=config.block_size,
        memory_bytes=config.memory,
        max_sequences=SNAPSHOTS * sum(config.limits.prompts.values()),
        threads=config.threads or len(os.sched_getaffinity(0)),
        packed_weights=model_store.packed_weights(config.packed_weights),
    )


def _transport_options(config: PrefillConfig, certificates: Certificates | None) -> transports.Options:
    return transports.Options(
        certificates=certificates,
        streams=config.kv_streams,
        collective_backend=config.kv_collective_backend,
        collective_plaintext=config.kv_collective_plaintext,
    )


def _info(config: PrefillConfig, engine: Engine, address: str, max_context: int) -> WorkerInfo:
    return WorkerInfo(
        worker_id=config.worker_id or f"prefill-{address}",
        incarnation=new_incarnation(),
        pool=POOL_PREFILL,
        address=address,
        model=config.model_name or engine.model_name,
        fingerprint=engine.fingerprint,
        version=twinpool.__version__,
        block_size=engine.blocks.block_size,
        max_context=max_context,
        rows_total=engine.blocks.num_blocks,
        serves_alone=True,
    )


if __name__ == "__main__":
    run_main(main, "prefill")
