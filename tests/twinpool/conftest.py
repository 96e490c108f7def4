from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.twinpool.fake_router import FakeRouter


@pytest.fixture
def open_router() -> Iterator[Callable[[], FakeRouter]]:
    """open_router() -> a new FakeRouter, closed at the end of the test."""
    routers: list[FakeRouter] = []

    def start() -> FakeRouter:
        routers.append(FakeRouter())
        return routers[-1]

    yield start
    for router in routers:
        router.close()


@pytest.fixture
def router(open_router: Callable[[], FakeRouter]) -> FakeRouter:
    return open_router()


@pytest.fixture
def dead_address(open_router: Callable[[], FakeRouter]) -> str:
    """Where nothing listens any more."""
    gone = open_router()
    gone.close()
    return gone.address
