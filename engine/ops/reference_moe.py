"""Mixture of experts in plain torch: the specification of these operators, beside reference.py.

Names and arguments of the gating follow `npu_moe_gating_top_k` of torch_npu, as far as models need them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.ops.reference_linear import Linear, linear

_SCORES = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
}


def moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    renorm: bool = True,
    norm_type: str = "softmax",
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which k experts each token goes to, and with what weight.

    x: router logits fp32 [T, E]. norm_type turns them into scores: softmax, sigmoid or sqrtsoftplus. The k largest of
    score + bias [E] are chosen; with group_count > 1 only among the k_group groups of neighbouring experts whose two
    best score + bias add up to most. With tid2eid int32 [vocabulary, k] the experts are those at the token's id,
    input_ids int64 [T], instead. A weight is the score without bias, with `renorm` over the sum of the chosen + eps,
    times routed_scaling_factor. Among equals the choice is torch.topk's.
    Returns weights fp32 [T, k] and experts int32 [T, k], the best first.
    """
    scores = _SCORES[norm_type](x.float())
    if tid2eid is not None:
        assert input_ids is not None
        experts = tid2eid[input_ids].long()
    else:
        choice = scores if bias is None else scores + bias
        if group_count > 1:
            groups = choice.unflatten(1, (group_count, -1))
            kept = groups.topk(2, dim=-1).values.sum(-1).topk(k_group, dim=-1).indices
            dropped = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, kept, False)
            choice = groups.masked_fill(dropped.unsqueeze(-1), -math.inf).flatten(1)
        experts = choice.topk(k, dim=-1).indices
    weights = scores.gather(1, experts)
    if renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights * routed_scaling_factor, experts.int()


@dataclass(frozen=True, slots=True)
class Experts:
    """The matrices of all experts of a layer, as `pack_linear` made them."""

    gate_up: Sequence[Linear]  # [E] of [2 * I, H], gate first
    down: Sequence[Linear]  # [E] of [H, I]
    gated_rotation: Linear | None
    limit: float

    @property
    def num_elements(self) -> int:
        """Products of one row in one expert."""
        return self.gate_up[0].num_elements + self.down[0].num_elements

    def nbytes(self, experts: Sequence[int] | None = None) -> int:
        """Bytes that one pass reads when these experts are chosen; None: all."""
        indices = range(len(self.down)) if experts is None else sorted(set(experts))
        return sum(self.gate_up[e].nbytes + self.down[e].nbytes for e in indices)


def pack_experts(
    gate_up: Sequence[Linear], down: Sequence[Linear], gated_rotation: Linear | None = None, limit: float = math.inf
) -> Experts:
    """limit: gate is clamped to it from above and up both ways; gated_rotation: a matrix [n, n] that what goes into
    `down` is multiplied with, n at a time."""
    return Experts(gate_up, down, gated_rotation, limit)


def moe_experts(x: torch.Tensor, experts: Experts, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """x [T, H] -> [T, H]: sum over j of weights[t, j] * (down(silu(gate(x)) * up(x))) of expert chosen[t, j].

    weights fp32, chosen int32, both [T, k]. Tokens are sorted by expert; what experts return is in x's dtype, the sum
    over them in fp32 and in the order of `chosen`.
    """
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(experts.down)).tolist()
    rows = x[order // chosen.shape[1]]
    returned, begin = torch.empty(len(order), x.shape[1], dtype=x.dtype), 0
    for expert, count in enumerate(counts):
        if count:
            gate, up = linear(rows[begin : begin + count], experts.gate_up[expert]).chunk(2, dim=-1)
            gated = F.silu(gate.clamp(max=experts.limit)) * up.clamp(-experts.limit, experts.limit)
            if experts.gated_rotation is not None:
                turned = linear(gated.view(-1, experts.gated_rotation.in_features), experts.gated_rotation)
                gated = turned.view(gated.shape)
            returned[begin : begin + count] = linear(gated, experts.down[expert])
            begin += count
    back = torch.empty_like(returned).index_copy_(0, order, returned)
    return (back.float().unflatten(0, chosen.shape) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class LinearGroups:
    parts: Sequence[Linear]

    @property
    def num_elements(self) -> int:
        """Products of one row of every group."""
        return sum(part.num_elements for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def pack_groups(parts: Sequence[Linear]) -> LinearGroups:
    """One matrix [out, in] a group, all of one shape, without bias."""
    return LinearGroups(parts)


def grouped_linear(x: torch.Tensor, groups: LinearGroups) -> torch.Tensor:
    """x [T, G, in] -> [T, G, out]: group g of x times matrix g."""
    return torch.stack([linear(x[:, g], part) for g, part in enumerate(groups.parts)], dim=1)
