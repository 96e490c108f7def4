import http.client
import socket
import time

import pytest
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from service import metrics
from tests.certificates import Authority
from twinpool.errors import ConfigError


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_metrics_are_served_in_the_format_of_prometheus():
    registry = metrics.new_registry()
    Counter("twinpool_tokens", "Tokens sampled.", ["sla_class"], registry=registry).labels("batch").inc(3)
    server = metrics.serve_metrics("127.0.0.1", 0, registry)
    try:
        status, text = get(server.port, "/metrics")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert status == 200
        sample = next(s for s in families["twinpool_tokens"].samples if s.name == "twinpool_tokens_total")
        assert (sample.labels, sample.value) == ({"sla_class": "batch"}, 3)
        assert families["process_resident_memory_bytes"].samples[0].value > 1e6
    finally:
        server.close()


def test_healthz_follows_the_process():
    healthy = True
    server = metrics.serve_metrics("127.0.0.1", 0, metrics.new_registry(), healthy=lambda: healthy)
    try:
        assert get(server.port, "/healthz") == (200, "ok\n")
        healthy = False
        assert get(server.port, "/healthz") == (503, "not serving\n")
        assert get(server.port, "/")[0] == 404
    finally:
        server.close()


def test_two_registries_in_one_process_do_not_meet():
    first, second = metrics.new_registry(), metrics.new_registry()
    for registry in (first, second):
        Counter("twinpool_tokens", "Tokens sampled.", registry=registry).inc()
    assert first.get_sample_value("twinpool_tokens_total") == second.get_sample_value("twinpool_tokens_total") == 1


def test_a_taken_port_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} is in use.*--metrics-port"):
            metrics.serve_metrics("127.0.0.1", port, metrics.new_registry())


def test_a_negative_port_turns_it_off():
    server = metrics.serve_metrics("127.0.0.1", -1, metrics.new_registry())
    assert server.port == -1
    server.close()


def test_close_frees_the_port_and_may_be_repeated():
    server = metrics.serve_metrics("127.0.0.1", 0, metrics.new_registry())
    server.close()
    server.close()
    metrics.serve_metrics("127.0.0.1", server.port, metrics.new_registry()).close()


@pytest.mark.parametrize(
    "buckets",
    [
        metrics.REQUEST_SECONDS,
        metrics.TOKEN_SECONDS,
        metrics.TRANSFER_SECONDS,
        metrics.TRANSFER_BYTES,
        metrics.BATCH_SEQUENCES,
        metrics.TOKENS,
    ],
)
def test_buckets_rise(buckets):
    assert list(buckets) == sorted(set(buckets))


def test_the_end_of_the_certificate_is_shown_and_warned_of(tmp_path, caplog):
    authority = Authority(tmp_path / "ca")
    for days, warned in ((30, False), (7, True)):
        registry = metrics.new_registry()
        metrics.show_expiry(registry, authority.issue(f"d{days}", days=days).load())
        ends = registry.get_sample_value("twinpool_certificate_expiry_timestamp_seconds")
        assert ends == pytest.approx(time.time() + days * 86400, abs=120)
        assert ("ends soon" in caplog.text) is warned
    plain = metrics.new_registry()
    metrics.show_expiry(plain, None)
    assert plain.get_sample_value("twinpool_certificate_expiry_timestamp_seconds") is None
