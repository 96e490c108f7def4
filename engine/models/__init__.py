"""Models. `build` chooses the class by the `model_type` of config.json."""

from __future__ import annotations

from types import ModuleType

import torch

from engine.loading import Checkpoint
from engine.model_config import ModelConfig
from engine.models.dense import DenseDecoder

MODELS = {"llama": DenseDecoder, "qwen2": DenseDecoder, "qwen3": DenseDecoder}


def build(
    config: ModelConfig,
    checkpoint: Checkpoint,
    ops: ModuleType,
    dtype: torch.dtype,
    *,
    int8_keys: bool,
    weights: str,
) -> DenseDecoder:
    """Raises ConfigError when the checkpoint does not hold what the config implies."""
    return MODELS[config.model_type](config, checkpoint, ops, dtype, int8_keys=int8_keys, weights=weights)
