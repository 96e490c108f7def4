"""Options of the router and the classes that they define."""

from __future__ import annotations

import pytest

from router.classifier import Classifier, SlaClass, check_priority, tenant_of
from router.config import RouterConfig
from service.config import load
from twinpool.errors import ConfigError, InvalidRequest

MODEL = ["--tokenizer", "somewhere"]


def test_defaults_offer_interactive_and_batch() -> None:
    config = load(RouterConfig, "router", MODEL, {})
    interactive, batch = config.parsed_classes()
    assert (interactive.name, batch.name) == ("interactive", "batch")
    assert interactive.priority > batch.priority
    assert 0 < interactive.ttft_ms < batch.ttft_ms
    assert (config.port, config.metrics_port, config.host) == (7070, 9070, "127.0.0.1")


def test_classes_can_be_set() -> None:
    config = load(
        RouterConfig,
        "router",
        [*MODEL, "--sla-classes", "gold:ttft_ms=200:priority=-3, free:deadline_s=9:queue=5"],
        {"TWINPOOL_DEFAULT_SLA_CLASS": "free"},
    )
    assert config.parsed_classes() == (
        SlaClass(name="gold", ttft_ms=200, priority=-3),
        SlaClass(name="free", deadline_s=9, queue=5),
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--tokenizer"),
        ([*MODEL, "--sla-classes", "gold:speed=9", "--default-sla-class", "gold"], "unknown key 'speed'"),
        ([*MODEL, "--sla-classes", "gold:queue=many", "--default-sla-class", "gold"], "queue is 'many'"),
        (
            [*MODEL, "--sla-classes", "gold:queue=-1", "--default-sla-class", "gold"],
            "queue is -1: allowed is a whole number from 1",
        ),
        ([*MODEL, "--sla-classes", "gold:queue=0", "--default-sla-class", "gold"], "queue is 0: allowed"),
        ([*MODEL, "--sla-classes", "gold:ttft_ms=nan", "--default-sla-class", "gold"], "ttft_ms is nan: allowed"),
        ([*MODEL, "--sla-classes", ":queue=1"], "has no name"),
        ([*MODEL, "--sla-classes", "a,a", "--default-sla-class", "a"], "a name twice"),
        ([*MODEL, "--default-sla-class", "gold"], "one of interactive, batch"),
        ([*MODEL, "--lease-ms", "1500"], "at least twice heartbeat_ms"),
        ([*MODEL, "--max-attempts", "0"], "at least 1"),
    ],
)
def test_bad_option_is_named_with_what_is_allowed(options: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RouterConfig, "router", options, {})
    assert said in caught.value.message


def test_input_classes_begin_at_the_threshold() -> None:
    classifier = Classifier([SlaClass(name="a")], "a", long_input_tokens=512)
    assert [classifier.input_class(length) for length in (1, 511, 512, 9000)] == ["short", "short", "long", "long"]


def test_unnamed_class_is_the_default_and_unknown_ones_are_refused() -> None:
    classifier = Classifier([SlaClass(name="a"), SlaClass(name="b")], "b", 512)
    assert classifier.sla_class("").name == "b"
    with pytest.raises(InvalidRequest, match="this router offers a, b") as caught:
        classifier.sla_class("c")
    assert caught.value.field == "sla_class"


@pytest.mark.parametrize(
    ("ttft", "tpot", "field", "allowed"),
    [
        (0.5, 0, "ttft_target_ms", "1 to 3.6e+06"),
        (-1, 0, "ttft_target_ms", "1 to 3.6e+06"),
        (float("nan"), 0, "ttft_target_ms", "1 to 3.6e+06"),
        (0, 1e9, "tpot_target_ms", "1 to 60000"),
    ],
)
def test_own_targets_are_checked_by_name_value_and_range(ttft: float, tpot: float, field: str, allowed: str) -> None:
    classifier = Classifier([SlaClass(name="a", ttft_ms=5, tpot_ms=6)], "a", 512)
    assert classifier.sla_class("", 100, 20) == SlaClass(name="a", ttft_ms=100, tpot_ms=20)
    with pytest.raises(InvalidRequest) as caught:
        classifier.sla_class("", ttft, tpot)
    assert caught.value.field == field
    assert f"{field} is " in caught.value.message
    assert allowed in caught.value.message


def test_tenant_is_the_name_else_the_proxys_else_a_digest_of_the_key() -> None:
    assert tenant_of("acme", {"twinpool-tenant": "other"}) == "acme"
    assert tenant_of("", {"twinpool-tenant": "other", "x-api-key": "secret"}) == "other"
    by_key = tenant_of("", {"authorization": "Bearer secret"})
    assert by_key.startswith("key-")
    assert "secret" not in by_key
    assert tenant_of("", {"authorization": "Bearer other"}) != by_key
    assert tenant_of("", {}) == ""
    with pytest.raises(InvalidRequest, match="up to 64 printable ASCII") as caught:
        tenant_of("x" * 65, {})
    assert caught.value.field == "tenant"


@pytest.mark.parametrize("priority", [-1001, 1001])
def test_priority_out_of_range_is_named(priority: int) -> None:
    with pytest.raises(InvalidRequest, match=f"priority is {priority}: allowed is -1000 to 1000"):
        check_priority(priority)
