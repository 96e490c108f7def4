"""A worker's side of Registry.Join against a real gRPC server that plays the router."""

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest

from service import serve
from service.discovery import NamedRouters
from service.registration import Registration, new_incarnation
from twinpool.errors import ConfigError, Incompatible
from twinpool.v1.router_pb2 import POOL_DECODE
from twinpool.v1.worker_pb2 import RegistryReply, WorkerInfo, WorkerLoad
from twinpool.v1.worker_pb2_grpc import RegistryServicer, add_RegistryServicer_to_server


class Registry(RegistryServicer):
    """Admits everybody, or refuses with `refusal`; keeps the reports and counts the joins and the leases it holds."""

    def __init__(self, heartbeat_ms: int = 20, refusal: str = "") -> None:
        self.heartbeat_ms = heartbeat_ms
        self.refusal = refusal
        self.reports = []
        self.num_joins = 0
        self.num_leases = 0

    async def Join(self, reports, context):
        self.num_joins += 1
        self.num_leases += 1
        try:
            async for report in reports:
                self.reports.append(report)
                if self.refusal:
                    raise Incompatible(self.refusal)
                if report.HasField("info"):
                    yield RegistryReply(heartbeat_ms=self.heartbeat_ms, lease_ms=1000)
        finally:
            self.num_leases -= 1


async def serve_registry(registry: Registry, *, port: int = 0, cluster_key: str = "") -> serve.Serving:
    service = serve.Service(
        name="twinpool.v1.Registry", add=add_RegistryServicer_to_server, servicer=registry, internal=True
    )
    return await serve.serve([service], host="127.0.0.1", port=port, cluster_key=cluster_key)


def worker_info() -> WorkerInfo:
    return WorkerInfo(worker_id="decode-1", incarnation=7, pool=POOL_DECODE, address="127.0.0.1:7072", block_size=64)


@asynccontextmanager
async def registered(*ports: int, load: Callable[[], WorkerLoad] = WorkerLoad, **options):
    routers = [f"127.0.0.1:{port}" for port in ports]
    registration = Registration(routers=NamedRouters(routers), info=worker_info(), load=load, **options)
    await registration.start()
    try:
        yield registration
    finally:
        await registration.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_worker_sends_its_info_once_and_then_its_load_every_heartbeat():
    registry = Registry()
    serving = await serve_registry(registry)
    running = 0

    def load() -> WorkerLoad:
        nonlocal running
        running += 1
        return WorkerLoad(running=running)

    async with registered(serving.port, load=load) as registration:
        await until(lambda: len(registry.reports) >= 4)
        assert registration.joined == {f"127.0.0.1:{serving.port}"}
    assert registry.reports[0].info == worker_info()
    assert not any(report.HasField("info") for report in registry.reports[1:])
    assert [report.load.running for report in registry.reports[:4]] == [1, 2, 3, 4]
    await serving.stop(0)


async def test_a_router_that_starts_later_is_joined():
    first = await serve_registry(Registry())
    port = first.port
    await first.stop(0)
    async with registered(port) as registration:
        await asyncio.sleep(0.3)
        assert not registration.joined
        serving = await serve_registry(Registry(), port=port)
        await until(lambda: bool(registration.joined))
    await serving.stop(0)


async def test_a_restart_of_the_router_is_survived():
    registry = Registry()
    serving = await serve_registry(registry)
    async with registered(serving.port) as registration:
        await until(lambda: bool(registration.joined))
        await serving.stop(0)
        await until(lambda: not registration.joined)
        after = Registry()
        serving = await serve_registry(after, port=serving.port)
        await until(lambda: bool(registration.joined))
        assert after.reports[0].info == worker_info()
    await serving.stop(0)


async def test_every_router_gets_a_lease_of_its_own():
    registries = Registry(), Registry()
    servings = [await serve_registry(registry) for registry in registries]
    async with registered(*(serving.port for serving in servings)) as registration:
        await until(lambda: len(registration.joined) == 2)
        await servings[0].stop(0)
        await until(lambda: len(registration.joined) == 1)
        seen = len(registries[1].reports)
        await until(lambda: len(registries[1].reports) > seen + 2)
    await servings[1].stop(0)


