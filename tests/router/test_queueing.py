"""Erlang's formulas against published tables and worked examples, and against closed forms."""

from __future__ import annotations

import math

import pytest

from router.queueing import erlang_b, erlang_c, mean_wait_s, places_for, servers_for_wait, wait_exceeds


@pytest.mark.parametrize(
    ("servers", "load", "blocked"),
    [(5, 1.36, 0.01), (10, 4.46, 0.01), (10, 5.08, 0.02), (20, 12.03, 0.01), (30, 21.93, 0.02), (100, 84.06, 0.01)],
)
def test_erlang_b_is_that_of_the_traffic_tables(servers: int, load: float, blocked: float) -> None:
    assert erlang_b(servers, load) == pytest.approx(blocked, rel=0.01)


def test_erlang_c_of_360_calls_in_half_an_hour_of_4_minutes_for_55_agents() -> None:
    # the worked example of mitan.co.uk's Erlang-C tutorial
    load, service_s = 360 / 1800 * 240, 240
    assert erlang_c(55, load) == pytest.approx(0.239, abs=5e-4)
    assert mean_wait_s(55, load, service_s) == pytest.approx(8.2, abs=0.05)
    assert 1 - wait_exceeds(15, 55, load, service_s) == pytest.approx(0.846, abs=5e-4)


@pytest.mark.parametrize(("agents", "waits", "in_time"), [(11, 0.682, 0.390), (14, 0.174, 0.888)])
def test_erlang_c_of_100_calls_in_half_an_hour_of_3_minutes(agents: int, waits: float, in_time: float) -> None:
    # the worked example of callcentrehelper.com
    load = 100 / 1800 * 180
    assert erlang_c(agents, load) == pytest.approx(waits, abs=1e-3)
    assert 1 - wait_exceeds(20, agents, load, 180) == pytest.approx(in_time, abs=1e-3)


def test_the_fewest_servers_that_keep_four_fifths_within_20_seconds() -> None:
    assert servers_for_wait(20, 10, 180, share=0.2) == 14  # the same example's answer
    assert servers_for_wait(20, 0, 180) == 1


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
def test_one_server_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    service_s = 2.0
    assert erlang_c(1, load) == pytest.approx(load)  # M/M/1
    for squared_cv in (0.0, 1.0, 4.0):  # M/D/1, M/M/1, and one with a few long ones
        expected = load / service_s * service_s**2 * (1 + squared_cv) / (2 * (1 - load))
        assert mean_wait_s(1, load, service_s, squared_cv) == pytest.approx(expected)


@pytest.mark.parametrize("busy", [0.2, 0.5, 0.9])
def test_two_servers_have_a_closed_form(busy: float) -> None:
    assert erlang_c(2, 2 * busy) == pytest.approx(2 * busy**2 / (1 + busy))


def test_too_much_load_waits_for_ever() -> None:
    assert erlang_c(3, 3.0) == 1
    assert mean_wait_s(3, 3.0, 1.0) == math.inf
    assert wait_exceeds(1e9, 3, 3.5, 1.0) == 1


@pytest.mark.parametrize("load", [25, 100, 400])
def test_places_are_enough_nine_times_in_ten_of_a_poisson_number(load: int) -> None:
    def at_most(number: int) -> float:
        return sum(math.exp(k * math.log(load) - load - math.lgamma(k + 1)) for k in range(number + 1))

    places = math.ceil(places_for(load))
    assert at_most(places - 2) < 0.9 < at_most(places) + 0.002
