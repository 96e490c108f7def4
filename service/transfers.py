"""What both pools tell Prometheus about the transfers between them, by transport and by peer.

`TransferFigures` makes the metrics and `LinkFigures` counts on one link, with its labels looked up once. Each pool adds
what only it has (prefill/metrics.py, decode/metrics.py), and kvtransfer calls them as its `TransferMetrics`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from service.metrics import TRANSFER_SECONDS
from service.peers import Peers


class TransferFigures:
    def __init__(self, pool: str, registry: CollectorRegistry, seconds: str, peers: Peers | None = None) -> None:
        """seconds: what the time of a transfer is in this pool."""
        self.peers = peers or Peers()
        registry.register(self.peers)
        self._prefix = f"twinpool_{pool}"
        self._registry = registry
        self.bytes = self.counter("transfer_bytes_total", "KV bytes of rows that travelled, headers not counted.")
        self.rows = self.counter("transfer_rows_total", "Rows that travelled: one is a block of one layer.")
        self.seconds = self.histogram("transfer_seconds", seconds, TRANSFER_SECONDS)
        self.open = self.gauge("transfers_open", "Transfers begun and not ended.")
        self.retries = self.counter("transfer_retries_total", "Transfers of a second or later attempt at a request.")
        self.failures = self.counter(
            "transfer_failures_total",
            "Transfers that did not end well, by error; Aborted or Released: by the wish of one end.",
            "error",
        )
        self.refusals = self.counter(
            "transfer_refusals_total", "Links, transfers and frames refused, by error.", "error"
        )
        self.links = self.gauge("links_open", "KV links.")
        self.lost_leases = self.counter("lost_leases_total", "Peers lost because they were silent for a lease.")

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(f"{self._prefix}_{name}", text, ("transport", "peer", *labels), registry=self._registry)
        self.peers.watch(made)
        return made

    def gauge(self, name: str, text: str) -> Gauge:
        made = Gauge(f"{self._prefix}_{name}", text, ("transport", "peer"), registry=self._registry)
        self.peers.watch(made)
        return made

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ("transport", "peer")
        made = Histogram(f"{self._prefix}_{name}", text, labels, buckets=buckets, registry=self._registry)
        self.peers.watch(made)
        return made

    def expired(self, cause: str) -> None:
        """Of reservations, which only one pool has."""


class LinkFigures:
    """Counts on one link, from its threads. What only one pool has does nothing in the other."""

    def __init__(self, figures: TransferFigures, transport: str, peer: str, *, stranger: bool) -> None:
        self._figures = figures
        self._at = transport, figures.peers.enter(peer, stranger=stranger)
        self._failed = False
        self._bytes = figures.bytes.labels(*self._at)
        self._rows = figures.rows.labels(*self._at)
        self._seconds = figures.seconds.labels(*self._at)
        self._open = figures.open.labels(*self._at)
        self._retries = figures.retries.labels(*self._at)
        self._lost_leases = figures.lost_leases.labels(*self._at)
        self._links = figures.links.labels(*self._at)
        self._links.inc()

    def moved(self, rows: int, num_bytes: int) -> None:
        self._rows.inc(rows)
        self._bytes.inc(num_bytes)

    def queued(self, rows: int, num_bytes: int) -> None:
        """Of those who send."""

    def began(self, attempt: int) -> None:
        self._open.inc()
        if attempt > 1:
            self._retries.inc()

    def finished(self, seconds: float, error: str | None) -> None:
        self._open.dec()
        if error is None:
            self._seconds.observe(seconds)
        else:
            self._figures.failures.labels(*self._at, error).inc()

    def paced(self, bytes_per_s: float) -> None:
        """Of those who send."""

    def refused(self, error: str) -> None:
        self._figures.refusals.labels(*self._at, error).inc()

    def quarantined(self, reservations: int, rows: int) -> None:
        """Of those who receive."""

    def lease_lost(self) -> None:
        self._lost_leases.inc()

    def down(self, error: str | None) -> None:
        self._links.dec()
        self._failed = error is not None

    def forget(self) -> None:
        self._figures.peers.leave(self._at[1], failed=self._failed)
