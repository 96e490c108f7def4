"""Rotary position embeddings: the frequencies of a config.json, and the angles of a batch.

Kinds: default (RoFormer, arXiv 2104.09864), linear (position interpolation, arXiv 2306.15595), yarn (arXiv 2309.00071,
as in the Qwen2.5 model cards) and llama3 (as in the Llama 3.1 release). All are static: they hold for every length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.config_json import number
from twinpool.errors import ConfigError

TABLE_POSITIONS = 4096  # that a table of angles has at least


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParams:
    """How positions turn into angles; `scaling` holds the further keys of the kind as config.json spells them."""

    kind: str
    theta: float
    original_max_context: int  # the length that the unscaled frequencies were trained for
    scaling: Mapping[str, Any]


class Rotary:
    """Angles for positions. inv_freq: fp32 [head_dim / 2]; factor multiplies cos and sin (yarn; 1 for the others)."""

    def __init__(self, params: RopeParams, head_dim: int) -> None:
        self.inv_freq, self.factor = _KINDS[params.kind](params, head_dim)
        self._table = self.cos_sin(torch.arange(0))

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [T] -> cos, sin fp32 [T, head_dim / 2], factor applied."""
        angles = positions.float().unsqueeze(1) * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.factor == 1 else (cos * self.factor, sin * self.factor)

    def table(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the positions 0 .. at least count - 1, with a row each. Kept, and made anew twice as long."""
        if count > len(self._table[0]):
            self._table = self.cos_sin(torch.arange(max(TABLE_POSITIONS, 2 * count)))
        return self._table


def parse_rope(config: Mapping[str, Any], default_theta: float, max_positions: int) -> RopeParams:
    """Reads `rope_parameters` (new spelling), or `rope_theta` and `rope_scaling` (old). Raises ConfigError."""
    source = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(source, Mapping):
        raise ConfigError(f"config.json: rope_parameters or rope_scaling is {source!r}, it must be an object")
    entries = dict(source)
    kind = entries.pop("rope_type", None) or entries.pop("type", None) or "default"
    theta = number({"rope_theta": entries.pop("rope_theta", config.get("rope_theta"))}, "rope_theta", default_theta)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"config.json asks for rope type {kind!r}: supported are {', '.join(sorted(_KINDS))}")
    missing = [key for key in _REQUIRED[kind] if not isinstance(entries.get(key), int | float)]
    if missing:
        raise ConfigError(
            f"config.json: rope type {kind!r} needs the number{'s'[: len(missing) - 1]} {', '.join(missing)}"
        )
    if entries.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1:
        raise ConfigError("config.json: partial_rotary_factor other than 1 is not supported")
    for key in ("factor", "original_max_position_embeddings"):
        number(entries, key, 1)
    original = entries.pop("original_max_position_embeddings", None) or max_positions
    return RopeParams(kind=kind, theta=theta, original_max_context=int(original), scaling=entries)


def _base_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


def _default(params: RopeParams, head_dim: int) -> tuple[torch.Tensor, float]:
    return _base_frequencies(params.theta, head_dim), 1.0


def _linear(params: RopeParams, head_dim: int) -> tuple[torch.Tensor, float]:
    return _base_frequencies(params.theta, head_dim) / params.scaling["factor"], 1.0


def _llama3(params: RopeParams, head_dim: int) -> tuple[torch.Tensor, float]:
    """Long waves are stretched by `factor`, short ones kept, those between blended by where they lie."""
    freq = _base_frequencies(params.theta, head_dim)
    factor, low, high = (params.scaling[key] for key in _REQUIRED["llama3"])
    turns = params.original_max_context * freq / (2 * math.pi)  # rotations over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * freq / factor + keep * freq, 1.0


def _yarn(params: RopeParams, head_dim: int) -> tuple[torch.Tensor, float]:
    """Frequencies that turn less than beta_slow times over the original context are stretched by `factor`, those over
    beta_fast kept, with a linear ramp over the dimensions between."""
    scaling, freq = params.scaling, _base_frequencies(params.theta, head_dim)
    factor = scaling["factor"]

    def dimension_at(turns: float) -> float:
        return head_dim * math.log(params.original_max_context / (turns * 2 * math.pi)) / (2 * math.log(params.theta))

    low, high = dimension_at(scaling.get("beta_fast") or 32), dimension_at(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return (freq / factor) * ramp + freq * (1 - ramp), _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1)


_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_KINDS: dict[str, Callable[[RopeParams, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def halves_order(size: int, dim: int, rope_dim: int) -> torch.Tensor:
    """Where `size` channels, heads of `dim` of which rope turns the last rope_dim in pairs side by side, go for rope
    over halves: int64 [size], the channel that comes to each place."""
    order = torch.arange(dim)
    order[dim - rope_dim :] = dim - rope_dim + torch.arange(rope_dim).view(-1, 2).T.flatten()
    return (torch.arange(0, size, dim).unsqueeze(1) + order).flatten()
