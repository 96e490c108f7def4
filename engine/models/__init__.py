"""Models: one file a family, beside the parts that they share. `read` chooses by the `model_type` of config.json."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch

from engine.batch import Batch
from engine.compressed_cache import CompressedLayout
from engine.kv_cache import KvLayout, Layout
from engine.latent_cache import LatentLayout
from engine.loading import Checkpoint
from engine.model_config import ModelConfig
from engine.models.deepseek_v3 import read_deepseek_v3
from engine.models.deepseek_v4 import read_deepseek_v4
from engine.models.dense import read_dense
from engine.models.grouped_moe import read_grouped_moe
from engine.models.projections import Reader
from engine.packed_weights import UNSHARED, Parts
from engine.sampling import Draw
from twinpool.errors import ConfigError


class Model(Protocol):
    """A stack of layers with weights: engine.models.decoder.Decoder, or engine.models.streams.StreamDecoder."""

    def forward(
        self, batch: Batch, views: list[Any], on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def tokens(
        self, hidden: torch.Tensor, draws: Sequence[Draw | None], sources: Sequence[int]
    ) -> tuple[list[int], torch.Tensor]: ...
    def decoder(self, views: list[Any]) -> Any: ...
    @property
    def weight_bytes(self) -> int: ...


MODELS: dict[str, Callable[[Reader], Model]] = {
    "llama": read_dense,
    "qwen2": read_dense,
    "qwen3": read_dense,
    "qwen3_moe": read_grouped_moe,
    "mixtral": read_grouped_moe,
    "deepseek_v3": read_deepseek_v3,
    "deepseek_v4": read_deepseek_v4,
}


def block_granularity(config: ModelConfig) -> int:
    """What a block's number of tokens must be a multiple of: as many as one entry of the model's cache stands for."""
    if config.compressed is not None:
        return math.lcm(config.compressed.sparse_rate, config.compressed.heavy_rate)
    return 1


def cache_layout(config: ModelConfig, block_size: int, kv_dtype: str) -> Layout:
    """What a row of the model's cache is like. block_size: tokens a row; kv_dtype: a key of KV_DTYPES."""
    if config.compressed is not None:
        return CompressedLayout(model=config.compressed, block_size=block_size, kv_dtype=kv_dtype)
    if config.latent is not None:
        return LatentLayout(
            num_layers=config.num_layers,
            rank=config.latent.kv_rank,
            rope_dim=config.latent.rope_dim,
            block_size=block_size,
            kv_dtype=kv_dtype,
        )
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        kv_dtype=kv_dtype,
    )


def read(
    config: ModelConfig,
    checkpoint: Checkpoint,
    ops: ModuleType,
    dtype: torch.dtype,
    *,
    int8_cache: bool,
    weights: str,
    latent_form: str,
    parts: Parts = UNSHARED,
) -> Model:
    """int8_cache: whether keys are changed to fit one, see engine.models.int8_keys; weights: how matrices are held, see
    engine.quantization; latent_form: see engine.models.latent_attention; parts: where packed weights are kept, see
    engine.packed_weights.
    Raises ConfigError when the checkpoint does not hold what the config implies.
    """
    _check_layers(config, checkpoint)
    reader = Reader(
        *(config, checkpoint, ops, dtype),
        int8_cache=int8_cache,
        weights=weights,
        latent_form=latent_form,
        parts=parts,
    )
    return MODELS[config.model_type](reader)


def _check_layers(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """A config.json of fewer layers than the weights have would be another model, without an error anywhere.

    What predicts further tokens lies behind the last layer, as a layer that has more than others.
    """
    behind: dict[str, str] = {}  # layers by the beginning of their names, each with one of its tensors
    further = set()
    for name in checkpoint.names:
        match = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
        if match and int(match[1]) >= config.num_layers:
            behind.setdefault(match[0], name)
            if re.match(r"(eh_proj|e_proj|h_proj|enorm|hnorm|shared_head)\b", name.removeprefix(match[0])):
                further.add(match[0])
    for layer in behind.keys() - further:
        raise ConfigError(
            f"{checkpoint.where(behind[layer])} is of a layer more than the {config.num_layers} that config.json "
            "implies (num_hidden_layers)"
        )
