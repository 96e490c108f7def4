"""The latent attention (MLA) of a model, read from config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config_json import flag, size
from engine.rope import RopeParams
from twinpool.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Sizes are elements: of a head's part without rope, its part with rope, its value, and of the latents."""

    q_rank: int | None  # None: queries are projected at once
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    interleaved: bool  # whether rope turns neighbours, not halves
    scale: float  # of the scores

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def num_parameters(self, hidden: int, num_heads: int) -> int:
        """Of the matrices of one layer's attention."""
        queries = num_heads * self.qk_dim
        q = hidden * queries if self.q_rank is None else self.q_rank * (hidden + queries)
        kv = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * num_heads * (self.nope_dim + self.v_dim)
        return q + kv + num_heads * self.v_dim * hidden


def parse_latent(config: Mapping[str, Any], rope: RopeParams) -> LatentConfig:
    """Raises ConfigError for what cannot be."""
    q_rank = config.get("q_lora_rank", 1536)
    nope_dim, rope_dim = size(config, "qk_nope_head_dim", 128), size(config, "qk_rope_head_dim", 64)
    magnitude = 1.0
    all_dims = rope.scaling.get("mscale_all_dim")
    if rope.kind != "default" and all_dims and rope.scaling.get("factor", 1) > 1:
        magnitude = 0.1 * all_dims * math.log(rope.scaling["factor"]) + 1
    latent = LatentConfig(
        q_rank=None if q_rank is None else size(config, "q_lora_rank", 1536),
        kv_rank=size(config, "kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=size(config, "v_head_dim", 128),
        interleaved=flag(config, "rope_interleave", True),
        scale=(nope_dim + rope_dim) ** -0.5 * magnitude**2,
    )
    for name, value in (
        ("kv_lora_rank", latent.kv_rank),
        ("qk_nope_head_dim", nope_dim),
        ("qk_rope_head_dim", rope_dim),
    ):
        if value % 4:
            raise ConfigError(f"config.json: {name} is {value}, it must be a multiple of 4")
    return latent
