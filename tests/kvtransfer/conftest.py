from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

from kvtransfer import Reservation
from kvtransfer.target import Target
from tests.kvtransfer.peers import FakeReceiver, Pair, RawSender, eventually

settings.register_profile("no timing", deadline=None)
settings.load_profile("no timing")


@pytest.fixture(params=["tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """Every transport is held to the same tests."""
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a transfer thread or a file descriptor behind."""
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("kv-")], "end of the kv threads")
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "closing of the descriptors")


@pytest.fixture
def pair(transport: str) -> Iterator[Pair]:
    pair = Pair(transport)
    yield pair
    pair.close()


@pytest.fixture
def quiet() -> Iterator[None]:
    """No log records, which pytest would keep: for tests that weigh memory."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def raw(pair: Pair) -> Iterator[RawSenders]:
    senders = RawSenders(pair)
    yield senders
    senders.close()


@pytest.fixture
def fake(pair: Pair) -> Iterator[FakeReceiver]:
    receiver = FakeReceiver(pair.destination)
    yield receiver
    receiver.close()


class RawSenders:
    """Makes raw senders for a pair's receiver and closes them."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._made: list[RawSender] = []

    def __call__(self, reservation: Reservation, *, greet: bool = True) -> RawSender:
        sender = RawSender(self._pair.receiver, Target.decode(reservation.target), self._pair.source, greet=greet)
        self._made.append(sender)
        return sender

    def close(self) -> None:
        while self._made:
            self._made.pop().close()
