"""Plain workers for tests of the registry, of placement and of admission: no connection behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from router.pools import Pool, Registry, Worker, WorkerInfo, WorkerLoad
from twinpool import __version__


class NoLink:
    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


def info(worker_id: str, **fields: Any) -> WorkerInfo:
    """A worker of the pool that its id begins with: "p0" prefills, "d0" decodes."""
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": 1,
        "pool": Pool.PREFILL if worker_id.startswith("p") else Pool.DECODE,
        "address": "127.0.0.1:1",
        "model": "m",
        "fingerprint": "f",
        "version": __version__,
        "block_size": 16,
        "max_context": 2048,
        "rows_total": 100,
    }
    return WorkerInfo(**(values | fields))


def registry(lease_s: float = 10.0, clock: Callable[[], float] | None = None) -> Registry:
    return Registry("m", lambda _: NoLink(), lease_s=lease_s, clock=clock or asyncio.get_running_loop().time)


def join(pools: Registry, worker_id: str, *, rows_free: int = 100, running: int = 0, **fields: Any) -> Worker:
    worker = pools.join(info(worker_id, **fields))
    pools.report(worker, WorkerLoad(rows_free=rows_free, running=running))
    return worker
