"""What a prefill worker tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtransfer.metrics import NONE
from service.metrics import (
    BATCH_SEQUENCES,
    GIGABYTES_PER_SECOND,
    REQUEST_SECONDS,
    TOKEN_SECONDS,
    TOKENS,
    TRANSFER_SECONDS,
)
from service.transfers import LinkFigures, TransferFigures


class PrefillMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"twinpool_prefill_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"twinpool_prefill_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"twinpool_prefill_{name}", text, labels, buckets=buckets, registry=registry)

        by_class = ("input_class",)
        self.requests = counter("requests_total", "Requests accepted.", by_class)
        self.ended = counter("ended_total", "Requests ended, by how: ok, cancelled or the error's class.", ("outcome",))
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of requests computed.", by_class)
        self.cached_tokens = counter("cached_tokens_total", "Prompt tokens taken from the prefix cache.", by_class)
        self.computed_tokens = counter("computed_tokens_total", "Tokens that went through the model.")
        self.generated_tokens = counter(
            "generated_tokens_total", "Tokens of answers generated here, while the decode pool was empty."
        )
        self.preemptions = counter(
            "preemptions_total", "Answers generated here that lost their rows, to be computed again later."
        )
        self.generating = gauge("generating", "Answers generated here that hold rows.")
        self.queue_seconds = histogram("queue_seconds", "Received until admitted.", REQUEST_SECONDS, by_class)
        self.prefill_seconds = histogram("prefill_seconds", "Admitted until sampled.", REQUEST_SECONDS, by_class)
        self.sample_seconds = histogram(
            "sample_seconds", "Last layer computed until the first tokens were sampled.", TOKEN_SECONDS
        )
        self.step_seconds = histogram("step_seconds", "One forward step.", TOKEN_SECONDS)
        self.batch_prompts = histogram("batch_prompts", "Prompts in a step.", BATCH_SEQUENCES)
        self.batch_tokens = histogram("batch_tokens", "Tokens in a step.", TOKENS)
        self.running = gauge("running", "Requests that hold rows: computed now, or being transferred.")
        self.waiting = gauge("waiting", "Requests accepted and not begun.")
        self.rows_total = gauge("rows_total", "Cache rows.")
        self.rows_used = gauge("rows_used", "Cache rows held by requests; the prefix cache alone does not count.")
        self.states_total = gauge("states_total", "Cache rows of sequences, of models that have such.")
        self.states_used = gauge("states_used", "Of those, held by requests; snapshots alone do not count.")
        self.snapshots = gauge("snapshots", "Of those, kept for later prompts with the same prefix.")
        self.transfers = SenderMetrics(registry)


class SenderMetrics(TransferFigures):
    """What the links report, by transport and decode worker. Called from transfer threads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("prefill", registry, "First rows handed over until the decode worker acknowledged all.")
        self.waits = self.histogram(
            "transfer_wait_seconds", "Part of the transfer after the first token was sampled.", TRANSFER_SECONDS
        )
        self.pace = self.histogram(
            "transfer_gigabytes_per_second", "Of a transfer, while its rows were leaving.", GIGABYTES_PER_SECOND
        )
        self.queued_rows = self.gauge("transfer_queued_rows", "Rows computed and not yet on their way.")
        self.queued_bytes = self.gauge("transfer_queued_bytes", "Bytes of them.")
        self.reconnects = self.counter("link_reconnects_total", "Links made after the one before had failed.")

    def link(self, transport: str, peer: str, *, stranger: bool = False) -> SenderLink:
        return SenderLink(self, transport, peer, stranger=stranger)

    def waited(self, transport: str, peer: str, seconds: float) -> None:
        """A request whose first token was sampled waited so long for its transfer."""
        label = self.peers.enter(peer)
        self.waits.labels(transport, label).observe(seconds)
        self.peers.leave(label)


class SenderLink(LinkFigures):
    def __init__(self, figures: SenderMetrics, transport: str, peer: str, *, stranger: bool) -> None:
        super().__init__(figures, transport, peer, stranger=stranger)
        self._pace = figures.pace.labels(*self._at)
        self._queued_rows = figures.queued_rows.labels(*self._at)
        self._queued_bytes = figures.queued_bytes.labels(*self._at)
        reconnects = figures.reconnects.labels(*self._at)
        if transport != NONE and figures.peers.failed_before(self._at[1]):
            reconnects.inc()

    def queued(self, rows: int, num_bytes: int) -> None:
        self._queued_rows.inc(rows)
        self._queued_bytes.inc(num_bytes)

    def paced(self, bytes_per_s: float) -> None:
        self._pace.observe(bytes_per_s / 1e9)
