"""Models: one file a family, beside the parts that they share. `read` chooses by the `model_type` of config.json."""

from __future__ import annotations

from types import ModuleType

import torch

from engine.loading import Checkpoint
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.dense import read_dense
from engine.models.grouped_moe import read_grouped_moe
from engine.models.projections import Reader

MODELS = {
    "llama": read_dense,
    "qwen2": read_dense,
    "qwen3": read_dense,
    "qwen3_moe": read_grouped_moe,
    "mixtral": read_grouped_moe,
}


def read(
    config: ModelConfig,
    checkpoint: Checkpoint,
    ops: ModuleType,
    dtype: torch.dtype,
    *,
    int8_cache: bool,
    weights: str,
) -> Decoder:
    """int8_cache: whether keys are changed to fit one, see engine.models.int8_keys; weights: how matrices are held, see
    engine.quantization. Raises ConfigError when the checkpoint does not hold what the config implies."""
    reader = Reader(config, checkpoint, ops, dtype, int8_cache=int8_cache, weights=weights)
    return MODELS[config.model_type](reader)
