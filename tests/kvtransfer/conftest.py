from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

from kvtransfer import Reservation, transports
from kvtransfer.target import Target
from kvtransfer.transports.tcp import parse_endpoint
from tests.kvtransfer.peers import FakeReceiver, Pair, RawSender, eventually
from twinpool.errors import ConfigError

settings.register_profile("no timing", deadline=None)
settings.load_profile("no timing")


OWN = ("tcp", "tcp*3", "tls", "tls*3", "shm", "collective")  # tls: tcp with certificates; *3: by three streams
LIBRARIES = ("mooncake+tcp", "nixl+tcp")
ABOUT_LIBRARIES = {"test_transports", "test_transfer", "test_fencing", "test_processes"}  # a pair of them costs 2 s
IN_BAND = {"raw", "fake", "frozen", "port"}  # fixtures that speak of bytes on a TCP socket


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every transport is held to the same tests."""
    if "transport" in metafunc.fixturenames:
        known: tuple[str, ...] = OWN if IN_BAND.isdisjoint(metafunc.fixturenames) else OWN[:1]
        if metafunc.module.__name__.endswith("test_mapping"):
            known = tuple(name for name in known if name != "collective")  # it refuses mapped rows
        if metafunc.module.__name__.endswith("test_metrics"):
            known = ("tcp", "shm")
        if metafunc.module.__name__.rpartition(".")[2] not in ABOUT_LIBRARIES:
            known = tuple(name for name in known if name != "tls*3")  # what TLS and stripes do, each does by itself
        if known == OWN and metafunc.module.__name__.rpartition(".")[2] in ABOUT_LIBRARIES:
            known = TRANSPORTS
        metafunc.parametrize("transport", known)


def _installed() -> Iterator[str]:
    """Transports whose library can be loaded here."""
    for name in LIBRARIES:
        try:
            transports.create(name)
        except ConfigError as exc:
            print(f"tests of KV transport {name} are left out: {exc.message}", file=sys.stderr)
        else:
            yield name


TRANSPORTS = (*OWN, *_installed())


@functools.cache
def used_before(transport: str) -> None:
    """What a library keeps for good after its first use in a process (pipes, threads) is no leak of a test's."""
    pair = Pair(transport)
    pair.assert_serves()
    pair.close()


def num_descriptors() -> int:
    """Open ones, without memory: that lives as long as somebody looks at it, and tests look until their end."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the listing itself
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return len([path for path in paths if not path.startswith("/memfd:")])


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a transfer thread or a file descriptor behind."""
    for transport in ("collective", *LIBRARIES):
        if transport in request.node.name:
            used_before(transport)
    descriptors = num_descriptors()
    yield
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("kv-")], "end of the kv threads")
    # What a failed push ended with holds, by its traceback, the library that it failed in.
    eventually(lambda: num_descriptors() <= descriptors or (gc.collect() and False), "closing of the descriptors")


@pytest.fixture
def pair(transport: str) -> Iterator[Pair]:
    pair = Pair(transport)
    yield pair
    pair.close()


@pytest.fixture
def port(pair: Pair) -> int:
    """The receiver's."""
    return parse_endpoint(pair.receiver.endpoints[-1])[1]


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
