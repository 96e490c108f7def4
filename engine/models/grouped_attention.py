"""Grouped-query attention with rope over cached K and V: that of Llama, Qwen2, Qwen3, Qwen3-MoE and Mixtral."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from engine.batch import Batch
from engine.kv_cache import KvView
from engine.model_config import ModelConfig
from engine.models.int8_keys import balance_factors, projection_rms, rotations
from engine.models.int8_weights import Projection
from engine.models.projections import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """One layer's; q|k|v as one linear. rotations: of queries and keys, for int8 caches only, shared by all layers."""

    config: ModelConfig
    ops: ModuleType
    qkv: Any
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    output: Any
    rotations: tuple[Any, Any] | None

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        view: KvView,
        stored: Callable[[], None],
    ) -> torch.Tensor:
        """x [T, hidden] normed -> [T, hidden]. `stored` is called as soon as the cache holds the batch's K and V."""
        q, k, v = self._project(x, cos, sin)
        self.ops.store_kv(k, v, view, batch.slots)
        stored()
        return self.ops.linear(self._attend(q, view, batch), self.output)

    @property
    def packed(self) -> tuple[Any, ...]:
        return self.qkv, self.output

    def _project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]; q and k normed and rotated."""
        config = self.config
        heads = self.ops.linear(x, self.qkv).view(len(x), -1, config.head_dim)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if self.q_norm is not None:
            q = self.ops.rms_norm(q, self.q_norm, config.rms_norm_eps)
            k = self.ops.rms_norm(k, self.k_norm, config.rms_norm_eps)
        q, k = self.ops.rope(q, k, cos, sin)
        if self.rotations is not None:
            q, k = (self._rotate(x, matrix) for x, matrix in zip((q, k), self.rotations, strict=True))
        return q, k, v

    def _rotate(self, x: torch.Tensor, matrix: Any) -> torch.Tensor:
        return self.ops.linear(x.reshape(-1, self.config.head_dim), matrix).view(x.shape)

    def _attend(self, q: torch.Tensor, view: KvView, batch: Batch) -> torch.Tensor:
        scale = self.config.head_dim**-0.5
        if batch.is_decode:
            return self.ops.decode_attention(q, view, batch.block_tables, batch.context_lens, scale)
        return self.ops.prefill_attention(q, view, batch.block_tables, batch.query_start, batch.context_lens, scale)


def pack_rotations(reader: Reader) -> tuple[Any, Any] | None:
    """Of queries and keys, where the cache holds int8."""
    if not reader.int8_cache:
        return None
    q, k = rotations(reader.config.head_dim, reader.dtype)
    return reader.ops.pack_linear(q, None), reader.ops.pack_linear(k, None)


def read_grouped_attention(
    reader: Reader, name: str, input_norm: torch.Tensor, rotations: tuple[Any, Any] | None
) -> tuple[GroupedAttention, torch.Tensor]:
    """The attention, and the weights of the norm before it as they then are."""
    config = reader.config
    q, k, v, q_norm, k_norm = _read_input(reader, name, input_norm)
    q, k, v, input_norm = reader.reading(input_norm, q, k, v)
    output = reader.projection(f"{name}.o_proj", config.hidden_size, config.num_heads * config.head_dim, config.o_bias)
    attention = GroupedAttention(
        config=config,
        ops=reader.ops,
        qkv=reader.pack(q, k, v),
        q_norm=q_norm,
        k_norm=k_norm,
        output=reader.pack(reader.writing(output)),
        rotations=rotations,
    )
    return attention, input_norm


def _read_input(
    reader: Reader, name: str, input_norm: torch.Tensor
) -> tuple[Projection, Projection, Projection, torch.Tensor | None, torch.Tensor | None]:
    """q, k, v and the norms of query and key heads; for an int8 cache, balanced."""
    config, head_dim = reader.config, reader.config.head_dim
    sizes = (config.num_heads * head_dim, config.num_kv_heads * head_dim, config.num_kv_heads * head_dim)
    q, k, v = (
        reader.projection(f"{name}.{part}_proj", size, config.hidden_size, config.qkv_bias)
        for part, size in zip("qkv", sizes, strict=True)
    )
    q_norm = reader.norm(f"{name}.q_norm", head_dim) if config.qk_norm else None
    k_norm = reader.norm(f"{name}.k_norm", head_dim) if config.qk_norm else None
    if reader.int8_cache and q_norm is not None and k_norm is not None:
        factors = balance_factors(q_norm.double().abs(), k_norm.double().abs())
        q_norm, k_norm = (q_norm * factors).to(reader.dtype), (k_norm / factors).to(reader.dtype)
    elif reader.int8_cache:
        key_rms = projection_rms(*k, input_norm).view(config.num_kv_heads, 1, head_dim)
        query_rms = projection_rms(*q, input_norm).view(config.num_kv_heads, -1, head_dim)  # heads that share a key
        factors = balance_factors(query_rms.square().mean(1, keepdim=True).sqrt(), key_rms)
        q = _scale_rows(q, factors.expand_as(query_rms).flatten())
        k = _scale_rows(k, 1 / factors.flatten())
    return q, k, v, q_norm, k_norm


def _scale_rows(projection: Projection, factors: torch.Tensor) -> Projection:
    weight, bias = projection
    scaled = weight * factors.to(weight.dtype).unsqueeze(1)
    return scaled, None if bias is None else bias * factors.to(bias.dtype)