async def test_a_refusal_is_logged_with_its_reason_and_not_repeated_in_haste(caplog):
    registry = Registry(refusal="this router serves model A, the worker has model B")
    serving = await serve_registry(registry)
    async with registered(serving.port) as registration:
        await until(lambda: any("refuses" in record.message for record in caplog.records))
        await asyncio.sleep(0.5)
        assert not registration.joined
    (record,) = [record for record in caplog.records if "refuses" in record.message]
    assert record.reason == "this router serves model A, the worker has model B"
    assert (record.levelname, record.router) == ("ERROR", f"127.0.0.1:{serving.port}")
    assert registry.num_joins == 1
    await serving.stop(0)


async def test_a_refusal_is_lifted_when_the_router_changes_its_mind():
    registry = Registry(refusal="not now")
    serving = await serve_registry(registry)
    async with registered(serving.port, retry_refused_s=0.05) as registration:
        await until(lambda: registry.num_joins >= 2)
        registry.refusal = ""
        await until(lambda: bool(registration.joined))
    await serving.stop(0)


@pytest.mark.parametrize(("key", "joins"), [("", False), ("wrong", False), ("right", True)])
async def test_only_a_worker_with_the_cluster_key_joins(key, joins, caplog):
    registry = Registry()
    serving = await serve_registry(registry, cluster_key="right")
    async with registered(serving.port, cluster_key=key) as registration:
        await until(lambda: bool(registration.joined) or any("refuses" in r.message for r in caplog.records))
        assert bool(registration.joined) is joins
    assert bool(registry.reports) is joins
    await serving.stop(0)


async def test_news_reach_the_router_before_the_next_heartbeat():
    registry = Registry(heartbeat_ms=3_600_000)
    serving = await serve_registry(registry)
    draining = False
    async with registered(serving.port, load=lambda: WorkerLoad(draining=draining)) as registration:
        await until(lambda: bool(registration.joined))
        draining = True
        registration.report_now()
        await until(lambda: len(registry.reports) == 2)
        assert registry.reports[1].load.draining
    await serving.stop(0)


async def test_stop_ends_the_lease_and_leaves_no_task():
    registry = Registry()
    serving = await serve_registry(registry)
    before = asyncio.all_tasks()
    async with registered(serving.port) as registration:
        await until(lambda: bool(registration.joined))
    await registration.stop()  # may be repeated
    await until(lambda: registry.num_leases == 0)
    await serving.stop(0)
    assert not {task for task in asyncio.all_tasks() - before if task.get_name().startswith("join")}


async def test_a_bug_in_the_load_callback_does_not_end_the_membership(caplog):
    registry = Registry()
    serving = await serve_registry(registry)
    loads = iter([RuntimeError("boom"), WorkerLoad(running=1)])

    def load() -> WorkerLoad:
        each = next(loads, WorkerLoad(running=2))
        if isinstance(each, Exception):
            raise each
        return each

    async with registered(serving.port, load=load) as registration:
        await until(lambda: bool(registration.joined))
    assert any("registration failed" in record.message and record.exc_info for record in caplog.records)
    await serving.stop(0)


ROUTER = """
import asyncio
from service import serve
from tests.service.test_registration import Registry, serve_registry

async def main(stop):
    serving = await serve_registry(Registry())
    print(serving.port, flush=True)
    await stop.wait()
    await serving.stop(0)

serve.run(main)
"""


async def test_a_frozen_router_is_noticed_and_joined_again_when_it_goes_on():
    router = await asyncio.create_subprocess_exec(sys.executable, "-c", ROUTER, stdout=asyncio.subprocess.PIPE)
    try:
        port = int(await asyncio.wait_for(router.stdout.readline(), 30))
        async with registered(port) as registration:
            await until(lambda: bool(registration.joined))
            router.send_signal(signal.SIGSTOP)
            await until(lambda: not registration.joined, timeout_s=60)
            router.send_signal(signal.SIGCONT)
            await until(lambda: bool(registration.joined))
    finally:
        router.send_signal(signal.SIGCONT)
        router.terminate()
        await asyncio.wait_for(router.wait(), 30)


def test_a_router_without_a_port_is_refused_at_once():
    with pytest.raises(ConfigError, match="'router' is not HOST:PORT"):
        NamedRouters(["router"])


def test_incarnations_grow():
    first = new_incarnation()
    assert 0 < first < new_incarnation() < 1 << 64
