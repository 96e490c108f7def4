"""The histogram of times between tokens shows what Prometheus' own would."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from router.gaps import GapHistogram

BOUNDS = (0.001, 0.0025, 0.5, 1, 5)


def test_it_reads_as_the_librarys_own() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry(auto_describe=True)
    expected = Histogram("gap_seconds", "Of tokens.", ["sla_class"], buckets=BOUNDS, registry=theirs)
    histogram = GapHistogram("gap_seconds", "Of tokens.", BOUNDS)
    ours.register(histogram)
    draw = random.Random(0)
    values = [*BOUNDS, 0.0, 7.0, *(draw.uniform(0, 6) for _ in range(50))]
    for name in ("interactive", "batch"):
        for number, value in enumerate(values):
            count = 1 + number % 3
            histogram.of(name).add(value, count)
            for _ in range(count):
                expected.labels(name).observe(value)

    def lines(registry: CollectorRegistry) -> dict[str, float]:
        text = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
        samples = (line.rpartition(" ") for line in text if "_created" not in line)
        return {name: round(float(value), 6) for name, _, value in samples}

    assert lines(ours) == lines(theirs)
    assert b"# TYPE gap_seconds histogram" in generate_latest(ours)
