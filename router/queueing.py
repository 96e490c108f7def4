"""Queueing theory: how many servers a load needs. Loads are in erlangs: arrivals a second x mean seconds of service.

Erlang's B and C formulas (A. K. Erlang, 1917) for Poisson arrivals; for service times that are not exponential the wait
is scaled by (1 + cv^2) / 2 (Lee and Longton, 1959), cv being their deviation over their mean: exact with one server
(Pollaczek-Khinchine), a good approximation with several.
"""

from __future__ import annotations

import math

_MOST = 100_000  # servers looked at


def erlang_b(servers: int, load: float) -> float:
    """Probability that an arrival finds all servers busy, when those that do are lost."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival has to wait, when all wait as long as it takes; 1 when the load is too much."""
    if load >= servers:
        return 1.0
    blocked = erlang_b(servers, load)
    return servers * blocked / (servers - load * (1 - blocked))


def mean_wait_s(servers: int, load: float, service_s: float, squared_cv: float = 1.0) -> float:
    """Of all arrivals, those that need not wait included."""
    if load >= servers:
        return math.inf
    return erlang_c(servers, load) * service_s / (servers - load) * (1 + squared_cv) / 2


def wait_exceeds(limit_s: float, servers: int, load: float, service_s: float, squared_cv: float = 1.0) -> float:
    """Probability that an arrival waits longer than `limit_s`: exponential beyond 0, with the mean of `mean_wait_s`."""
    if load >= servers:
        return 1.0
    if load <= 0 or service_s <= 0:
        return 0.0
    wait_s = service_s / (servers - load) * (1 + squared_cv) / 2  # of those that wait
    return erlang_c(servers, load) * math.exp(-limit_s / wait_s)


def servers_for_wait(
    limit_s: float, load: float, service_s: float, squared_cv: float = 1.0, *, share: float = 0.1
) -> int:
    """The fewest servers with which at most `share` of the arrivals wait longer than `limit_s`."""
    for servers in range(max(1, math.floor(load) + 1), _MOST):
        if wait_exceeds(limit_s, servers, load, service_s, squared_cv) <= share:
            return servers
    return _MOST


def places_for(load: float, *, deviations: float = 1.2816) -> float:
    """Places that are enough nine times out of ten (1.2816 deviations) when nobody is to wait for one.

    With Poisson arrivals and any distribution of service times the number of those present is Poisson with mean `load`
    (M/G/infinity); this is its normal approximation, the rule of square-root staffing.
    """
    return load + deviations * math.sqrt(load)
