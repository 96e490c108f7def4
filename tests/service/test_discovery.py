"""Routers behind one name, looked up again and again: the new are joined, those gone are dropped after their lease."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from service import serve
from service.discovery import NamedRouters, RouterAddress, source, towards
from service.registration import Registration
from tests.service.test_registration import Registry, until, worker_info
from twinpool.errors import ConfigError
from twinpool.v1.worker_pb2 import WorkerLoad
from twinpool.v1.worker_pb2_grpc import add_RegistryServicer_to_server


class NameServer:
    """Answers for "routers.test" with `addresses`, or fails while there are none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.asked = 0
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._answer)

    def _answer(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if host != "routers.test":
            return self._real(host, port, *args, **kwargs)
        self.asked += 1
        if not self.addresses:
            raise socket.gaierror("no such name")
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port))
            for each in self.addresses
        ]


async def serve_registry(host: str, port: int = 0) -> tuple[Registry, serve.Serving]:
    registry = Registry()
    service = serve.Service(name="twinpool.v1.Registry", add=add_RegistryServicer_to_server, servicer=registry)
    return registry, await serve.serve([service], host=host, port=port)


async def test_routers_that_a_name_gains_are_joined_and_those_it_loses_are_dropped_when_they_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    names = NameServer(monkeypatch, "127.0.0.1")
    first, serving = await serve_registry("127.0.0.1")
    second, other = await serve_registry("127.0.0.2", serving.port)
    routers = NamedRouters([f"routers.test:{serving.port}"], every_s=0.02)
    registration = Registration(routers=routers, info=worker_info(), load=WorkerLoad)
    await registration.start()
    try:
        await until(lambda: registration.joined == {f"127.0.0.1:{serving.port}"})
        assert not second.num_joins
        names.addresses.append("127.0.0.2")
        await until(lambda: len(registration.joined) == 2)
        names.addresses.remove("127.0.0.1")  # but it is there, and its lease goes on
        asked, reports = names.asked, len(first.reports)
        await until(lambda: names.asked > asked + 3 and len(first.reports) > reports + 3)
        assert len(registration.joined) == 2
        assert first.num_joins == 1
        await serving.stop(0)
        await until(lambda: any("router dropped" in record.message for record in caplog.records))
        assert registration.joined == {f"127.0.0.2:{serving.port}"}
        names.addresses.clear()  # the name server fails: nothing changes
        asked = names.asked
        await until(lambda: names.asked > asked + 3)
        assert registration.joined == {f"127.0.0.2:{serving.port}"}
        assert second.num_joins == 1
    finally:
        await registration.stop()
        await other.stop(0)
    (record,) = [record for record in caplog.records if "not resolved" in record.message]
    assert (record.host, record.reason) == ("routers.test", "no such name")


async def test_a_router_with_addresses_of_both_families_is_one_router(monkeypatch: pytest.MonkeyPatch) -> None:
    NameServer(monkeypatch, "::1", "127.0.0.1")
    found: list[RouterAddress] = []
    task = asyncio.create_task(NamedRouters(["routers.test:7070"], every_s=60).follow(found.extend))
    await until(lambda: bool(found))
    task.cancel()
    assert found == [RouterAddress(address="127.0.0.1:7070", name="routers.test")]


async def test_addresses_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("no name, nothing to look up"))
    found: list[RouterAddress] = []
    task = asyncio.create_task(NamedRouters(["10.0.0.1:7070", "[fd00::1]:7070"], every_s=0.01).follow(found.extend))
    await asyncio.sleep(0.1)
    task.cancel()
    assert found == [RouterAddress(address="10.0.0.1:7070"), RouterAddress(address="[fd00::1]:7070")]


def test_a_registry_takes_the_place_of_names() -> None:
    assert isinstance(source(["a:1"]), NamedRouters)
    assert not isinstance(source(["a:1"], "etcd://e"), NamedRouters)
    assert (towards(["a:1", "b:2"]), towards([]), towards(["a:1"], "etcd://e")) == ("a:1", "", "e:2379")
    with pytest.raises(ConfigError, match="not HOST:PORT"):
        source(["a"])
    with pytest.raises(ConfigError, match="--routers is empty"):
        source([])
    with pytest.raises(ConfigError, match="a:0 has no port"):
        source(["a:0"])
