"""Health of a worker on a clock that the test turns."""

from __future__ import annotations

import pytest

from router.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock, threshold=3, first_pause_s=1.0, longest_pause_s=8.0)


def test_three_faults_in_a_row_open_it(breaker: Breaker) -> None:
    for _ in range(2):
        breaker.failed()
    assert breaker.allows
    breaker.succeeded()
    for _ in range(2):
        breaker.failed()
    assert breaker.allows
    breaker.failed()
    assert not breaker.allows
    assert 0.8 <= breaker.pause_s <= 1.2


def test_one_lost_connection_opens_it_however_many_requests_were_on_it(breaker: Breaker, clock: Clock) -> None:
    for _ in range(50):
        breaker.failed(connection_lost=True)
    assert not breaker.allows
    clock.now += 1.3
    assert breaker.allows


def test_after_the_pause_one_probe_goes_through(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(connection_lost=True)
    clock.now += 1.3
    assert breaker.begin()
    assert not breaker.allows
    breaker.succeeded()
    breaker.end_probe()
    assert breaker.allows
    assert not breaker.begin()


def test_probe_without_a_verdict_lets_the_next_one_through(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(connection_lost=True)
    clock.now += 1.3
    breaker.begin()
    breaker.end_probe()
    assert breaker.allows


def test_pause_doubles_with_every_failed_probe_up_to_a_limit(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(connection_lost=True)
    for pause in (2, 4, 8, 8):
        clock.now += 20
        breaker.begin()
        breaker.failed()
        breaker.end_probe()
        assert 0.8 * pause <= breaker.pause_s <= 1.2 * pause


def test_counted_faults_are_a_suspicion_and_a_lost_connection_is_more(breaker: Breaker, clock: Clock) -> None:
    assert breaker.suspicion == 0
    for _ in range(3):
        breaker.failed()
    assert breaker.suspicion == 1
    clock.now += 1.3
    breaker.begin()
    breaker.failed(connection_lost=True)
    breaker.end_probe()
    assert breaker.suspicion is None
    breaker.succeeded()
    assert breaker.suspicion == 0
