"""Options of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from service.config import Size, WorkerConfig, option


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    port: int = option(7072, help="gRPC port; 0 picks a free one", unit="port", minimum=0, maximum=65535)
    metrics_port: int = option(
        9072, help="/metrics and /healthz; 0 picks a free port, -1 turns it off", unit="port", minimum=-1, maximum=65535
    )
    kv_host: str = option("", help="address to receive KV blocks on; empty: the gRPC server's")
    kv_port: int = option(7073, help="port for it; 0 picks a free one", unit="port", minimum=0, maximum=65535)
    kv_transport: str = option(
        "auto", help="how KV blocks travel; auto: shm on one host, else tcp", choices=("auto", "shm", "tcp")
    )
    kv_advertise: str = option("", help="HOST or HOST:PORT that prefill workers reach it at; empty: found out")
    model: str = option("", help="Hugging Face directory with config.json and safetensors", unit="path")
    model_name: str = option("", help="served name; empty: the directory's name")
    backend: str = option("cpu", help="operators to run on", choices=("cpu", "reference"))
    dtype: str = option("bf16", help="of weights and activations", choices=("bf16", "fp32"))
    kv_dtype: str = option("int8", help="what the cache stores and ships", choices=("int8", "bf16", "fp32"))
    block_size: int = option(64, help="tokens in one cache row; the same on every worker", unit="tokens", minimum=1)
    memory: Size = option(Size(1 << 30), help="KV cache, beside the weights, or a fraction of the memory", unit="bytes")
    swap: Size = option(Size(256 << 20), help="host memory for preempted sequences; 0: none", unit="bytes")
    threads: int = option(0, help="compute threads; 0 takes one a core", unit="threads", minimum=0, maximum=1024)
    cores: str = option("", help='CPU cores to run on, as in "0-3,8"; empty: all', unit="cores")
    max_batch: int = option(64, help="sequences in one step; a TPOT target may ask for fewer", minimum=1)
    max_waiting: int = option(256, help="requests that may wait for rows", unit="requests", minimum=0)
    reserve_timeout: float = option(
        60.0, help="of a submit that brings none: until rows have arrived", unit="s", minimum=0.001
    )
    drain_timeout: float = option(
        120.0, help="for what is running when the worker is told to stop", unit="s", minimum=0
    )
