"""Options of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from engine.quantization import AUTO, WEIGHT_FORMATS
from service.config import Size, WorkerConfig, option


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    port: int = option(7072, help="gRPC port; 0 picks a free one", unit="port", minimum=0, maximum=65535)
    metrics_port: int = option(
        9072, help="/metrics and /healthz; 0 picks a free port, -1 turns it off", unit="port", minimum=-1, maximum=65535
    )
    weights: str = option(
        AUTO,
        help="how matrices are held; bf16: as --dtype says; w8a16: fastest; auto: that where its quality was measured",
        choices=(AUTO, *WEIGHT_FORMATS),
    )
    kv_host: str = option("", help="address to receive KV blocks on; empty: the gRPC server's")
    kv_port: int = option(7073, help="port for it; 0 picks a free one", unit="port", minimum=0, maximum=65535)
    kv_advertise: str = option("", help="HOST or HOST:PORT that prefill workers reach it at; empty: found out")
    swap: Size = option(Size(256 << 20), help="host memory for preempted sequences; 0: none", unit="bytes")
    max_batch: int = option(64, help="sequences in one step; a TPOT target may ask for fewer", minimum=1)
    max_waiting: int = option(256, help="requests that may wait for rows", unit="requests", minimum=0)
    prefill_chunk: int = option(
        256, help="prompt tokens computed here between two steps, at most", unit="tokens", minimum=16
    )
    reserve_timeout: float = option(
        60.0, help="of a submit that brings none: until rows have arrived", unit="s", minimum=0.001, maximum=864000
    )
    drain_timeout: float = option(
        120.0, help="for what is running when the worker is told to stop", unit="s", minimum=0, maximum=86400
    )
