"""The feed-forward block of a mixture of experts: each token passes through the few experts that the router chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """router: a linear in fp32; bias [experts]: for the choice only; table int32 [vocabulary, experts a token]: the
    experts of each token's id, where the layer does not choose; shared: what every token passes through beside."""

    ops: ModuleType
    moe: MoeConfig
    router: Any
    bias: torch.Tensor | None
    experts: Any
    shared: GatedMlp | ClampedMlp | None
    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden] normed -> [T, hidden]. token_ids int64 [T]: for layers with a table."""
        weights, chosen = self.ops.moe_gating_top_k(
            self.ops.linear(x.float(), self.router),
            self.moe.experts_per_token,
            bias=self.bias,
            input_ids=token_ids,
            tid2eid=self.table,
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
    def num_elements(self) -> int:
        """Products of one token."""
        shared = 0 if self.shared is None else self.shared.num_elements
        return self.router.num_elements + self.moe.experts_per_token * self.experts.num_elements + shared

    @property
    def nbytes(self) -> int:
        """Bytes that a step of one token reads."""
        return self.nbytes_of(range(self.moe.experts_per_token))

    def nbytes_of(self, chosen: Sequence[int]) -> int:
        """Bytes that a step reads in which these experts are chosen, by any of its tokens."""
        shared = 0 if self.shared is None else self.shared.nbytes
        return self.router.nbytes + self.experts.nbytes(chosen) + shared


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedMlp:
    """A gated block whose gate and up are clamped as those of experts are: it is the one expert of its own layer."""

    ops: ModuleType
    expert: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] normed -> [T, hidden]."""
        return self.ops.moe_experts(x, self.expert, torch.ones(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int32))

    @property
    def num_elements(self) -> int:
        """Products of one token."""
        return self.expert.num_elements

    @property
    def nbytes(self) -> int:
        return self.expert.nbytes([0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Where a family keeps its parts, below the layer's name."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def read_expert_mlp(
    reader: Reader, layer: str, norm: torch.Tensor, names: ExpertNames = ExpertNames(), *, by_token: bool = False
) -> tuple[ExpertMlp, torch.Tensor]:
    """The block of the layer named `layer`, and the weights of the norm before it as they then are. by_token: whether
    a table says the experts of each token's id."""
    config, moe = reader.config, reader.config.moe
    assert moe is not None
    block, hidden, inner = f"{layer}.{names.block}", config.hidden_size, moe.inner_size
    # Scores that are nearly equal must not change places by rounding: fp32, as published models are served.
    router, _ = reader.reading(norm, reader.projection(f"{block}.gate", moe.num_experts, hidden, dtype=torch.float32))
    bias = table = None
    if by_token:
        shape = (config.vocab_size, moe.experts_per_token)
        table = reader.checkpoint.take_integers(f"{block}.gate.tid2eid", shape, moe.num_experts)
    elif moe.has_bias:
        bias = reader.checkpoint.take(f"{block}.gate.e_score_correction_bias", (moe.num_experts,), torch.float32)
    parts = (names.gate, names.up, names.down)
    experts = [f"{block}.experts.{index}" for index in range(moe.num_experts)]
    shared: GatedMlp | ClampedMlp | None = None
    shared_norm = reader.reading(norm)[-1]
    if moe.shared_size and moe.limit < math.inf:
        expert = _pack_experts(reader, [f"{block}.shared_experts"], norm, parts, moe.shared_size)
        shared = ClampedMlp(ops=reader.ops, expert=expert)
    elif moe.shared_size:
        rotation = reader.gated_rotation(moe.shared_size)
        shared, shared_norm = read_gated_mlp(reader, f"{block}.shared_experts", norm, moe.shared_size, rotation)
    mlp = ExpertMlp(
        ops=reader.ops,
        moe=moe,
        router=reader.ops.pack_linear(router[0], None),
        bias=bias,
        experts=_pack_experts(reader, experts, norm, parts, inner),
        shared=shared,
        table=table,
    )
    return mlp, shared_norm


def _pack_experts(
    reader: Reader, experts: Sequence[str], norm: torch.Tensor, parts: tuple[str, str, str], inner: int
) -> Any:
    """Expert by expert: beside the packed matrices only one is held. parts: names of gate, up, down."""
    hidden, moe = reader.config.hidden_size, reader.config.moe
    assert moe is not None
    gate_ups, downs = [], []
    for expert in experts:
        gate, up = (reader.projection(f"{expert}.{part}", inner, hidden) for part in parts[:2])
        gate, up, _ = reader.reading(norm, gate, up)
        gate_ups.append(reader.pack(gate, up))
        downs.append(reader.pack(reader.reading_gated(reader.projection(f"{expert}.{parts[2]}", hidden, inner))))
    return reader.ops.pack_experts(gate_ups, downs, reader.gated_rotation(inner), moe.limit)


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether the layer has experts."""
    return config.moe is not None and config.moe.sparse_layers[layer]
