"""The gated feed-forward block (SwiGLU) that every token passes through."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from engine.models.projections import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """gate|up as one linear. rotation: for int8 weights only, of what goes into `down`."""

    ops: ModuleType
    gate_up: Any
    down: Any
    rotation: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] normed -> [T, hidden]."""
        gated = self.ops.silu_mul(self.ops.linear(x, self.gate_up))
        if self.rotation is not None:
            gated = self.ops.linear(gated.view(-1, self.rotation.in_features), self.rotation).view(gated.shape)
        return self.ops.linear(gated, self.down)

    @property
    def num_elements(self) -> int:
        """Products of one token."""
        return self.gate_up.num_elements + self.down.num_elements

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads."""
        return self.gate_up.nbytes + self.down.nbytes


def read_gated_mlp(
    reader: Reader, name: str, norm: torch.Tensor, inner: int, rotation: Any
) -> tuple[GatedMlp, torch.Tensor]:
    """The block, and the weights of the norm before it as they then are. inner: its width."""
    config = reader.config
    gate, up = (
        reader.projection(f"{name}.{part}_proj", inner, config.hidden_size, config.mlp_bias) for part in ("gate", "up")
    )
    gate, up, norm = reader.reading(norm, gate, up)
    down = reader.projection(f"{name}.down_proj", config.hidden_size, inner, config.mlp_bias)
    mlp = GatedMlp(
        ops=reader.ops,
        gate_up=reader.pack(gate, up),
        down=reader.pack(reader.reading_gated(down)),
        rotation=rotation,
    )
    return mlp, norm
