"""Several routers over the same workers, as processes: by a list, by a name that changes, and by etcd."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.etcd import Etcd, needed
from tests.flow.cluster import Cluster, wait_until
from tests.flow.oracle import Oracle
from twinpool import errors
from twinpool.client import Client

PROMPT = list(range(20, 90))
DROPPED = "router dropped, as it is not listed any more"
ASK = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def answer(tiny_model: Path) -> list[int]:
    return Oracle(tiny_model).answer(PROMPT, 20, ignore_eos=True)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path)
    server.start()
    yield server
    server.kill()


def pair(cluster: Cluster, **options: str) -> None:
    for pool in ("prefill", "decode"):
        cluster.worker(pool, f"{pool}-0", **options)
    cluster.wait_ready("prefill-0", "decode-0")


def test_clients_go_to_another_router_when_theirs_dies_and_its_workers_serve_both(
    deploy: Callable[..., Cluster], answer: list[int]
) -> None:
    cluster = deploy(0, 0)
    first, second = cluster.processes["router"], cluster.router("router-2")
    pair(cluster)  # with the list of both
    for router in ("router", "router-2"):
        cluster.wait_workers(2, router)
        with cluster.client(router) as client:
            assert client.generate(PROMPT, **ASK).token_ids == answer
    with Client([first.address, second.address], retries=0, timeout_s=30) as client:
        stream = client.stream(PROMPT, max_tokens=1500, ignore_eos=True)
        next(stream)
        first.kill()
        with pytest.raises(errors.Unavailable):  # what has been delivered cannot be taken back
            stream.read()
        # unary, and a stream before its first token: by the other, without a further round
        assert client.generate(PROMPT, **ASK).token_ids == answer
        assert client.stream(PROMPT, **ASK).read().token_ids == answer
    with Client([first.address, second.address], retries=0, timeout_s=30) as fresh:
        assert fresh.stream(PROMPT, **ASK).read().token_ids == answer
    cluster.assert_baseline("router-2")


def test_routers_that_a_name_gains_are_joined_and_those_it_loses_are_forgotten(
    deploy: Callable[..., Cluster], tmp_path: Path, answer: list[int]
) -> None:
    cluster = deploy(0, 0)
    hosts = tmp_path / "hosts"
    hosts.write_text(json.dumps({"routers.test": ["127.0.0.1"]}))
    first = cluster.processes["router"]
    port = first.address.rpartition(":")[2]
    for pool in ("prefill", "decode"):
        cluster.worker(pool, f"{pool}-0", hosts=hosts, routers=f"routers.test:{port}")
    cluster.wait_ready("prefill-0", "decode-0")
    cluster.wait_workers(2)
    second = cluster.router("router-2", host="127.0.0.2", port=port)
    hosts.write_text(json.dumps({"routers.test": ["127.0.0.1", "127.0.0.2"]}))
    cluster.wait_workers(2, "router-2")
    assert second.address == f"127.0.0.2:{port}"
    hosts.write_text(json.dumps({"routers.test": ["127.0.0.2"]}))
    assert first.stop() == 0
    wait_until(lambda: cluster.processes["decode-0"].log_records(DROPPED), "the first is dropped")
    with cluster.client("router-2") as client:
        assert client.generate(PROMPT, **ASK).token_ids == answer
    cluster.assert_baseline("router-2")


@needed
@pytest.mark.timeout(240)
def test_workers_find_routers_in_etcd_and_serve_on_without_it(
    deploy: Callable[..., Cluster], etcd: Etcd, answer: list[int]
) -> None:
    cluster = deploy(0, 0)
    cluster.processes.pop("router").stop()
    first = cluster.router("router-1", registry=etcd.url)
    pair(cluster, registry=etcd.url)
    cluster.wait_workers(2, "router-1")
    second = cluster.router("router-2", registry=etcd.url)
    cluster.wait_workers(2, "router-2")
    with Client([first.address, second.address], timeout_s=30) as client:
        assert client.generate(PROMPT, **ASK).token_ids == answer
        etcd.kill()
        lost = "registry cannot be reached; going on with what is known"
        for name in ("router-1", "decode-0"):
            wait_until(lambda name=name: cluster.processes[name].log_records(lost), f"{name} says so")
        assert client.generate(PROMPT, **ASK).token_ids == answer
        first.kill()
        assert client.generate(PROMPT, **ASK).token_ids == answer
        third = cluster.router("router-3", registry=etcd.url)  # nobody can know of it yet
        etcd.start()
        cluster.wait_workers(2, "router-3")
    with Client(third.address, timeout_s=30) as client:
        assert client.generate(PROMPT, **ASK).token_ids == answer
    assert second.stop() == 0
    worker = cluster.processes["decode-0"]
    gone = {first.address, second.address}
    wait_until(lambda: {record["router"] for record in worker.log_records(DROPPED)} == gone, "both are dropped", 30)
    cluster.assert_baseline("router-3")


def test_a_registry_that_is_none_ends_the_start_with_one_line(deploy: Callable[..., Cluster]) -> None:
    cluster = deploy(0, 0)
    worker = cluster.worker("decode", "decode-0", registry="redis://127.0.0.1:6379")
    assert worker.popen.wait(60) == 2
    assert "--registry is not etcd://HOST:PORT" in worker.log.splitlines()[-1]
