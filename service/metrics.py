"""Metrics and health over HTTP, on a thread of their own so that a busy event loop cannot hide them.

    class DecodeMetrics:                                   # in decode/metrics.py
        def __init__(self, registry: CollectorRegistry) -> None:
            self.itl = Histogram("twinpool_decode_itl_seconds", "Time between tokens.", ["sla_class"],
                                 buckets=metrics.TOKEN_SECONDS, registry=registry)

    registry = metrics.new_registry()
    decode_metrics = DecodeMetrics(registry)
    http = metrics.serve_metrics(config.host, config.metrics_port, registry, healthy=lambda: not stopping.is_set())
    http.port                                              # the actual one; -1 when turned off
    http.close()

GET /metrics answers in Prometheus' text format, GET /healthz 200 "ok", or 503 while `healthy()` is false.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, Gauge, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from service.address import bind_error
from twinpool.certificates import Certificates

logger = logging.getLogger(__name__)

EXPIRES_SOON_S = 14 * 86400.0

# Upper bounds of histogram buckets, in the unit that the name ends with.
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
TRANSFER_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
GIGABYTES_PER_SECOND = (0.01, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 1.5, 2, 3, 5, 8, 12, 20, 40, 80)
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
TRANSFER_BYTES = tuple(float(1 << shift) for shift in range(14, 35, 2))  # 16 KiB to 16 GiB
BATCH_SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TOKENS = tuple(float(1 << shift) for shift in range(18))  # 1 to 131072


def new_registry() -> CollectorRegistry:
    """A registry with the process' own figures (memory, CPU, open files, garbage collection) in it."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def show_expiry(registry: CollectorRegistry, certificates: Certificates | None) -> None:
    """With TLS, a figure of when this process' certificate ends, and a warning where that is soon."""
    if certificates is None:
        return
    ends = ssl.cert_time_to_seconds(certificates.valid_until)
    Gauge(
        "twinpool_certificate_expiry_timestamp_seconds",
        "When the certificate of this process ends, in seconds since 1970.",
        registry=registry,
    ).set(ends)
    if ends - time.time() < EXPIRES_SOON_S:
        logger.warning("the certificate ends soon: peers refuse it then", extra={"until": certificates.valid_until})


class MetricsServer:
    """The HTTP server behind `serve_metrics`; `port` is where it listens, -1 when there is none."""

    def __init__(self, server: ThreadingHTTPServer | None) -> None:
        self._server = server
        self.port: int = server.server_address[1] if server is not None else -1
        if server is not None:
            threading.Thread(target=server.serve_forever, args=(0.1,), name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stops listening. Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def serve_metrics(
    host: str, port: int, registry: CollectorRegistry, *, healthy: Callable[[], bool] = lambda: True
) -> MetricsServer:
    """Listens on host:port (0: a free one, -1: not at all). Raises ConfigError when the port cannot be had."""
    if port < 0:
        return MetricsServer(None)

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds a client may take to send its request

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(200, content_type, encode(registry))
            elif path == "/healthz":
                self._answer(*(200, "text/plain", b"ok\n") if healthy() else (503, "text/plain", b"not serving\n"))
            else:
                self._answer(404, "text/plain", b"only /metrics and /healthz are here\n")

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: a probe every second would drown the log."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64  # connections to be accepted; with the library's 5 a burst waits for a second SYN

        def handle_error(self, request: object, client_address: object) -> None:
            """Says nothing: a prober that hangs up early is no event."""

    try:
        return MetricsServer(Server((host, port), Handler))
    except OSError as error:
        raise bind_error(error, host, port, "metrics_port") from error
