"""The CPU backend. For now every operator is the reference's; native kernels replace them one by one."""

from __future__ import annotations

import torch

from engine.ops.reference import (
    Linear,
    add_rms_norm,
    decode_attention,
    gather_kv,
    linear,
    pack_linear,
    prefill_attention,
    quantize,
    rms_norm,
    rope,
    silu_mul,
    store_kv,
)

__all__ = [
    "NAME",
    "Linear",
    "add_rms_norm",
    "decode_attention",
    "gather_kv",
    "linear",
    "pack_linear",
    "prefill_attention",
    "quantize",
    "rms_norm",
    "rope",
    "set_num_threads",
    "silu_mul",
    "store_kv",
]

NAME = "cpu"


def set_num_threads(count: int) -> None:
    """Number of threads that one operator may use (default 1)."""
    torch.set_num_threads(count)
