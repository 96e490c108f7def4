"""The mixture of experts of a model, read from config.json. Each family spells it its own way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config_json import flag, number, size
from twinpool.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Sizes are elements. What the fields of the gating mean: engine/ops/reference_moe.py."""

    num_experts: int
    experts_per_token: int
    inner_size: int  # width of one expert
    shared_size: int  # width of what every token passes through beside, 0: nothing
    sparse_layers: tuple[bool, ...]  # of each layer, whether it has experts
    scoring: str
    renormalize: bool
    eps: float
    scaling: float
    has_bias: bool
    num_groups: int
    groups_kept: int
    hash_layers: tuple[bool, ...] = ()  # of each layer, whether a token's id alone says its experts; (): none
    limit: float = math.inf  # gate is clamped to it from above and up both ways

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"config.json: {self.experts_per_token} experts a token, but there are {self.num_experts} experts"
            )
        if self.num_experts % self.num_groups or self.groups_kept > self.num_groups:
            raise ConfigError(
                f"config.json: {self.num_experts} experts cannot be {self.num_groups} groups (n_group) of which "
                f"{self.groups_kept} are kept (topk_group)"
            )
        group = self.num_experts // self.num_groups
        if self.num_groups > 1 and (group < 2 or group * self.groups_kept < self.experts_per_token):
            raise ConfigError(
                f"config.json: {self.groups_kept} groups of {group} experts are too few for "
                f"{self.experts_per_token} experts a token, or for the two best of a group"
            )

    @property
    def expert_elements(self) -> int:
        """Elements of one expert's matrices, for each hidden channel."""
        return 3 * self.inner_size


def parse_moe(config: Mapping[str, Any], num_layers: int) -> MoeConfig | None:
    """None for a dense model. Raises ConfigError for what cannot be."""
    parse = _PARSERS.get(config["model_type"])
    return None if parse is None else parse(config, num_layers)


def _qwen3_moe(config: Mapping[str, Any], num_layers: int) -> MoeConfig:
    step, dense = size(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return MoeConfig(
        num_experts=size(config, "num_experts", config.get("num_local_experts", 128)),
        experts_per_token=size(config, "num_experts_per_tok", 8),
        inner_size=size(config, "moe_intermediate_size", 768),
        shared_size=0,
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        scoring="softmax",
        renormalize=flag(config, "norm_topk_prob", False),
        eps=0.0,
        scaling=1.0,
        has_bias=False,
        num_groups=1,
        groups_kept=1,
    )


def _mixtral(config: Mapping[str, Any], num_layers: int) -> MoeConfig:
    return MoeConfig(
        num_experts=size(config, "num_local_experts", 8),
        experts_per_token=size(config, "num_experts_per_tok", 2),
        inner_size=size(config, "intermediate_size"),
        shared_size=0,
        sparse_layers=(True,) * num_layers,
        scoring="softmax",
        renormalize=True,
        eps=0.0,
        scaling=1.0,
        has_bias=False,
        num_groups=1,
        groups_kept=1,
    )


def _deepseek_v3(config: Mapping[str, Any], num_layers: int) -> MoeConfig:
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(key, only) != only:
            raise ConfigError(f"config.json: {key} {config[key]!r} is not supported for deepseek_v3, only {only!r}")
    inner, dense_layers = size(config, "moe_intermediate_size", 2048), config.get("first_k_dense_replace", 3)
    if not isinstance(dense_layers, int) or isinstance(dense_layers, bool) or dense_layers < 0:
        raise ConfigError(f"config.json: first_k_dense_replace is {dense_layers!r}, it must be a number of layers")
    return MoeConfig(
        num_experts=size(config, "n_routed_experts", 256),
        experts_per_token=size(config, "num_experts_per_tok", 8),
        inner_size=inner,
        shared_size=inner * size(config, "n_shared_experts", 1),
        sparse_layers=tuple(i >= dense_layers for i in range(num_layers)),
        scoring="sigmoid",
        renormalize=flag(config, "norm_topk_prob", True),
        eps=1e-20,
        scaling=number(config, "routed_scaling_factor", 2.5),
        has_bias=True,
        num_groups=size(config, "n_group", 8),
        groups_kept=size(config, "topk_group", 4),
    )


def _deepseek_v4(config: Mapping[str, Any], num_layers: int) -> MoeConfig:
    scoring = config.get("scoring_func") or "sqrtsoftplus"
    if scoring not in ("sqrtsoftplus", "softmax", "sigmoid"):
        raise ConfigError(
            f"config.json: scoring_func {scoring!r} is not supported for deepseek_v4, only sqrtsoftplus, softmax and "
            "sigmoid"
        )
    if config.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ConfigError(f"config.json: topk_method {config['topk_method']!r} is not supported, only 'noaux_tc'")
    if config.get("expert_dtype") not in (None, "fp4", "fp8", "bf16", "bfloat16"):
        raise ConfigError(f"config.json: expert_dtype {config['expert_dtype']!r} is not supported, only fp4, fp8, bf16")
    inner = size(config, "moe_intermediate_size", 2048)
    return MoeConfig(
        num_experts=size(config, "n_routed_experts", 256),
        experts_per_token=size(config, "num_experts_per_tok", 6),
        inner_size=inner,
        shared_size=inner * size(config, "n_shared_experts", 1),
        sparse_layers=(True,) * num_layers,
        scoring=scoring,
        renormalize=flag(config, "norm_topk_prob", True),
        eps=1e-20,
        scaling=number(config, "routed_scaling_factor", 1.5),
        has_bias=True,
        num_groups=1,
        groups_kept=1,
        hash_layers=_hash_layers(config, num_layers),
        limit=number(config, "swiglu_limit", 10.0),
    )


def _hash_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        count = config.get("num_hash_layers", 3)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"config.json: num_hash_layers is {count!r}, it must be a number of layers")
        return tuple(index < count for index in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) < num_layers or any(each not in ("hash_moe", "moe") for each in kinds):
        raise ConfigError(f"config.json: mlp_layer_types must say hash_moe or moe for each of the {num_layers} layers")
    return tuple(each == "hash_moe" for each in kinds[:num_layers])


_PARSERS = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v4": _deepseek_v4,
}
