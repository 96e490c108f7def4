"""Who belongs to the pools, for how long, and in which state."""

from __future__ import annotations

import asyncio

import pytest

from router.pools import Pool, WorkerLoad, WorkerState
from tests.router.workers import info, join, registry
from twinpool import __version__
from twinpool.errors import Incompatible, TransferFailed, Unavailable, WorkerLost


async def test_worker_is_ready_with_its_first_report() -> None:
    pools = registry()
    worker = pools.join(info("d0"))
    assert worker.state is WorkerState.SUSPECT  # unknown, not idle
    pools.report(worker, WorkerLoad(rows_free=100))
    assert worker.state is WorkerState.READY
    assert pools.pool(Pool.DECODE) == [worker]
    await pools.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "other"}, "serves model 'other'"),
        ({"fingerprint": ""}, "lacks fingerprint"),
        ({"block_size": 0}, "lacks fingerprint, block_size"),
        ({"address": ""}, "address must be set"),
        ({"version": "0.9.3"}, r"worker d0 runs twinpool '0.9.3', this router 0\.\d+\.\d+: .*; upgrade one of the two"),
        ({"version": "1.0.0"}, "runs twinpool '1.0.0'"),
        ({"version": ""}, "runs twinpool ''"),
    ],
)
async def test_worker_that_cannot_belong_here_is_refused_with_the_reason(fields: dict, reason: str) -> None:
    pools = registry()
    with pytest.raises(Incompatible, match=reason):
        pools.join(info("d0", **fields))
    assert not list(pools)


async def test_a_worker_of_another_patch_of_the_same_release_may_join() -> None:
    pools = registry()
    pools.join(info("d0", version=__version__.rpartition(".")[0] + ".99"))
    assert len(list(pools)) == 1
    await pools.close()


async def test_lease_ends_without_reports_and_a_late_report_is_told() -> None:
    pools = registry(lease_s=0.05)
    worker = join(pools, "d0")
    await asyncio.sleep(0.06)
    pools.expire()
    assert not list(pools)
    with pytest.raises(Unavailable, match="join again"):
        pools.report(worker, WorkerLoad())
    await pools.close()
    assert worker.link.closed == 1


async def test_a_worker_whose_reports_are_overdue_is_not_used_while_there_is_another() -> None:
    now = [0.0]
    pools = registry(lease_s=4.0, clock=lambda: now[0])
    frozen, lively = join(pools, "d0"), join(pools, "d1")
    now[0] = 2.5
    pools.report(lively, WorkerLoad(rows_free=100))
    assert (frozen.state, lively.state) == (WorkerState.SUSPECT, WorkerState.READY)
    assert frozen.suspicion == 1  # less than nobody, more than one that is only new
    pools.report(frozen, WorkerLoad(rows_free=100))
    assert (frozen.state, frozen.suspicion) == (WorkerState.READY, 0)
    await pools.close()


async def test_a_router_that_stood_still_does_not_blame_its_workers() -> None:
    pools = registry(lease_s=0.05)
    worker = join(pools, "d0")
    await asyncio.sleep(0.06)
    pools.expire(late_s=0.05)
    assert list(pools) == [worker]
    await asyncio.sleep(0.06)
    pools.expire()
    assert not list(pools)
    await pools.close()


async def test_broken_stream_of_the_same_process_keeps_worker_and_link() -> None:
    pools = registry()
    worker = join(pools, "d0")
    pools.left(worker)
    assert worker.state is WorkerState.SUSPECT
    assert pools.join(info("d0")) is worker
    assert worker.state is WorkerState.READY
    assert worker.link.closed == 0
    await pools.close()


async def test_new_incarnation_replaces_the_old_and_not_the_other_way_round() -> None:
    pools = registry()
    old = join(pools, "d0", incarnation=5)
    new = join(pools, "d0", incarnation=6)
    assert list(pools) == [new]
    with pytest.raises(Incompatible, match="replaced by 6"):
        pools.join(info("d0", incarnation=5))
    await pools.close()
    assert old.link.closed == 1


async def test_drained_worker_is_forgotten_when_it_leaves() -> None:
    pools = registry()
    worker = join(pools, "p0")
    pools.report(worker, WorkerLoad(draining=True))
    assert worker.state is WorkerState.DRAINING
    pools.left(worker)
    assert not list(pools)
    await pools.close()


async def test_end_of_a_pause_is_announced() -> None:
    pools = registry()
    worker = join(pools, "p0")
    announced = asyncio.Event()
    pools.failed(worker, WorkerLost("gone"))
    assert worker.state is WorkerState.SUSPECT
    pools.on_change = announced.set
    await asyncio.wait_for(announced.wait(), 5)
    assert worker.state is WorkerState.READY
    await pools.close()


async def test_a_worker_that_is_suspect_no_more_is_announced_and_one_that_was_not_is_no_news() -> None:
    pools = registry()
    worker = join(pools, "p0")
    changes: list[WorkerState] = []
    pools.on_change = lambda: changes.append(worker.state)
    pools.succeeded(worker)
    assert changes == []
    pools.failed(worker, WorkerLost("gone"))
    pools.succeeded(worker)  # a request that was on it before
    assert changes == [WorkerState.SUSPECT, WorkerState.READY]
    await pools.close()


async def test_one_failed_transfer_does_not_condemn_a_worker() -> None:
    pools = registry()
    worker = join(pools, "p0")
    pools.failed(worker, TransferFailed("a row was lost"))
    assert worker.state is WorkerState.READY
    await pools.close()


async def test_rows_are_counted_once_between_claims_and_reports() -> None:
    pools = registry()
    worker = join(pools, "d0", rows_free=100)
    claim = worker.claim(tokens=0, rows=30)
    assert worker.rows_free == 70
    pools.report(worker, WorkerLoad(rows_free=100))  # the worker has not set the rows aside yet
    assert worker.rows_free == 70
    claim.reserved = True
    pools.report(worker, WorkerLoad(rows_free=70))
    assert worker.rows_free == 70
    worker.release(claim)
    worker.release(claim)
    assert not worker.claims
    await pools.close()


async def test_context_is_what_every_worker_can_hold() -> None:
    pools = registry()
    assert pools.max_context(4096) == 4096
    join(pools, "p0", max_context=2048)
    join(pools, "d0", max_context=1024)
    assert pools.max_context(4096) == 1024
    await pools.close()
