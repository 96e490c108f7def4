"""The operators of a step seen one by one, for models whose layers are no single call of the backend.

Models look their operators up by name in the backend, so that is where each is put between the begin and the end of a
span. Parts of a model that do more than call operators are spans too, for what they do between these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

from engine.models.compressed_attention import CompressedAttention, Compressor
from engine.models.expert_mlp import ExpertMlp
from engine.models.latent_attention import LatentAttention

KIND_OF = {
    "store_kv": "kv_access",
    "store_latents": "kv_access",
    "gather_latents": "kv_access",
    "gather_items": "kv_access",
    "as_stored": "kv_access",
    "pool_windows": "kv_access",
    "rope": "kv_access",
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
    "silu_mul": "other",
    "hc_pre": "other",
    "hc_post": "other",
    "hc_head": "other",
}
MOE = "moe"  # what runs within such a part is of that kind: a router is a linear like others
PARTS: tuple[tuple[type, str, str], ...] = (
    (ExpertMlp, "forward", MOE),
    (CompressedAttention, "_store_keys", "kv_access"),
    (Compressor, "forward", "kv_access"),
    (LatentAttention, "_attend_plain", "kv_access"),  # lays keys and values out for attention
)

Span = Callable[[str, str], AbstractContextManager[None]]  # of a kind and a name


class Operators:
    """Puts every operator of `backend`, and every part, into `span`. Only one at a time may record."""

    def __init__(self, backend: ModuleType, span: Span) -> None:
        self.chosen_experts: list[list[int]] = []  # of the step, by layers with experts in order
        self._backend, self._span = backend, span
        self._originals: list[tuple[Any, str, Any]] = []
        self._parts: list[str] = []  # kinds of the parts that run, outermost first
        self._in_operator = False

    def record(self, on: bool) -> None:
        self.chosen_experts = []
        if on and not self._originals:
            for name, kind in KIND_OF.items():
                self._put(self._backend, name, self._operator(kind, name, getattr(self._backend, name)))
            for owner, name, kind in PARTS:
                self._put(owner, name, self._part(kind, owner.__name__, getattr(owner, name)))
        elif not on:
            for holder, name, original in self._originals:
                setattr(holder, name, original)
            self._originals = []

    def _put(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)

    def _operator(self, kind: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def spanned(*args: Any, **kwargs: Any) -> Any:
            if self._in_operator:  # which may call others
                return function(*args, **kwargs)
            self._in_operator = True
            try:
                with self._span(MOE if MOE in self._parts else kind, name):
                    result = function(*args, **kwargs)
            finally:
                self._in_operator = False
            if name == "moe_gating_top_k":
                self.chosen_experts.append(sorted(set(result[1].flatten().tolist())))
            return result

        return spanned

    def _part(self, kind: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def spanned(*args: Any, **kwargs: Any) -> Any:
            self._parts.append(kind)
            try:
                with self._span(kind, name):
                    return function(*args, **kwargs)
            finally:
                self._parts.pop()

        return spanned


class Clock:
    """Times spans by the monotonic clock. Spans within others interrupt these: events never overlap."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int, int]] = []  # kind, name, begin and end in ns
        self._open: list[tuple[str, str]] = []
        self._since = 0

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        self._cut()
        self._open.append((kind, name))
        try:
            yield
        finally:
            self._cut()
            self._open.pop()

    def _cut(self) -> None:
        """What is open has run up to now."""
        now = time.monotonic_ns()
        if self._open:
            self.events.append((*self._open[-1], self._since, now))
        self._since = now


class TimedOperators:
    """What engine.ops.cpu_decoder.Decoder records of a step, from the operators of a backend."""

    def __init__(self, backend: ModuleType) -> None:
        self._clock = Clock()
        self._operators = Operators(backend, self._clock.span)

    def record(self, on: bool) -> None:
        """Begins anew."""
        self._clock.events = []
        self._operators.record(on)

    @property
    def events(self) -> list[tuple[str, str, int, int]]:
        return self._clock.events

    @property
    def chosen_experts(self) -> list[list[int]]:
        return self._operators.chosen_experts
