"""Options of the router and the classes that they define."""

from __future__ import annotations

import pytest

from router.classifier import Classifier, SlaClass
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
        ([*MODEL, "--sla-classes", "gold:queue=-1", "--default-sla-class", "gold"], "0 or more"),
        ([*MODEL, "--sla-classes", "gold:queue=0", "--default-sla-class", "gold"], "over 0"),
        ([*MODEL, "--sla-classes", "gold:ttft_ms=nan", "--default-sla-class", "gold"], "0 or more"),
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
