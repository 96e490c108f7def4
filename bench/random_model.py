"""Engines of random weights from a config.json alone: for the speed of models that are not at hand.

Three of the configs have names: eight layers of models with experts, in the shapes of published ones, up to 3 GB.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from engine import models
from engine.engine import BLOCK_SIZE, Engine
from engine.kv_cache import KvCache, division
from engine.model_config import ModelConfig

_COMMON = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "num_experts_per_tok": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-moe": _COMMON
    | {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "deepseek-v3": _COMMON
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": 384,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
    },
    "deepseek-v4": _COMMON
    | {
        "model_type": "deepseek_v4",
        "intermediate_size": None,
        "head_dim": 512,
        "q_lora_rank": 384,
        "o_groups": 4,
        "o_lora_rank": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 512,
        "num_hash_layers": 1,
        "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0],
    },
}


class RandomWeights:
    """In the place of a checkpoint: every tensor it is asked for, scaled by the number of inputs."""

    names: Sequence[str] = ()

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return False

    def renamed(self, find: Callable[[str], Any]) -> RandomWeights:
        return self

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype) if name.endswith("weight") else torch.zeros(shape, dtype=dtype)
        scaled: torch.Tensor = torch.randn(tuple(shape), generator=self._generator) * shape[-1] ** -0.5
        return scaled.to(dtype)

    def take_integers(self, name: str, shape: Sequence[int], limit: int) -> torch.Tensor:
        """The numbers of a row differ, as experts of a token do."""
        rows, count = shape
        return torch.rand(rows, limit, generator=self._generator).argsort(1)[:, :count].int()

    def untaken(self, layer: int) -> list[str]:
        return []


def load(
    model: str,
    backend: ModuleType,
    *,
    weights: str,
    memory_bytes: int,
    max_sequences: int = 64,
    latent_form: str = "absorbed",
    **sizes: Any,
) -> Engine:
    """model: a key of CONFIGS or a directory with config.json; sizes: that differ from it; the others: see Engine.load.

    Matrices are bf16 or int8 as `weights` says, the cache is int8. Raises ConfigError for what is no known model.
    """
    if model in CONFIGS:
        given = CONFIGS[model] | sizes
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(given), encoding="utf-8")
            config = ModelConfig.read(Path(folder))
    else:
        config = ModelConfig.read(Path(model))
    checkpoint: Any = RandomWeights()
    granularity = models.block_granularity(config)
    layout = models.cache_layout(config, -(-BLOCK_SIZE // granularity) * granularity, "int8")
    with torch.inference_mode():
        read = models.read(
            *(config, checkpoint, backend, torch.bfloat16), int8_cache=True, weights=weights, latent_form=latent_form
        )
        num_rows, num_states = division(layout, memory_bytes, max_sequences)
        cache = KvCache(layout, num_rows, num_states=num_states)
    return Engine(config, read, cache, model_name=Path(model).name, fingerprint="")
