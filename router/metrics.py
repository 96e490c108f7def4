"""The router's figures for Prometheus. Latencies are as the client could see them: measured here, from arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.gaps import GapHistogram, Gaps
from router.pools import Pool
from router.sizing import PoolSize
from service.metrics import REQUEST_SECONDS, SHARES, TOKEN_SECONDS, TOKENS


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "twinpool_router_requests_total",
            "Requests that ended, by outcome: finished, cancelled, or the class of the error.",
            ["sla_class", "outcome"],
            registry=registry,
        )
        self.retries = Counter(
            "twinpool_router_retries_total", "Attempts that failed and were repeated.", ["error"], registry=registry
        )
        self.transfer_retries = Counter(
            "twinpool_router_transfer_retries_total",
            "Those of them whose transfer had failed.",
            ["error"],
            registry=registry,
        )
        self.transfer_wait_share = Histogram(
            "twinpool_router_transfer_wait_share",
            "Wait for the transfer after the first token, of TTFT and that wait together; answers of one attempt.",
            ["sla_class", "input_class"],
            buckets=SHARES,
            registry=registry,
        )
        self.probes = Counter(
            "twinpool_router_probes_total",
            "Generations that new workers had to pass to be used, by outcome: passed, or the class of the error.",
            ["outcome"],
            registry=registry,
        )
        self.attempts = Counter(
            "twinpool_router_attempts_total",
            "Attempts begun: split over the pools, local (prompt and answer on a decode worker) or aggregated (on one "
            "worker, the other pool being empty).",
            ["mode"],
            registry=registry,
        )
        self.queue = Histogram(
            "twinpool_router_queue_seconds",
            "From arrival to the placement on a pair of workers.",
            ["sla_class"],
            buckets=REQUEST_SECONDS,
            registry=registry,
        )
        self.ttft = Histogram(
            "twinpool_router_ttft_seconds",
            "From arrival to the first token.",
            ["sla_class", "input_class"],
            buckets=REQUEST_SECONDS,
            registry=registry,
        )
        self.tpot = Histogram(
            "twinpool_router_tpot_seconds",
            "Mean time between the tokens of an answer after its first.",
            ["sla_class", "input_class"],
            buckets=TOKEN_SECONDS,
            registry=registry,
        )
        self._itl = GapHistogram(
            "twinpool_router_itl_seconds", "Time between one token and the next of a choice.", TOKEN_SECONDS
        )
        registry.register(self._itl)
        self.duration = Histogram(
            "twinpool_router_request_seconds",
            "From arrival to the end, of finished requests.",
            ["sla_class", "input_class"],
            buckets=REQUEST_SECONDS,
            registry=registry,
        )
        self.prompt_length = Histogram(
            "twinpool_router_prompt_length_tokens", "Prompt tokens of a request.", buckets=TOKENS, registry=registry
        )
        self.prompt_tokens = Counter(
            "twinpool_router_prompt_tokens_total", "Prompt tokens of requests.", ["sla_class"], registry=registry
        )
        self.cached_tokens = Counter(
            "twinpool_router_cached_tokens_total",
            "Prompt tokens found in a prefix cache.",
            ["sla_class"],
            registry=registry,
        )
        self.completion_tokens = Counter(
            "twinpool_router_completion_tokens_total", "Tokens of answers.", ["sla_class"], registry=registry
        )
        self.transfer_bytes = Counter(
            "twinpool_router_transfer_bytes_total", "KV bytes moved for requests that ended.", registry=registry
        )
        self.queued = Gauge(
            "twinpool_router_queued", "Requests that wait for workers.", ["sla_class"], registry=registry
        )
        self.running = Gauge("twinpool_router_running", "Requests placed and not ended.", registry=registry)
        self.workers = Gauge(
            "twinpool_router_workers", "Workers that have joined.", ["pool", "state"], registry=registry
        )
        self.desired = Gauge(
            "twinpool_desired_replicas",
            "Workers that a pool should have, by what arrives here and the targets.",
            ["pool"],
            registry=registry,
        )
        self.load = Gauge(
            "twinpool_pool_load",
            "Workers that what arrives here would keep busy, without anything to spare.",
            ["pool"],
            registry=registry,
        )
        self.aggregating = Gauge(
            "twinpool_router_aggregating",
            "1 while a pool is empty and the other one serves whole answers, else 0.",
            registry=registry,
        )

    def gaps(self, sla_class: str) -> Gaps:
        """Where times between tokens of requests of that class are added."""
        return self._itl.of(sla_class)

    def watch_sizes(self, sizes: Mapping[Pool, PoolSize]) -> None:
        for pool in Pool:
            name = pool.name.lower()
            self.desired.labels(name).set_function(partial(lambda pool: sizes[pool].desired, pool))
            self.load.labels(name).set_function(partial(lambda pool: sizes[pool].load, pool))

    def watch(
        self,
        sla_classes: Iterable[str],
        queued: Callable[[str], int],
        running: Callable[[], int],
        workers: Callable[[str, str], int],
    ) -> None:
        """Reads the gauges from the router's own state whenever they are scraped."""
        for name in sla_classes:
            self.queued.labels(name).set_function(partial(queued, name))
        self.running.set_function(running)
        for pool in ("prefill", "decode"):
            for state in ("ready", "draining", "suspect", "joining", "probing"):
                self.workers.labels(pool, state).set_function(partial(workers, pool, state))
