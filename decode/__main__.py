"""python -m decode: one decode worker."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import twinpool
from decode.config import DecodeConfig
from decode.metrics import DecodeMetrics
from decode.server import DecodeServer, decode_note
from decode.worker import Worker
from engine.engine import Engine
from engine.kv_cache import Allocate
from engine.quantization import W8A16
from kvtransfer import KvReceiver, cache_memory, transports
from kvtransfer.cache_regions import regions
from service import cores, log, metrics
from service.address import advertised, check_free, split
from service.config import load, run_main
from service.discovery import source, towards
from service.drain import until_idle, until_stopped
from service.registration import Registration, new_incarnation
from service.security import warn_if_open
from service.serve import Service, announce_ready, run, serve
from twinpool import model_store
from twinpool.certificates import Certificates
from twinpool.errors import ConfigError
from twinpool.v1.router_pb2 import POOL_DECODE
from twinpool.v1.worker_pb2 import WorkerInfo
from twinpool.v1.worker_pb2_grpc import add_DecodeServicer_to_server

logger = logging.getLogger(__name__)


def main() -> None:
    config = load(DecodeConfig, "decode")
    log.setup(config.log_level, "decode", config.worker_id)
    if not config.model:
        raise ConfigError("--model is missing: name a Hugging Face directory", field="model")
    cores.pin(config.cores)
    run(partial(_serve, config))


async def _serve(config: DecodeConfig, stop: asyncio.Event) -> None:
    warn_if_open(logger, config.host, config.cluster_key)
    certificates = config.load_certificates()
    routers = source(config.routers, config.registry)
    check_free(config.host, port=config.port, metrics_port=config.metrics_port)
    check_free(config.kv_host or config.host, kv_port=config.kv_port)
    memory = cache_memory(config.kv_transport)
    engine = _load(config, None if memory is None else memory.allocate)
    registry = metrics.new_registry()
    metrics.show_expiry(registry, certificates)
    async with AsyncExitStack() as closing:  # in reverse order
        if memory is not None:
            closing.callback(memory.close)
        figures = DecodeMetrics(registry)
        receiver = KvReceiver(
            regions(engine.cache),
            fingerprint=engine.fingerprint,
            cluster_key=config.cluster_key,
            transport=config.kv_transport,
            options=_transport_options(config, certificates),
            lease_s=config.kv_lease,
            memory=memory,
            host=config.kv_host or config.host,
            port=config.kv_port,
            advertise=_kv_advertise(config),
            metrics=figures.transfers,
        )
        receiver.start()
        closing.callback(receiver.close)
        worker = Worker(
            engine,
            receiver,
            figures,
            decode_note=decode_note,
            swap_bytes=config.swap,
            max_batch=config.max_batch,
            max_waiting=config.max_waiting,
            prefill_chunk=config.prefill_chunk,
        )
        worker.start()
        closing.callback(worker.close)
        http = metrics.serve_metrics(config.host, config.metrics_port, registry, healthy=lambda: worker.alive)
        closing.callback(http.close)
        server = DecodeServer(worker, reserve_timeout_s=config.reserve_timeout)
        service = Service(name="twinpool.v1.Decode", add=add_DecodeServicer_to_server, servicer=server, internal=True)
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
        receiver.introduce_as(info.worker_id)
        log.setup(config.log_level, "decode", info.worker_id)  # by now it has one, and its lines say so
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


def _load(config: DecodeConfig, allocate: Allocate | None) -> Engine:
    return Engine.load(
        Path(config.model),
        backend=config.backend,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        weights=config.weights,
        fastest_weights=W8A16,
        block_size=config.block_size,
        memory_bytes=config.memory,
        max_sequences=config.max_batch,
        threads=config.threads or len(os.sched_getaffinity(0)),
        packed_weights=model_store.packed_weights(config.packed_weights),
        allocate=allocate,
    )


def _transport_options(config: DecodeConfig, certificates: Certificates | None) -> transports.Options:
    return transports.Options(
        certificates=certificates,
        streams=config.kv_streams,
        collective_backend=config.kv_collective_backend,
        collective_plaintext=config.kv_collective_plaintext,
    )


def _info(config: DecodeConfig, engine: Engine, address: str, max_context: int) -> WorkerInfo:
    return WorkerInfo(
        worker_id=config.worker_id or f"decode-{address}",
        incarnation=new_incarnation(),
        pool=POOL_DECODE,
        address=address,
        model=config.model_name or engine.model_name,
        fingerprint=engine.fingerprint,
        version=twinpool.__version__,
        block_size=engine.blocks.block_size,
        max_context=max_context,
        rows_total=engine.blocks.num_blocks,
        serves_alone=True,
    )


def _kv_advertise(config: DecodeConfig) -> str:
    """Where prefill workers reach the KV port: as told, else the host that routers reach this worker at."""
    if config.kv_advertise:
        return config.kv_advertise
    advertise, host = ("", config.kv_host) if config.kv_host else (config.advertise, config.host)
    return split(advertised(advertise, host, config.kv_port, towards=towards(config.routers, config.registry)))[0]


if __name__ == "__main__":
    run_main(main, "decode")
