"""The dense decoder that Llama, Qwen2 and Qwen3 share: pre-norm, grouped-query attention with rope, SwiGLU.

They differ in data only (biases, query and key norms, rope kind, sizes), which ModelConfig carries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from engine.batch import Batch
from engine.kv_cache import KvView
from engine.loading import Checkpoint
from engine.model_config import ModelConfig
from engine.rope import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights; the linear ones as the backend packed them, q|k|v and gate|up fused along the output."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Any
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    output: Any
    post_norm: torch.Tensor  # [hidden]
    gate_up: Any
    down: Any


class DenseDecoder:
    """Weights and forward pass. Activations are in `dtype`; the cache's dtype is the ops' business."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, ops: ModuleType, dtype: torch.dtype) -> None:
        """Loads layer by layer, so that beside the packed weights only one layer is held a second time."""
        self.config = config
        self.ops = ops
        self.rotary = Rotary(config.rope, config.head_dim)
        reader = _Reader(config, checkpoint, ops, dtype)
        self.embedding = reader.embedding()
        self.layers = [reader.layer(index) for index in range(config.num_layers)]
        self.final_norm = reader.norm("model.norm", config.hidden_size)
        self.head = reader.head(self.embedding)

    def forward(self, batch: Batch, views: list[KvView], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Stores the batch's K and V in the cache and returns hidden states [T, hidden] after the final norm."""
        ops, eps = self.ops, self.config.rms_norm_eps
        cos, sin = self.rotary.cos_sin(batch.positions)
        residual = F.embedding(batch.token_ids, self.embedding)
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            q, k, v = self._project(layer, x, cos, sin)
            ops.store_kv(k, v, views[index], batch.slots)
            if on_layer is not None:
                on_layer(index)
            x = ops.linear(self._attend(q, views[index], batch), layer.output)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
            next_norm = self.layers[index + 1].input_norm if index + 1 < len(self.layers) else self.final_norm
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] -> [n, vocab] fp32."""
        return self.ops.linear(hidden, self.head).float()

    def _project(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]; q and k normed and rotated."""
        config = self.config
        heads = self.ops.linear(x, layer.qkv).view(len(x), -1, config.head_dim)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if layer.q_norm is not None:
            q = self.ops.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = self.ops.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = self.ops.rope(q, k, cos, sin)
        return q, k, v

    def _attend(self, q: torch.Tensor, view: KvView, batch: Batch) -> torch.Tensor:
        scale = self.config.head_dim**-0.5
        if batch.is_decode:
            return self.ops.decode_attention(q, view, batch.block_tables, batch.context_lens, scale)
        return self.ops.prefill_attention(q, view, batch.block_tables, batch.query_start, batch.context_lens, scale)


class _Reader:
    """Checkpoint names and shapes of the dense decoders (the names of transformers)."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, ops: ModuleType, dtype: torch.dtype) -> None:
        self.config, self.checkpoint, self.ops, self.dtype = config, checkpoint, ops, dtype

    def embedding(self) -> torch.Tensor:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self.checkpoint.take("model.embed_tokens.weight", shape, self.dtype)

    def head(self, embedding: torch.Tensor) -> Any:
        tied = self.config.tie_word_embeddings
        weight = embedding if tied else self.checkpoint.take("lm_head.weight", embedding.shape, self.dtype)
        return self.ops.pack_linear(weight, None)

    def norm(self, name: str, size: int) -> torch.Tensor:
        return self.checkpoint.take(f"{name}.weight", (size,), self.dtype)

    def layer(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
        gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
        return Layer(
            input_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            qkv=self.linear(qkv, hidden, config.qkv_bias),
            q_norm=self.norm(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self.norm(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
            output=self.linear({f"{attention}.o_proj": hidden}, q_size, config.o_bias),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            gate_up=self.linear(gate_up, hidden, config.mlp_bias),
            down=self.linear({f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
        )

    def linear(self, parts: dict[str, int], in_size: int, has_bias: bool) -> Any:
        """Packs the projections `parts` (name -> output size) as one, stacked along the output."""
        take, dtype = self.checkpoint.take, self.dtype
        weights = [take(f"{name}.weight", (out_size, in_size), dtype) for name, out_size in parts.items()]
        biases = [take(f"{name}.bias", (out_size,), dtype) for name, out_size in parts.items()] if has_bias else []
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return self.ops.pack_linear(weight, torch.cat(biases) if has_bias else None)
