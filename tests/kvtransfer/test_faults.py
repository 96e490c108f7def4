"""Faults on purpose do what their names say, and what they break is found."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtransfer import Faults, KvSender
from tests.kvtransfer.peers import FINGERPRINT, KEY, Pair, rows_of
from twinpool.errors import ChecksumMismatch, ConfigError, PeerLost


@contextmanager
def faulty(pair: Pair, specification: str) -> Iterator[KvSender]:
    faults = Faults.parse(specification)
    sender = KvSender(pair.source, fingerprint=FINGERPRINT, cluster_key=KEY, faults=faults)
    try:
        yield sender
    finally:
        sender.close()


def test_no_specification_means_no_faults() -> None:
    assert Faults.parse("") is None
    assert Faults.parse(" , ") is None


def test_a_specification_is_read_and_announced_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        faults = Faults.parse("delay_ms=500, drop_after_rows=3,corrupt_every=10,fail_fraction=0.1,seed=1")
    assert faults == Faults(delay_ms=500, drop_after_rows=3, corrupt_every=10, fail_fraction=0.1, seed=1)
    assert "INJECTING FAULTS" in caplog.text


@pytest.mark.parametrize(
    "part",
    [
        "delay",
        "delay_ms=",
        "delay_ms=soon",
        "delay_ms=-1",
        "delay_ms=inf",
        "fail_fraction=1.5",
        "corrupt_every=1.5",
        "gremlins=3",
    ],
)
def test_a_specification_that_cannot_be_read_names_the_part(part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        Faults.parse(f"seed=1,{part}")


def test_delay_makes_rows_and_commit_late_and_changes_nothing_else(pair: Pair) -> None:
    with faulty(pair, "delay_ms=100") as sender:
        reservation, ends = pair.reserve([1, 2])
        begun = time.monotonic()
        assert pair.send(reservation, [3, 4], sender=sender).error is None
        assert time.monotonic() - begun >= 0.1
        assert ends.wait().rows == 6
        assert rows_of(pair.destination, [1, 2]) == rows_of(pair.source, [3, 4])


def test_delayed_rows_of_a_released_reservation_are_fenced(pair: Pair) -> None:
    with faulty(pair, "delay_ms=50") as sender:
        reservation, _ = pair.reserve([1, 2])
        push = pair.open(reservation, sender=sender)
        for layer in range(3):
            push.put(layer, [0, 1], [3, 4])
        reservation.release()
        other, ends = pair.reserve([1, 2], request_id="r2")
        assert pair.send(other, [5, 6]).error is None
        assert ends.wait().rows == 6
        time.sleep(0.1)  # the late rows arrive
        assert rows_of(pair.destination, [1, 2]) == rows_of(pair.source, [5, 6])


def test_a_link_breaks_after_so_many_rows(pair: Pair) -> None:
    with faulty(pair, "drop_after_rows=4") as sender:
        reservation, ends = pair.reserve([1, 2])
        assert isinstance(pair.send(reservation, [3, 4], sender=sender).error, PeerLost)
        assert isinstance(ends.wait(), PeerLost)
        small, small_ends = pair.reserve([1], request_id="r2")
        assert pair.send(small, [3], sender=sender).error is None  # another link, three rows
        assert small_ends.wait().rows == 3


@pytest.mark.parametrize("delay", ["", "delay_ms=1,"])
def test_corrupted_rows_are_found_and_the_source_is_untouched(pair: Pair, delay: str) -> None:
    before = rows_of(pair.source, range(64))
    with faulty(pair, delay + "corrupt_every=7") as sender:
        fine, _ = pair.reserve([1, 2])
        assert pair.send(fine, [3, 4], sender=sender).error is None  # six rows
        reservation, ends = pair.reserve([1, 2], request_id="r2")
        assert isinstance(pair.send(reservation, [3, 4], sender=sender).error, ChecksumMismatch)
        assert isinstance(ends.wait(), ChecksumMismatch)
    assert rows_of(pair.source, range(64)) == before


def test_a_fraction_of_transfers_fails_repeatably(pair: Pair) -> None:
    def outcomes(first: int) -> list[bool]:
        with faulty(pair, "fail_fraction=0.3,seed=4") as sender:
            results = []
            for attempt in range(first, first + 60):
                reservation, ends = pair.reserve([1], attempt=attempt)
                error = pair.send(reservation, [3], sender=sender).error
                assert error is None or isinstance(error, ChecksumMismatch)
                assert (error is None) == (not isinstance(ends.wait(), ChecksumMismatch))
                results.append(error is None)
            return results

    first = outcomes(1)
    assert 8 <= first.count(False) <= 30
    assert outcomes(100) == first
