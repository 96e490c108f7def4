"""The operators of a step timed one by one, for models whose layers are no single call of the backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from engine.ops import cpu

KIND_OF = {
    "store_kv": "kv_access",
    "store_latents": "kv_access",
    "gather_latents": "kv_access",
    "gather_items": "kv_access",
    "as_stored": "kv_access",
    "pool_windows": "kv_access",
    "prefill_attention": "attention",
    "decode_attention": "attention",
    "latent_attention": "attention",
    "lightning_indexer": "attention",
    "sparse_attn_sharedkv": "attention",
    "linear": "linear",
    "grouped_linear": "linear",
    "moe_gating_top_k": "moe",
    "moe_experts": "moe",
    "rms_norm": "other",
    "add_rms_norm": "other",
    "rope": "other",
    "silu_mul": "other",
    "hc_pre": "other",
    "hc_post": "other",
    "hc_head": "other",
}


class Operators:
    """What engine.ops.cpu_decoder.Decoder records, from the functions of the backend: models look them up by name."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int, int]] = []  # kind, name, begin and end in ns of the monotonic clock
        self._originals: dict[str, Any] = {}
        self._inside = False  # an operator may call others

    def record(self, on: bool) -> None:
        if on and not self._originals:
            self._originals = {name: getattr(cpu, name) for name in KIND_OF}
            for name, function in self._originals.items():
                setattr(cpu, name, self._timed(name, function))
        elif not on:
            for name, function in self._originals.items():
                setattr(cpu, name, function)
            self._originals = {}

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, begin = True, time.monotonic_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self.events.append((KIND_OF[name], name, begin, time.monotonic_ns()))

        return timed
