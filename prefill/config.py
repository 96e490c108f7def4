"""Options of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from engine.quantization import AUTO, WEIGHT_FORMATS
from prefill.scheduler import BatchLimits
from service.config import WorkerConfig, option


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    port: int = option(7071, help="gRPC port; 0 picks a free one", unit="port", minimum=0, maximum=65535)
    metrics_port: int = option(
        9071, help="/metrics and /healthz; 0 picks a free port, -1 turns it off", unit="port", minimum=-1, maximum=65535
    )
    weights: str = option(
        AUTO,
        help="how matrices are held; bf16: as --dtype says; w8a8: fastest; auto: that where its quality was measured",
        choices=(AUTO, *WEIGHT_FORMATS),
    )
    token_budget: int = option(
        256, help="tokens computed in one step; past what fills the device, more only delays", unit="tokens", minimum=16
    )
    max_short_prompts: int = option(32, help="short inputs computed side by side", unit="prompts", minimum=1)
    max_long_prompts: int = option(8, help="long inputs computed side by side", unit="prompts", minimum=1)
    max_requests: int = option(1024, help="requests accepted at a time, waiting ones included", minimum=1)
    request_timeout: float = option(
        600.0, help="of a call that brings no deadline", unit="s", minimum=0.001, maximum=864000
    )
    drain_timeout: float = option(
        60.0, help="for what is running when the worker is told to stop", unit="s", minimum=0, maximum=86400
    )

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(
            token_budget=self.token_budget, prompts={"short": self.max_short_prompts, "long": self.max_long_prompts}
        )
