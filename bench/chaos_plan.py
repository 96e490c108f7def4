"""What chaos.py does to the workers, drawn up in advance from a seed: which fault, on which worker, when.

A plan never takes the last worker of a pool that nothing has happened to: what it tests is that no request is lost
while there is somebody to serve it. Whoever carries it out waits where the deployment is slower than the plan.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

POOLS = ("prefill", "decode")


class Fault(Enum):
    KILL = "kill"  # SIGKILL
    DRAIN = "drain"  # SIGTERM: finishes what it has, then exits
    PAUSE = "pause"  # SIGSTOP, and SIGCONT some seconds later
    ADD = "add"  # a worker starts, under a new name or under that of one which was killed or drained


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    at_s: float  # after the start of the load
    fault: Fault
    pool: str
    worker: str
    pause_s: float = 0.0


@dataclass(slots=True)
class _Pool:
    undisturbed: set[str]
    paused_until: dict[str, float] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    started: int = 0

    def wake(self, at_s: float) -> None:
        for worker in [worker for worker, until in self.paused_until.items() if until <= at_s]:
            del self.paused_until[worker]
            self.undisturbed.add(worker)

    @property
    def size(self) -> int:
        return len(self.undisturbed) + len(self.paused_until)


def first_workers(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pool and name of each worker that is there from the start."""
    return [(pool, f"{pool}-{i}") for pool in POOLS for i in range(counts[pool])]


def plan(
    seconds: float, seed: int, counts: Mapping[str, int], *, pace_s: float = 4.0, longest_pause_s: float = 10.0
) -> list[Step]:
    """Steps within `seconds`, `pace_s` apart on average: each fault once as soon as it is possible, then at random.

    counts: workers of each pool at the start, at least one.
    """
    draw = random.Random(seed)
    pools = {pool: _Pool({f"{pool}-{i}" for i in range(counts[pool])}, started=counts[pool]) for pool in POOLS}
    steps: list[Step] = []
    at_s = draw.uniform(0.5, 1.5) * pace_s
    while at_s < seconds:
        possible = []
        for name, pool in pools.items():
            pool.wake(at_s)
            if len(pool.undisturbed) > 1:
                possible += [(Fault.KILL, name), (Fault.DRAIN, name), (Fault.PAUSE, name)]
            if pool.size <= counts[name]:
                possible.append((Fault.ADD, name))
        missing = set(Fault) - {step.fault for step in steps}
        possible = [each for each in possible if each[0] in missing] or possible
        if possible:
            steps.append(_step(draw, at_s, *draw.choice(possible), pools, longest_pause_s))
        at_s += draw.uniform(0.5, 1.5) * pace_s
    return steps


def _step(
    draw: random.Random, at_s: float, fault: Fault, name: str, pools: Mapping[str, _Pool], longest_pause_s: float
) -> Step:
    pool = pools[name]
    if fault is Fault.ADD:
        if pool.gone and draw.random() < 0.5:
            worker = pool.gone.pop(0)
        else:
            worker = f"{name}-{pool.started}"
            pool.started += 1
        pool.undisturbed.add(worker)
        return Step(at_s=at_s, fault=fault, pool=name, worker=worker)
    worker = draw.choice(sorted(pool.undisturbed))
    pool.undisturbed.remove(worker)
    if fault is Fault.PAUSE:
        pause_s = draw.uniform(0.5, longest_pause_s)
        pool.paused_until[worker] = at_s + pause_s
        return Step(at_s=at_s, fault=fault, pool=name, worker=worker, pause_s=pause_s)
    pool.gone.append(worker)
    return Step(at_s=at_s, fault=fault, pool=name, worker=worker)
