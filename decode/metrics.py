"""What a decode worker tells Prometheus."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from service.metrics import BATCH_SEQUENCES, REQUEST_SECONDS, TOKEN_SECONDS
from service.transfers import LinkFigures, TransferFigures


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """What is counted for every token, for one SLA class."""

    tokens: Counter
    itl_seconds: Histogram


class DecodeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"twinpool_decode_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"twinpool_decode_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"twinpool_decode_{name}", text, labels, buckets=buckets, registry=registry)

        by_class = ("sla_class",)
        self.requests = counter("requests_total", "Requests submitted.", by_class)
        self.ended = counter("ended_total", "Requests ended, by reason.", ("reason",))
        self.tokens = counter("tokens_total", "Output tokens computed here; the first of a choice is not.", by_class)
        self.preemptions = counter("preemptions_total", "Sequences that lost their rows, to the swap area or for good.")
        self.restores = counter("restores_total", "Sequences that came back from the swap area.")
        self.queue_seconds = histogram(
            "queue_seconds", "Submitted until rows were reserved.", REQUEST_SECONDS, by_class
        )
        self.reserved_seconds = histogram("reserved_seconds", "Rows reserved until the commit.", REQUEST_SECONDS)
        self.start_seconds = histogram("start_seconds", "Commit until the first step begins.", TOKEN_SECONDS)
        self.request_seconds = histogram("request_seconds", "Commit until the last token.", REQUEST_SECONDS, by_class)
        self.step_seconds = histogram("step_seconds", "One step, sampling included.", TOKEN_SECONDS)
        self.batch_sequences = histogram("batch_sequences", "Sequences in a step.", BATCH_SEQUENCES)
        self.itl_seconds = histogram("itl_seconds", "Between two tokens of a sequence.", TOKEN_SECONDS, by_class)
        self.local_prefill_seconds = histogram(
            "local_prefill_seconds", "Rows free until the first token of a prompt computed here.", REQUEST_SECONDS
        )
        self.local_prefill_tokens = counter("local_prefill_tokens_total", "Prompt tokens computed here.")
        self.prefilling = gauge("prefilling", "Requests whose prompts are computed here.")
        self.running = gauge("running", "Requests whose tokens are computed, swapped out ones included.")
        self.waiting = gauge("waiting", "Requests that wait for rows.")
        self.reservations = gauge("reservations", "Requests whose rows are reserved and have not arrived.")
        self.swapped = gauge("swapped", "Sequences swapped out.")
        self.batch_limit = gauge("batch_limit", "Sequences allowed in the last step, by the strictest TPOT target.")
        self.rows_total = gauge("rows_total", "Cache rows.")
        self.rows_used = gauge("rows_used", "Cache rows held by requests and reservations.")
        self.states_total = gauge("states_total", "Cache rows of sequences, of models that have such.")
        self.states_used = gauge("states_used", "Of those, held by requests and reservations.")
        self.swap_rows_used = gauge("swap_rows_used", "Rows of the swap area that hold a sequence.")
        self.transfers = ReceiverMetrics(registry)
        self._of_class: dict[str, ClassMetrics] = {}

    def of_class(self, sla_class: str) -> ClassMetrics:
        """Looked up once: `labels` costs more than the counting."""
        found = self._of_class.get(sla_class)
        if found is None:
            found = ClassMetrics(self.tokens.labels(sla_class), self.itl_seconds.labels(sla_class))
            self._of_class[sla_class] = found
        return found


class ReceiverMetrics(TransferFigures):
    """What the links report, by transport and prefill worker. Called from transfer threads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("decode", registry, "First frame until the commit.")
        self.quarantined_reservations = self.gauge(
            "quarantined_reservations", "Reservations given up whose sender has not said that it writes no more."
        )
        self.quarantined_rows = self.gauge("quarantined_rows", "Cache rows that nobody gets because of them.")
        self.reservations_expired = Counter(
            "twinpool_decode_reservations_expired_total",
            "Reservations whose time was over: unclaimed by any prefill worker, or the rows were late.",
            ("cause",),
            registry=registry,
        )

    def link(self, transport: str, peer: str, *, stranger: bool = False) -> ReceiverLink:
        return ReceiverLink(self, transport, peer, stranger=stranger)

    def expired(self, cause: str) -> None:
        self.reservations_expired.labels(cause).inc()


class ReceiverLink(LinkFigures):
    def __init__(self, figures: ReceiverMetrics, transport: str, peer: str, *, stranger: bool) -> None:
        super().__init__(figures, transport, peer, stranger=stranger)
        self._quarantined_reservations = figures.quarantined_reservations.labels(*self._at)
        self._quarantined_rows = figures.quarantined_rows.labels(*self._at)

    def quarantined(self, reservations: int, rows: int) -> None:
        self._quarantined_reservations.inc(reservations)
        self._quarantined_rows.inc(rows)
