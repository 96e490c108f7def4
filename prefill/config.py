"""Options of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from prefill.scheduler import BatchLimits
from service.config import Size, WorkerConfig, option


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    port: int = option(7071, help="gRPC port; 0 picks a free one", unit="port", minimum=0, maximum=65535)
    metrics_port: int = option(
        9071, help="/metrics and /healthz; 0 picks a free port, -1 turns it off", unit="port", minimum=-1, maximum=65535
    )
    model: str = option("", help="Hugging Face directory with config.json and safetensors", unit="path")
    model_name: str = option("", help="served name; empty: the directory's name")
    backend: str = option("cpu", help="operators to run on", choices=("cpu", "reference"))
    dtype: str = option("bf16", help="of weights and activations", choices=("bf16", "fp32"))
    kv_transport: str = option(
        "auto", help="how KV blocks travel; auto: shm on one host, else tcp", choices=("auto", "shm", "tcp")
    )
    kv_dtype: str = option("int8", help="what the cache stores and ships", choices=("int8", "bf16", "fp32"))
    block_size: int = option(64, help="tokens in one cache row; the same on every worker", unit="tokens", minimum=1)
    memory: Size = option(Size(1 << 30), help="KV cache, beside the weights, or a fraction of the memory", unit="bytes")
    threads: int = option(0, help="compute threads; 0 takes one a core", unit="threads", minimum=0, maximum=1024)
    cores: str = option("", help='CPU cores to run on, as in "0-3,8"; empty: all', unit="cores")
    token_budget: int = option(
        256, help="tokens computed in one step; past what fills the device, more only delays", unit="tokens", minimum=16
    )
    max_short_prompts: int = option(32, help="short inputs computed side by side", unit="prompts", minimum=1)
    max_long_prompts: int = option(8, help="long inputs computed side by side", unit="prompts", minimum=1)
    max_requests: int = option(1024, help="requests accepted at a time, waiting ones included", minimum=1)
    request_timeout: float = option(600.0, help="of a call that brings no deadline", unit="s", minimum=0.001)
    drain_timeout: float = option(60.0, help="for what is running when the worker is told to stop", unit="s", minimum=0)

    kv_faults: str = option("", help="faults to inject into KV transfers, for tests: see kvtransfer/faults.py")

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(
            token_budget=self.token_budget, prompts={"short": self.max_short_prompts, "long": self.max_long_prompts}
        )
