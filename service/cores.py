"""Which CPU cores a process runs on: `pin("0-3,8")` before it starts its threads."""

from __future__ import annotations

import os

from twinpool.errors import ConfigError

MOST_CORES = 8192  # what Linux can be built for


def parse(text: str) -> set[int]:
    """The core numbers of a list such as "0-3,8". Raises ConfigError when it is none."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        bounds = (first, last if dash else first)
        numbers = all(each.isascii() and each.isdigit() for each in bounds)
        if not numbers or not int(bounds[0]) <= int(bounds[1]) < MOST_CORES:
            raise ConfigError(f'cores: {text!r} is no list of cores such as "0-3,8"', field="cores")
        cores.update(range(int(bounds[0]), int(bounds[1]) + 1))
    return cores


def pin(text: str) -> None:
    """Keeps this process on these cores; empty leaves it where it is. Raises ConfigError for cores it may not have."""
    if not text:
        return
    wanted, allowed = parse(text), os.sched_getaffinity(0)
    if not wanted <= allowed:
        raise ConfigError(
            f"cores: {text!r} asks for {sorted(wanted - allowed)}, and this process may use {sorted(allowed)}",
            field="cores",
        )
    os.sched_setaffinity(0, wanted)
