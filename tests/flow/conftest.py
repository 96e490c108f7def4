"""Fixtures that start real processes: `shared` is one deployment for tests that kill nothing, `deploy` makes others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.fakes import Faults
from tests.flow.cluster import Cluster, open_cluster

TRANSPORTS = ("tcp", "shm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flow)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def shared_deployment(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Cluster]:
    yield from open_cluster(tmp_path_factory.mktemp("shared"), tiny_model, 2, 2)


@pytest.fixture
def shared(shared_deployment: Cluster) -> Iterator[Cluster]:
    yield shared_deployment
    shared_deployment.assert_baseline()


@pytest.fixture
def deploy(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Cluster]]:
    """deploy(prefill, decode, router=its options, **worker_options) -> a ready Cluster of this test's own."""
    opened: list[Iterator[Cluster]] = []

    def start(prefill: int, decode: int, **options: Any) -> Cluster:
        deployment = open_cluster(tmp_path / f"deployment-{len(opened)}", tiny_model, prefill, decode, **options)
        (tmp_path / f"deployment-{len(opened)}").mkdir()
        opened.append(deployment)
        return next(deployment)

    yield start
    for deployment in opened:
        deployment.close()


@pytest.fixture
def with_prefill(deploy: Callable[..., Cluster], transport: str) -> Callable[..., Cluster]:
    """with_prefill(faults, **options of both workers): a deployment of one faulty prefill and one decode worker."""

    def start(faults: Faults, **options: str) -> Cluster:
        router = {"probe_timeout": "0", "when_pool_empty": "fail"}  # nothing but what the faulty one does
        cluster = deploy(0, 1, router=router, kv_transport=transport, **options)
        cluster.worker("prefill", "prefill-0", faults=faults, kv_transport=transport, **options)
        cluster.wait_ready("prefill-0")
        cluster.wait_workers(2)
        return cluster

    return start
