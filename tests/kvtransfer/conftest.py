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
ABOUT_LIBRARIES = {"test_transports", "test_transfer", "test_fencing", "test_processes"}  # at every run
IN_BAND = {"raw", "fake", "frozen", "port"}  # fixtures that speak of bytes on a TCP socket


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every transport is held to the same tests. What is left out has a reason in `_why_not`; libraries are held to
    those that are not about them by `make test-slow`, because every pair of them costs 2 s.
    """
    chosen = any("transport" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "transport" not in metafunc.fixturenames or chosen:
        return
    module = metafunc.module.__name__.rpartition(".")[2]
    test = metafunc.function.__name__
    fitting = [name for name in TRANSPORTS if _why_not(name, module, test, set(metafunc.fixturenames)) is None]
    rare = set() if module in ABOUT_LIBRARIES else set(LIBRARIES)
    metafunc.parametrize(
        "transport", [pytest.param(name, marks=pytest.mark.slow) if name in rare else name for name in fitting]
    )


QUARANTINED = {  # and test_one_sided has the same for libraries
    "test_a_process_that_ends_itself_in_the_middle_frees_what_it_had",
    "test_a_frozen_sender_ends_its_reservations_within_the_lease",
}
COPIED = {  # by the fault transport, before it delays or changes them
    "test_delay_makes_rows_and_commit_late_and_changes_nothing_else",
    "test_a_delay_from_one_layer_on_lets_the_layers_before_it_through",
    "test_corrupted_rows_are_found_and_the_source_is_untouched",
    "test_one_bit_of_the_first_or_last_byte_of_a_row_is_found",
}


def _why_not(transport: str, module: str, test: str, fixtures: set[str]) -> str | None:
    """Why a transport is not held to a test; None when it is."""
    if transport != "tcp" and not IN_BAND.isdisjoint(fixtures):
        return "the test itself writes rows in band, or freezes a socket that they are in"
    if transport == "tls*3" and module not in ABOUT_LIBRARIES:
        return "what TLS and stripes do, each does by itself"
    if module == "test_mapping" and transport in ("collective", *LIBRARIES):
        return "it sends from registered memory only and refuses mapped rows, which is a test of its own there"
    if transport in LIBRARIES and test in QUARANTINED:
        return "its rows are free at once; where a library writes they stay in quarantine until the network has drained"
    if transport.startswith("nixl") and test in COPIED:
        return "rows are sent from copies, and NIXL reads registered memory only"
    if transport in LIBRARIES and module == "test_leaks":
        return "it makes a thousand links, which take a library minutes; `nothing_left` holds for every test of theirs"
    if module == "test_metrics" and transport not in ("tcp", "shm"):
        return "the layer above counts, the same for all; test_libraries has what theirs are called"
    return None


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
