"""The feed-forward block of a mixture of experts: each token passes through the few experts that the router chooses."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from engine.model_config import ModelConfig
from engine.models.gated_mlp import GatedMlp, read_gated_mlp
from engine.models.projections import Reader
from engine.moe_config import MoeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMlp:
    """router: a linear in fp32; bias [experts]: for the choice only; shared: what every token passes through beside."""

    ops: ModuleType
    moe: MoeConfig
    router: Any
    bias: torch.Tensor | None
    experts: Any
    shared: GatedMlp | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] normed -> [T, hidden]."""
        weights, chosen = self.ops.moe_gating_top_k(
            self.ops.linear(x.float(), self.router),
            self.moe.experts_per_token,
            bias=self.bias,
            k_group=self.moe.groups_kept,
            group_count=self.moe.num_groups,
            renorm=self.moe.renormalize,
            norm_type=self.moe.scoring,
            routed_scaling_factor=self.moe.scaling,
            eps=self.moe.eps,
        )
        out = self.ops.moe_experts(x, self.experts, weights, chosen)
        return out if self.shared is None else out + self.shared.forward(x)

    @property
    def nbytes(self) -> int:
        """Bytes that a step of one token reads."""
        active = self.experts.nbytes(range(self.moe.experts_per_token))
        return self.router.nbytes + active + (0 if self.shared is None else self.shared.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Where a family keeps its parts, below the layer's name."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def read_expert_mlp(
    reader: Reader, layer: str, norm: torch.Tensor, names: ExpertNames = ExpertNames()
) -> tuple[ExpertMlp, torch.Tensor]:
    """The block of the layer named `layer`, and the weights of the norm before it as they then are."""
    config, moe = reader.config, reader.config.moe
    assert moe is not None
    block, hidden, inner = f"{layer}.{names.block}", config.hidden_size, moe.inner_size
    # Scores that are nearly equal must not change places by rounding: fp32, as published models are served.
    router, _ = reader.reading(norm, reader.projection(f"{block}.gate", moe.num_experts, hidden, dtype=torch.float32))
    bias = None
    if moe.has_bias:
        bias = reader.checkpoint.take(f"{block}.gate.e_score_correction_bias", (moe.num_experts,), torch.float32)
    gate_ups, downs = [], []
    for index in range(moe.num_experts):
        expert = f"{block}.experts.{index}"
        gate, up = (reader.projection(f"{expert}.{name}", inner, hidden) for name in (names.gate, names.up))
        gate, up, _ = reader.reading(norm, gate, up)
        gate_ups.append(reader.pack(gate, up))
        downs.append(reader.pack(reader.reading_gated(reader.projection(f"{expert}.{names.down}", hidden, inner))))
    shared, shared_norm = None, reader.reading(norm)[-1]
    if moe.shared_size:
        rotation = reader.gated_rotation(moe.shared_size)
        shared, shared_norm = read_gated_mlp(reader, f"{block}.shared_experts", norm, moe.shared_size, rotation)
    mlp = ExpertMlp(
        ops=reader.ops,
        moe=moe,
        router=reader.ops.pack_linear(router[0], None),
        bias=bias,
        experts=reader.ops.pack_experts(gate_ups, downs, reader.gated_rotation(inner)),
        shared=shared,
    )
    return mlp, shared_norm


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether the layer has experts."""
    return config.moe is not None and config.moe.sparse_layers[layer]
