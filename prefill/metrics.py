"""What a prefill worker tells Prometheus."""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtransfer import NoMetrics
from service.metrics import BATCH_SEQUENCES, REQUEST_SECONDS, TOKEN_SECONDS, TOKENS, TRANSFER_SECONDS


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
        self.transfer_bytes = counter("transfer_bytes_total", "KV bytes acknowledged by decode workers.")
        self.transfer_rows = counter("transfer_rows_total", "Rows acknowledged by decode workers.")
        self.queue_seconds = histogram("queue_seconds", "Received until admitted.", REQUEST_SECONDS, by_class)
        self.prefill_seconds = histogram("prefill_seconds", "Admitted until sampled.", REQUEST_SECONDS, by_class)
        self.step_seconds = histogram("step_seconds", "One forward step.", TOKEN_SECONDS)
        self.batch_prompts = histogram("batch_prompts", "Prompts in a step.", BATCH_SEQUENCES)
        self.batch_tokens = histogram("batch_tokens", "Tokens in a step.", TOKENS)
        self.transfer_seconds = histogram("transfer_seconds", "First rows sent until acknowledged.", TRANSFER_SECONDS)
        self.transfer_wait_seconds = histogram(
            "transfer_wait_seconds", "Part of the transfer after the first token was sampled.", TRANSFER_SECONDS
        )
        self.transfer_queued_rows = gauge("transfer_queued_rows", "Rows computed and not yet on their way.")
        self.running = gauge("running", "Requests that hold rows: computed now, or being transferred.")
        self.waiting = gauge("waiting", "Requests accepted and not begun.")
        self.rows_total = gauge("rows_total", "Cache rows.")
        self.rows_used = gauge("rows_used", "Cache rows held by requests; the prefix cache alone does not count.")


class SenderMetrics(NoMetrics):
    """What the links report between a request's events. Called from transfer threads."""

    def __init__(self, metrics: PrefillMetrics) -> None:
        self._gauge = metrics.transfer_queued_rows
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}  # by peer, those with any

    def queued(self, peer: str, rows: int) -> None:
        with self._lock:
            if rows:
                self._rows[peer] = rows
            else:
                self._rows.pop(peer, None)
            self._gauge.set(sum(self._rows.values()))
