"""A stack of layers between several streams of residuals, which every block reads from and writes to by weights that
it computes from the streams (manifold-constrained hyper-connections, arXiv 2512.24880)."""

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
from engine.models.compressed_attention import CompressedAttention
from engine.models.compressed_step import Step
from engine.models.expert_mlp import ExpertMlp
from engine.rope import Rotary
from engine.sampling import Draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """fn: a linear in fp32 from all streams, normed as one, to the mixing weights; scale and base fp32."""

    ops: ModuleType
    fn: Any
    scale: torch.Tensor
    base: torch.Tensor
    ones: torch.Tensor  # fp32 [streams * hidden]: the norm has no weights
    norm_eps: float

    def mixes(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [T, n, hidden] -> fp32 [T, outputs of fn]."""
        return self.ops.linear(self.ops.rms_norm(streams.flatten(1).float(), self.ones, self.norm_eps), self.fn)

    def read(
        self, streams: torch.Tensor, iterations: int, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a block works on [T, hidden], and how `hc_post` writes back what it returns."""
        mixed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.ops.hc_pre(
            streams, self.mixes(streams), self.scale, self.base, iterations, eps
        )
        return mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLayer:
    attention_connection: Connection
    input_norm: torch.Tensor  # [hidden]
    attention: CompressedAttention
    mlp_connection: Connection
    post_norm: torch.Tensor  # [hidden]
    mlp: ExpertMlp


class StreamDecoder:
    """Weights and forward pass: what engine.models.decoder.Decoder is for models with one stream."""

    def __init__(
        self,
        config: ModelConfig,
        ops: ModuleType,
        rotaries: tuple[Rotary, Rotary],
        embedding: torch.Tensor,
        layers: Sequence[StreamLayer],
        merge: Connection,
        head: Any,
        final_norm: torch.Tensor,
    ) -> None:
        """rotaries: of layers without and with entries."""
        self.config, self.ops, self.rotaries = config, ops, rotaries
        self.embedding, self.layers, self.merge = embedding, layers, merge
        self.head, self.final_norm = head, final_norm
        self._output = ops.OutputLayer(head)

    def forward(self, batch: Batch, views: list[Any], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Stores what the batch brings in the cache and returns hidden states [T, hidden] after the final norm."""
        compressed, ops, eps = self.config.compressed, self.ops, self.config.rms_norm_eps
        assert compressed is not None
        step = Step.plan(batch, compressed, views, *self.rotaries)
        streams = F.embedding(batch.token_ids, self.embedding).unsqueeze(1).repeat(1, compressed.streams, 1)
        mixing = (compressed.sinkhorn_iterations, compressed.streams_eps)
        for index, layer in enumerate(self.layers):
            stored = _nothing if on_layer is None else partial(on_layer, index)
            x, post, comb = layer.attention_connection.read(streams, *mixing)
            x = layer.attention.forward(ops.rms_norm(x, layer.input_norm, eps), step, views[index], stored)
            streams = ops.hc_post(x, streams, post, comb)
            x, post, comb = layer.mlp_connection.read(streams, *mixing)
            x = layer.mlp.forward(ops.rms_norm(x, layer.post_norm, eps), batch.token_ids)
            streams = ops.hc_post(x, streams, post, comb)
        merge = self.merge
        merged = ops.hc_head(streams, merge.mixes(streams), merge.scale, merge.base, compressed.streams_eps)
        return ops.rms_norm(merged, self.final_norm, eps)

    def decoder(self, views: list[Any]) -> None:
        """No backend has all of such layers as one call."""

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
        total = self.head.nbytes + self.merge.fn.nbytes
        for layer in self.layers:
            total += sum(packed.nbytes for packed in layer.attention.packed) + layer.mlp.nbytes
            total += layer.attention_connection.fn.nbytes + layer.mlp_connection.fn.nbytes
        return total


def _nothing() -> None:
    pass
