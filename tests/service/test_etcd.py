"""Routers in a real etcd: who is listed, for how long, and what its loss does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service import etcd as module
from service.etcd import EtcdRegistry, listed
from tests.etcd import Etcd, needed
from tests.service.test_registration import until
from twinpool.errors import ConfigError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path)
    server.start()
    yield server
    server.kill()


class Follower:
    """What a worker was told last, and how often it was told anything."""

    def __init__(self) -> None:
        self.routers: frozenset[str] | None = None
        self.times = 0

    def __call__(self, routers: frozenset[str]) -> None:
        self.routers, self.times = routers, self.times + 1


@asynccontextmanager
async def following(url: str):
    follower = Follower()
    task = asyncio.create_task(EtcdRegistry(url).follow(follower))
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@needed
async def test_a_router_is_listed_as_long_as_it_announces_itself(server: Etcd) -> None:
    async with following(server.url) as follower:
        await until(lambda: follower.routers == frozenset())
        async with listed(EtcdRegistry(server.url), "10.0.0.1:7070"):
            await until(lambda: follower.routers == {"10.0.0.1:7070"})
            async with listed(EtcdRegistry(server.url), "10.0.0.2:7070"):
                await until(lambda: follower.routers == {"10.0.0.1:7070", "10.0.0.2:7070"})
            await until(lambda: follower.routers == {"10.0.0.1:7070"})  # it took itself out, its lease still ran


@needed
async def test_deployments_of_one_etcd_do_not_see_each_other(server: Etcd) -> None:
    async with following(f"{server.url}/a") as a, following(f"{server.url}/ab") as ab:
        async with listed(EtcdRegistry(f"{server.url}/ab/"), "10.0.0.1:7070"):
            await until(lambda: ab.routers == {"10.0.0.1:7070"})
            assert a.routers == frozenset()


@needed
async def test_a_router_that_died_is_listed_until_its_lease_is_over(
    server: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_S", 2)
    async with following(server.url) as follower:
        task = asyncio.create_task(EtcdRegistry(server.url).announce("10.0.0.1:7070"))
        await until(lambda: follower.routers == {"10.0.0.1:7070"})
        await asyncio.sleep(3)  # beyond the first lease: it is renewed
        assert follower.routers == {"10.0.0.1:7070"}
        monkeypatch.setattr("aetcd.Lease.revoke", lambda lease: asyncio.sleep(0))  # dies without a word
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: follower.routers == frozenset())


@needed
@pytest.mark.parametrize("data_lost", [False, True])
async def test_the_loss_of_etcd_changes_nothing_until_it_is_back(
    server: Etcd, data_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(server.url) as follower, listed(EtcdRegistry(server.url), "10.0.0.1:7070"):
        await until(lambda: follower.routers == {"10.0.0.1:7070"})
        server.kill()
        await until(lambda: any("registry cannot be reached" in record.message for record in caplog.records))
        told = follower.times
        await asyncio.sleep(1)
        assert (follower.routers, follower.times) == ({"10.0.0.1:7070"}, told)
        if data_lost:
            server.forget()
        server.start()
        await until(lambda: follower.times > told and follower.routers == {"10.0.0.1:7070"})
        async with listed(EtcdRegistry(server.url), "10.0.0.2:7070"):
            await until(lambda: follower.routers == {"10.0.0.1:7070", "10.0.0.2:7070"})
    (first, *_) = [record for record in caplog.records if "registry cannot be reached" in record.message]
    assert first.levelname == "ERROR"
    assert first.endpoint == server.url.removeprefix("etcd://")


@needed
async def test_a_frozen_etcd_is_noticed_and_read_again_when_it_goes_on(
    server: Etcd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "READ_AGAIN_S", 0.5)
    monkeypatch.setattr(module, "CALL_TIMEOUT_S", 0.5)
    async with following(server.url) as follower:
        await until(lambda: follower.routers is not None)
        server.freeze()
        await until(lambda: any("registry cannot be reached" in record.message for record in caplog.records))
        server.thaw()
        async with listed(EtcdRegistry(server.url), "10.0.0.1:7070"):
            await until(lambda: follower.routers == {"10.0.0.1:7070"})


@needed
async def test_the_next_endpoint_is_tried_when_one_is_dead(server: Etcd) -> None:
    alive = server.url.removeprefix("etcd://")
    url = f"etcd://127.0.0.1:9,{alive}/x"
    async with following(url) as follower, listed(EtcdRegistry(url), "10.0.0.1:7070"):
        await until(lambda: follower.routers == {"10.0.0.1:7070"})


@pytest.mark.parametrize(
    "url", ["http://a:1", "etcd://", "etcd:///prefix", "etcd://a:x", "a:2379", "etcd://secret:word@", "etcd://a?b=c"]
)
def test_an_url_that_names_no_etcd_is_refused_without_repeating_a_password(url: str) -> None:
    with pytest.raises(ConfigError, match="registry") as caught:
        EtcdRegistry(url)
    assert "secret" not in caught.value.message


def test_endpoints_and_default_port() -> None:
    assert EtcdRegistry("etcd://u:p@a,b:99/x/y").endpoints == ["a:2379", "b:99"]
