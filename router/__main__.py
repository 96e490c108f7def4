"""`python -m router`: reads its options, serves both APIs, waits for SIGTERM, lets running requests end."""

from __future__ import annotations

import asyncio
import gc
import logging

from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.router import Router
from service import log, metrics
from service.address import advertised
from service.config import load, run_main
from service.etcd import EtcdRegistry, listed
from service.security import warn_if_open
from service.serve import announce_ready, run

logger = logging.getLogger(__name__)

_GC_ALLOCATIONS = 20_000  # between two collections; a token makes about ten objects, and hardly ever a cycle


async def _main(config: RouterConfig, stop: asyncio.Event) -> None:
    figures = metrics.new_registry()
    router = Router(config, RouterMetrics(figures))
    metrics.show_expiry(figures, router.certificates)
    http = metrics.serve_metrics(config.host, config.metrics_port, figures, healthy=lambda: not stop.is_set())
    try:
        await router.start()
        registry = EtcdRegistry(config.registry) if config.registry else None
        towards = registry.endpoints[0] if registry is not None else ""
        address = advertised(config.advertise, config.host, router.port, towards=towards)
        async with listed(registry, address):
            gc.collect()
            gc.freeze()  # what is there now stays: the collector need not look at it again and again
            gc.set_threshold(_GC_ALLOCATIONS, 20, 20)
            announce_ready(address, http.port, config.ready_file)
            await stop.wait()
        await router.stop(config.drain)
    finally:
        await router.stop(0)
        http.close()


def main() -> None:
    config = load(RouterConfig, "router")
    log.setup(config.log_level, "router")
    warn_if_open(logger, config.host, config.cluster_key)
    run(lambda stop: _main(config, stop))


if __name__ == "__main__":
    run_main(main, "router")
