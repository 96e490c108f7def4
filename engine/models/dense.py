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
from engine.models.int8_keys import balance_factors, projection_rms, rotations
from engine.models.int8_weights import (
    MOST_GATED,
    Projection,
    hadamard,
    read_rotated,
    read_turned,
    residual_basis,
    write_turned,
)
from engine.quantization import AS_LOADED, W8A8, W8A16
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

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: ModuleType,
        dtype: torch.dtype,
        *,
        int8_keys: bool,
        weights: str,
    ) -> None:
        """Loads layer by layer, so that beside the packed weights only one layer is held a second time.

        int8_keys: whether keys are changed to fit an int8 cache, see engine.models.int8_keys; weights: how matrices are
        held, see engine.quantization.
        """
        self.config = config
        self.ops = ops
        self.rotary = Rotary(config.rope, config.head_dim)
        self.rotations = None
        if int8_keys:
            self.rotations = [ops.pack_linear(matrix, None) for matrix in rotations(config.head_dim, dtype)]
        gated_rotation = None if weights == AS_LOADED else hadamard(config.intermediate_size, MOST_GATED)
        self.gated_rotation = None if gated_rotation is None else ops.pack_linear(gated_rotation.to(dtype), None)
        reader = _Reader(config, checkpoint, ops, dtype, int8_keys, weights)
        self.embedding = reader.embedding()
        self.layers = [reader.layer(index) for index in range(config.num_layers)]
        self.head, self.final_norm = reader.head(self.embedding, reader.norm("model.norm", config.hidden_size))
        self._decoder: Any = None
        self._decoder_views: list[KvView] | None = None

    def forward(self, batch: Batch, views: list[KvView], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Stores the batch's K and V in the cache and returns hidden states [T, hidden] after the final norm."""
        cos, sin = self.rotary.cos_sin(batch.positions)
        residual = F.embedding(batch.token_ids, self.embedding)
        decoder = self.decoder(views)
        if decoder is not None:
            return decoder.forward(residual, cos, sin, batch, on_layer)
        return self.forward_by_operator(residual, cos, sin, batch, views, on_layer)

    def decoder(self, views: list[KvView]) -> Any:
        """All layers over this cache as one call of the backend; None where it has no such thing."""
        if self._decoder_views is not views:
            self._decoder = self.ops.decoder(
                self.config, self.layers, self.final_norm, self.rotations, self.gated_rotation, views
            )
            self._decoder_views = views
        return self._decoder

    def forward_by_operator(
        self,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        views: list[KvView],
        on_layer: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """What a decoder of the backend computes, bit for bit, from the embeddings [T, hidden] on."""
        ops, eps = self.ops, self.config.rms_norm_eps
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            q, k, v = self._project(layer, x, cos, sin)
            ops.store_kv(k, v, views[index], batch.slots)
            if on_layer is not None:
                on_layer(index)
            x = ops.linear(self._attend(q, views[index], batch), layer.output)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            gated = ops.silu_mul(ops.linear(x, layer.gate_up))
            if self.gated_rotation is not None:
                width = self.gated_rotation.in_features
                gated = ops.linear(gated.view(-1, width), self.gated_rotation).view(gated.shape)
            x = ops.linear(gated, layer.down)
            next_norm = self.layers[index + 1].input_norm if index + 1 < len(self.layers) else self.final_norm
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] -> [n, vocab] fp32."""
        return self.ops.linear(hidden, self.head).float()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices that a step with logits reads."""
        packed = [getattr(layer, name) for layer in self.layers for name in ("qkv", "output", "gate_up", "down")]
        return sum(each.nbytes for each in (*packed, self.head))

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


class _Reader:
    """Checkpoint names and shapes of the dense decoders (the names of transformers)."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: ModuleType,
        dtype: torch.dtype,
        int8_keys: bool,
        weights: str,
    ) -> None:
        self.config, self.checkpoint, self.ops, self.dtype = config, checkpoint, ops, dtype
        self.int8_keys, self.weights = int8_keys, weights
        self.basis = None if weights == AS_LOADED else residual_basis(config.hidden_size)

    def embedding(self) -> torch.Tensor:
        table = self.take_embedding()
        return table if self.basis is None else (table.float() @ self.basis).to(self.dtype)

    def take_embedding(self) -> torch.Tensor:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self.checkpoint.take("model.embed_tokens.weight", shape, self.dtype)

    def head(self, embedding: torch.Tensor, norm: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The packed output layer and the weights of the norm before it."""
        if not self.config.tie_word_embeddings:
            weight = self.checkpoint.take("lm_head.weight", embedding.shape, self.dtype)
        else:
            weight = embedding if self.basis is None else self.take_embedding()
        (weight, _), norm = self.reading(norm, (weight, None))
        # Few rows pass through it and its errors reach the tokens at once: never int8 by int8.
        return self.ops.pack_linear(weight, None, W8A16 if self.weights == W8A8 else self.weights), norm

    def reading(self, norm: torch.Tensor, *projections: Projection) -> tuple[Any, ...]:
        """Projections that read the residuals through `norm`, and the norm's weights: for int8, in the turned basis."""
        if self.basis is None:
            return *projections, norm
        return *(read_turned(each, norm, self.basis) for each in projections), torch.ones_like(norm)

    def writing(self, projection: Projection) -> Projection:
        return projection if self.basis is None else write_turned(projection, self.basis)

    def norm(self, name: str, size: int) -> torch.Tensor:
        return self.checkpoint.take(f"{name}.weight", (size,), self.dtype)

    def layer(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}"
        mlp, hidden, inner = f"{prefix}.mlp", config.hidden_size, config.intermediate_size
        input_norm = self.norm(f"{prefix}.input_layernorm", hidden)
        q, k, v, q_norm, k_norm = self.attention_input(f"{prefix}.self_attn", input_norm)
        q, k, v, input_norm = self.reading(input_norm, q, k, v)
        output = self.projection(
            f"{prefix}.self_attn.o_proj", hidden, config.num_heads * config.head_dim, config.o_bias
        )
        gate, up = (self.projection(f"{mlp}.{name}_proj", inner, hidden, config.mlp_bias) for name in ("gate", "up"))
        gate, up, post_norm = self.reading(self.norm(f"{prefix}.post_attention_layernorm", hidden), gate, up)
        down = self.projection(f"{mlp}.down_proj", hidden, inner, config.mlp_bias)
        return Layer(
            input_norm=input_norm,
            qkv=self.pack(q, k, v),
            q_norm=q_norm,
            k_norm=k_norm,
            output=self.pack(self.writing(output)),
            post_norm=post_norm,
            gate_up=self.pack(gate, up),
            down=self.pack(self.writing(down if self.basis is None else read_rotated(down))),
        )

    def attention_input(
        self, name: str, input_norm: torch.Tensor
    ) -> tuple[Projection, Projection, Projection, torch.Tensor | None, torch.Tensor | None]:
        """q, k, v and the norms of query and key heads; with int8_keys, balanced."""
        config, head_dim = self.config, self.config.head_dim
        sizes = (config.num_heads * head_dim, config.num_kv_heads * head_dim, config.num_kv_heads * head_dim)
        q, k, v = (
            self.projection(f"{name}.{part}_proj", size, config.hidden_size, config.qkv_bias)
            for part, size in zip("qkv", sizes, strict=True)
        )
        q_norm = self.norm(f"{name}.q_norm", head_dim) if config.qk_norm else None
        k_norm = self.norm(f"{name}.k_norm", head_dim) if config.qk_norm else None
        if self.int8_keys and q_norm is not None and k_norm is not None:
            factors = balance_factors(q_norm.double().abs(), k_norm.double().abs())
            q_norm, k_norm = (q_norm * factors).to(self.dtype), (k_norm / factors).to(self.dtype)
        elif self.int8_keys:
            key_rms = projection_rms(*k, input_norm).view(config.num_kv_heads, 1, head_dim)
            query_rms = projection_rms(*q, input_norm).view(config.num_kv_heads, -1, head_dim)  # heads that share a key
            factors = balance_factors(query_rms.square().mean(1, keepdim=True).sqrt(), key_rms)
            q = _scale_rows(q, factors.expand_as(query_rms).flatten())
            k = _scale_rows(k, 1 / factors.flatten())
        return q, k, v, q_norm, k_norm

    def projection(self, name: str, out_size: int, in_size: int, has_bias: bool) -> Projection:
        bias = self.checkpoint.take(f"{name}.bias", (out_size,), self.dtype) if has_bias else None
        return self.checkpoint.take(f"{name}.weight", (out_size, in_size), self.dtype), bias

    def pack(self, *parts: Projection) -> Any:
        """One linear of all parts (which have a bias or not alike), stacked along the output."""
        weight = parts[0][0] if len(parts) == 1 else torch.cat([weight for weight, _ in parts])
        biases = [bias for _, bias in parts if bias is not None]
        return self.ops.pack_linear(weight, torch.cat(biases) if biases else None, self.weights)


def _scale_rows(projection: Projection, factors: torch.Tensor) -> Projection:
    weight, bias = projection
    scaled = weight * factors.to(weight.dtype).unsqueeze(1)
    return scaled, None if bias is None else bias * factors.to(bias.dtype)
