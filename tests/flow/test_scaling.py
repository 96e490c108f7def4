"""Pools grow, shrink and are renewed under load, and nobody who asks notices."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes import Faults
from tests.flow.cluster import Cluster, wait_until
from tests.flow.oracle import Oracle
from twinpool.client import AsyncClient, Client

PROMPTS = [[(7 * i + 13 * j) % 230 + 10 for j in range(20 + 15 * i)] for i in range(6)]
TOKENS = 60


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


@contextmanager
def load(client: Client, oracle: Oracle, num_clients: int = 4) -> Iterator[None]:
    """Asks all the while; afterwards every answer must have come, and be the right one."""
    right = [oracle.answer(prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS]
    over = threading.Event()

    def ask(first: int) -> int:
        for number in itertools.count(first):
            if over.is_set():
                return number - first
            prompt = PROMPTS[number % len(PROMPTS)]
            answer = client.generate(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True, n=1 + number % 2)
            assert all(choice.token_ids == right[number % len(PROMPTS)] for choice in answer.choices)
        raise AssertionError("not reached")

    with ThreadPoolExecutor(num_clients) as threads:
        asked: list[Future[int]] = [threads.submit(ask, first) for first in range(num_clients)]
        try:
            yield
        finally:
            over.set()
        assert min(future.result() for future in asked) > 0


def stop(cluster: Cluster, *names: str) -> None:
    for name in names:
        assert cluster.processes[name].stop(60) == 0, name


@pytest.mark.timeout(240)
def test_pools_shrink_and_grow_under_load_without_a_failed_request(
    deploy: Callable[..., Cluster], oracle: Oracle
) -> None:  # R7
    cluster = deploy(2, 3)
    with cluster.client(retries=0, timeout_s=60) as client:
        with load(client, oracle):
            wait_until(lambda: client.pools().running >= 3, "the load runs")
            stop(cluster, "decode-0", "decode-2", "prefill-0")
            assert {worker.worker_id for worker in client.pools().workers} == {"decode-1", "prefill-1"}
            for pool in ("decode", "prefill"):
                cluster.worker(pool, f"{pool}-new")
            cluster.wait_ready("decode-new", "prefill-new")
            cluster.wait_workers(4)
            wait_until(lambda: used(cluster, "decode-new", "prefill-new"), "the new workers are used")
    cluster.assert_baseline()


@pytest.mark.timeout(240)
def test_every_worker_is_restarted_in_turn_under_load_without_a_failed_request(
    deploy: Callable[..., Cluster], oracle: Oracle
) -> None:  # R7
    cluster = deploy(2, 2)
    with cluster.client(retries=0, timeout_s=60) as client:
        with load(client, oracle):
            for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
                port = cluster.processes[name].address.rpartition(":")[2]
                stop(cluster, name)
                cluster.worker(name.partition("-")[0], name, port=port)  # as a service manager does
                cluster.wait_ready(name)
                cluster.wait_workers(4)
    cluster.assert_baseline()


def test_a_fresh_decode_worker_among_busy_ones_is_not_flooded(deploy: Callable[..., Cluster]) -> None:  # R6
    cluster = deploy(1, 2)
    placed = asyncio.run(_placements_after_a_join(cluster))
    cluster.wait_ready("decode-new")
    assert "decode-new" in placed
    assert placed.count("decode-new") <= 1.5 * len(placed) / 3 + 1, placed  # one more: the first after the join
    cluster.assert_baseline()


async def _placements_after_a_join(cluster: Cluster) -> list[str]:
    """Sixteen keep two decode workers busy when a third joins; where twelve more that then come at once are placed."""
    joined = False

    async def busy(client: AsyncClient, number: int) -> None:
        while not joined:
            await client.generate(PROMPTS[number % 6], max_tokens=TOKENS, ignore_eos=True)

    async def decode_worker(client: AsyncClient, number: int) -> str:
        answer = await client.generate(PROMPTS[number % 6], max_tokens=TOKENS, ignore_eos=True)
        return answer.timeline.decode_worker

    async with AsyncClient(cluster.processes["router"].address, retries=0, timeout_s=60) as client:
        async with asyncio.TaskGroup() as tasks:
            for number in range(16):
                tasks.create_task(busy(client, number))
            cluster.worker("decode", "decode-new")
            async with asyncio.timeout(60):
                while sum(w.state == "ready" for w in (await client.pools()).workers) < 4:
                    await asyncio.sleep(0.02)
            joined = True
            return list(await asyncio.gather(*(decode_worker(client, number) for number in range(12))))


def test_a_drained_prefill_worker_waits_until_its_rows_have_been_fetched(
    deploy: Callable[..., Cluster], oracle: Oracle
) -> None:
    cluster = deploy(0, 1, router={"probe_timeout": "0"})
    slow = cluster.worker("prefill", "prefill-slow", faults=Faults(delay_ms=300))  # each row
    cluster.wait_ready("prefill-slow")
    cluster.wait_workers(2)
    prompt = PROMPTS[0]
    with cluster.client(retries=0, timeout_s=60) as client:
        with client.stream(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True) as stream:
            first = next(stream)  # sampled by the prefill worker, while its rows are on the way
            assert slow.metric("twinpool_prefill_running") == 1
            assert cluster.processes["decode-0"].metric("twinpool_decode_reservations") == 1
            status = slow.stop(60)
            answer = stream.read()
    assert status == 0
    assert answer.token_ids[:1] == first.token_ids[:1]
    assert answer.token_ids == oracle.answer(prompt, TOKENS, ignore_eos=True)
    assert answer.timeline.attempts == 1
    cluster.assert_baseline()


def test_desired_numbers_of_workers_are_told_and_exported(shared: Cluster) -> None:
    with shared.client() as client:
        for _ in range(10):  # until the speed of the workers is known
            for prompt in PROMPTS:
                client.generate(prompt, max_tokens=24, ignore_eos=True)
        pools = wait_until(lambda: (p := client.pools()) and all(s.load > 0 for s in p.sizes) and p, "a load is seen")
    router = shared.processes["router"]
    for size in pools.sizes:
        assert size.current == 2
        assert size.desired >= 1
        assert "a worker" in size.reason if size.pool == "decode" else "prompts/s" in size.reason
        assert router.metric("twinpool_desired_replicas", pool=size.pool) == size.desired
        assert router.metric("twinpool_pool_load", pool=size.pool) > 0
    command = [sys.executable, "-m", "twinpool", "pools", "--router", router.address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert "prefill: 2 joined, " in shown
    assert "decode: 2 joined, " in shown
    assert " desired (" in shown


def used(cluster: Cluster, decode: str, prefill: str) -> bool:
    return bool(
        cluster.processes[decode].metric("twinpool_decode_tokens_total")
        and cluster.processes[prefill].metric("twinpool_prefill_requests_total")
    )
