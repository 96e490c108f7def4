"""The router's options. `python -m router --help` shows them with units, defaults and environment names."""

from __future__ import annotations

from dataclasses import dataclass

from router.classifier import SlaClass
from router.policies import POLICIES
from service.config import ProcessConfig, option
from twinpool.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ProcessConfig):
    port: int = option(7070, help="gRPC port; 0 picks a free one", unit="port", minimum=0, maximum=65535)
    metrics_port: int = option(
        9070,
        help="/metrics and /healthz over HTTP; 0 picks a free port, -1 turns it off",
        unit="port",
        minimum=-1,
        maximum=65535,
    )
    model: str = option("", help="name of the served model; empty: the name of the tokenizer directory")
    tokenizer: str = option(
        "", help="model's directory: tokenizer.json, tokenizer_config.json, config.json", unit="path"
    )
    max_context: int = option(
        0, help="most tokens of prompt and answer; 0: what model and workers allow", unit="tokens", minimum=0
    )
    sla_classes: tuple[str, ...] = option(
        (
            "interactive:ttft_ms=1000:tpot_ms=100:priority=10:deadline_s=600:queue=256:weight=8",
            "batch:ttft_ms=30000:tpot_ms=0:priority=0:deadline_s=3600:queue=1024:weight=1",
        ),
        help="service levels: targets for TTFT and TPOT (0: none), priority, default deadline, queue bound, weight, "
        "decode batch ceiling (max_batch)",
        unit="NAME:KEY=VALUE:...,...",
    )
    default_sla_class: str = option("interactive", help="SLA class of requests that name none")
    long_input: int = option(
        512, help="prompts with this many tokens that no cache holds are of input class long", unit="tokens", minimum=1
    )
    policy: str = option("predict", help="how a pair of workers is chosen", choices=POLICIES)
    prefill_lookahead: float = option(
        1.0,
        help="work of an input class that predict gives a prefill worker in advance",
        unit="s",
        minimum=0,
        maximum=3600,
    )
    local_prefill_below: str = option(
        "off",
        help="prompts with fewer uncached tokens are computed by decode workers; auto: where predict says it is better",
        unit="tokens|auto|off",
    )
    when_pool_empty: str = option(
        "aggregate",
        help="while a pool has no usable worker: let the other one serve whole answers, or fail requests",
        choices=("aggregate", "fail"),
    )
    probe_timeout: float = option(
        10.0,
        help="of the generation that a worker must pass before it is used; 0: none is needed",
        unit="s",
        minimum=0,
        maximum=3600,
    )
    max_queued: int = option(
        10000, help="most requests that wait in this router; beyond, the lowest class gives way", minimum=1
    )
    isolate_tenants: bool = option(False, help="prompts of different tenants share no cached prefix")
    max_attempts: int = option(6, help="most attempts at one answer, the first included", minimum=1)
    pool_wait: float = option(
        0.5, help="how long a request may wait for a worker while a pool is empty", unit="s", minimum=0, maximum=3600
    )
    prefill_slots: int = option(64, help="most requests this router has at one prefill worker", minimum=1)
    decode_slots: int = option(256, help="most requests this router has at one decode worker", minimum=1)
    demand_window: float = option(
        60.0,
        help="how far back the arrivals go that the desired numbers of workers are reckoned from",
        unit="s",
        minimum=1,
        maximum=3600,
    )
    scale_down_after: float = option(
        300.0,
        help="the desired number of workers goes down when no higher one was desired for this long",
        unit="s",
        minimum=0,
        maximum=86400,
    )
    heartbeat_ms: int = option(1000, help="how often workers report", unit="ms", minimum=10, maximum=60_000)
    lease_ms: int = option(
        4000,
        help="a worker that does not report for this long is forgotten",
        unit="ms",
        minimum=20,
        maximum=3_600_000,
    )
    tls_client_certs: bool = option(
        True, help="with TLS, ask callers for a certificate of the CA; false: the cluster key alone proves workers"
    )
    drain: float = option(
        30.0, help="at SIGTERM, time that running requests have to end", unit="s", minimum=0, maximum=86400
    )

    def __post_init__(self) -> None:
        if not self.tokenizer:
            raise ConfigError(
                "--tokenizer or TWINPOOL_TOKENIZER must name the model's directory (tokenizer.json, config.json)",
                field="tokenizer",
            )
        if self.lease_ms < 2 * self.heartbeat_ms:
            raise ConfigError(
                f"lease_ms is {self.lease_ms}: allowed is at least twice heartbeat_ms ({self.heartbeat_ms})",
                field="lease_ms",
            )
        if self.local_below is None and self.policy != "predict":
            raise ConfigError(
                f"local_prefill_below is auto and policy {self.policy!r}: auto needs --policy predict",
                field="local_prefill_below",
            )
        names = [sla.name for sla in self.parsed_classes()]
        if not names:
            raise ConfigError("sla_classes is empty: at least one class is needed", field="sla_classes")
        if len(set(names)) != len(names):
            raise ConfigError(f"sla_classes: {', '.join(names)} has a name twice", field="sla_classes")
        if self.default_sla_class not in names:
            raise ConfigError(
                f"default_sla_class is {self.default_sla_class!r}: allowed is one of {', '.join(names)}",
                field="default_sla_class",
            )

    @property
    def local_below(self) -> int | None:
        """In tokens; 0: off; None: auto. Raises ConfigError."""
        text = self.local_prefill_below
        if text == "auto":
            return None
        if text == "off":
            return 0
        if not text.isascii() or not text.isdigit():
            raise ConfigError(
                f"local_prefill_below is {text!r}: allowed is a number of tokens, auto or off",
                field="local_prefill_below",
            )
        return int(text)

    def parsed_classes(self) -> tuple[SlaClass, ...]:
        return tuple(SlaClass.parse(text) for text in self.sla_classes)
