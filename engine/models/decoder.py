"""A stack of layers between the table of embeddings and the output layer; families differ in what their layers are.

A layer is an attention and a feed-forward block, each behind a norm and added to the residuals (pre-norm).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from engine.batch import Batch
from engine.model_config import ModelConfig
from engine.models.projections import Reader
from engine.rope import Rotary
from engine.sampling import Draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """attention: engine.models.grouped_attention or latent_attention; mlp: engine.models.gated_mlp or expert_mlp."""

    input_norm: torch.Tensor  # [hidden]
    attention: Any
    post_norm: torch.Tensor  # [hidden]
    mlp: Any


class Decoder:
    """Weights and forward pass. Activations are in the weights' dtype; the cache's dtype is the ops' business."""

    def __init__(
        self,
        config: ModelConfig,
        ops: ModuleType,
        rotary: Rotary,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        head: Any,
        final_norm: torch.Tensor,
    ) -> None:
        self.config, self.ops, self.rotary = config, ops, rotary
        self.embedding, self.layers, self.head, self.final_norm = embedding, layers, head, final_norm
        self._decoder: Any = None
        self._decoder_views: list[Any] | None = None
        self._output = ops.OutputLayer(head)

    @classmethod
    def read(cls, reader: Reader, rotary: Rotary, read_layer: Callable[[int], Layer]) -> Decoder:
        """Loads layer by layer, so that beside the packed weights only one layer is held a second time."""
        embedding = reader.part("embedding", reader.embedding)
        layers = [reader.layer(i, read_layer) for i in range(reader.config.num_layers)]
        head, final_norm = reader.part("head", partial(_read_head, reader, embedding), of_one_format=False)
        return cls(reader.config, reader.ops, rotary, embedding, layers, head, final_norm)

    def forward(self, batch: Batch, views: list[Any], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Stores the batch's tokens in the cache and returns hidden states [T, hidden] after the final norm."""
        cos, sin = self.rotary.cos_sin(batch.positions)
        residual = F.embedding(batch.token_ids, self.embedding)
        decoder = self.decoder(views)
        if decoder is not None:
            return decoder.forward(residual, cos, sin, batch, on_layer)
        return self.forward_by_operator(residual, cos, sin, batch, views, on_layer)

    def decoder(self, views: list[Any]) -> Any:
        """All layers over this cache as one call of the backend; None where it has no such thing."""
        if self._decoder_views is not views:
            self._decoder = self.ops.decoder(
                *(self.config, self.layers, self.final_norm, views, self.embedding, self.rotary),
            )
            self._decoder_views = views
        return self._decoder

    def forward_by_operator(
        self,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        views: list[Any],
        on_layer: Callable[[int], None] | None,
    ) -> torch.Tensor:
        """What a decoder of the backend computes, bit for bit, from the embeddings [T, hidden] on."""
        ops, eps = self.ops, self.config.rms_norm_eps
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            stored = _nothing if on_layer is None else partial(on_layer, index)
            x = layer.attention.forward(x, cos, sin, batch, views[index], stored)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = layer.mlp.forward(x)
            next_norm = self.layers[index + 1].input_norm if index + 1 < len(self.layers) else self.final_norm
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] -> [n, vocab] fp32."""
        return self.ops.linear(hidden, self.head).float()

    def tokens(
        self, hidden: torch.Tensor, draws: Sequence[Draw | None], sources: Sequence[int]
    ) -> tuple[list[int], torch.Tensor]:
        """Logits and the choice from them in one operator; see reference_linear.OutputLayer."""
        return self._output.tokens(hidden, draws, sources)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices that a step of one token with logits reads."""
        attention = sum(packed.nbytes for layer in self.layers for packed in layer.attention.packed)
        return attention + sum(layer.mlp.nbytes for layer in self.layers) + self.head.nbytes


def _read_head(reader: Reader, embedding: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return reader.head(embedding, reader.norm("model.norm", reader.config.hidden_size))


def _nothing() -> None:
    pass
