"""The CPU backend's mixture of experts: native kernels (csrc/moe.inl, csrc/moe.cpp). Meaning: reference.py.

As with the other operators an output row is the same bits whatever other rows are in the call.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from engine.ops import native
from engine.ops.cpu_tensors import operator
from engine.quantization import W8A8

if TYPE_CHECKING:
    from engine.ops.cpu import Linear

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_MOST_GROUPS = 256

_library = native.library()
if _library is None:
    raise ImportError("the native kernels are not built: reinstall with a C++ compiler, or use the reference backend")
_gating, _experts, _grouped = (
    _library.twinpool_gating,
    _library.twinpool_moe_experts,
    _library.twinpool_grouped_linear,
)


@cache
def _checked(
    num_experts: int,
    k: int,
    k_group: int,
    group_count: int,
    renorm: bool,
    norm_type: str,
    routed_scaling_factor: float,
    eps: float,
) -> Any:
    """What a layer's gating always is: checked once, for at one row Python's checks cost more than the choice."""
    if not 1 <= k <= num_experts:
        raise ValueError(f"k is {k}: it must be 1 to the number of experts, {num_experts}")
    if norm_type not in SCORES:
        raise ValueError(f"norm_type must be one of {', '.join(SCORES)}, not {norm_type!r}")
    if num_experts % group_count or not 1 <= k_group <= group_count <= _MOST_GROUPS:
        raise ValueError(f"{num_experts} experts cannot be {group_count} groups of which {k_group} are kept")
    if group_count > 1 and num_experts < 2 * group_count:
        raise ValueError(f"a group of {num_experts // group_count} has no two best experts")
    score, scale = SCORES.index(norm_type), routed_scaling_factor
    return ctypes.pointer(native.Gating(score, renorm, num_experts, k, group_count, k_group, scale, eps))


@operator
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
    """x: router logits fp32 [T, E] -> weights fp32 [T, k], experts int32 [T, k]. One pass over each row."""
    rows, num_experts = x.shape
    row_stride, stride = x.stride()
    if x.dtype is not torch.float32 or stride != 1 or not x.is_cpu:
        raise TypeError(f"x must be float32 [T, E] on the CPU with dense rows, not {x.dtype} on {x.device}")
    gating = _checked(num_experts, k, k_group, group_count, renorm, norm_type, routed_scaling_factor, eps)
    bias_at = tokens_at = table_at = None
    if bias is not None:
        _check(bias, "bias", (num_experts,), torch.float32)
        bias_at = bias.data_ptr()
    if tid2eid is not None:
        if input_ids is None:
            raise ValueError("tid2eid needs input_ids")
        _check(input_ids, "input_ids", (rows,), torch.int64)
        _check(tid2eid, "tid2eid", (tid2eid.shape[0], k), torch.int32)
        tokens_at, table_at = input_ids.data_ptr(), tid2eid.data_ptr()
    weights = torch.empty(rows, k)
    experts = torch.empty(rows, k, dtype=torch.int32)
    at, step = x.data_ptr(), 4 * row_stride
    _gating(gating, at, step, rows, bias_at, tokens_at, table_at, weights.data_ptr(), experts.data_ptr())
    return weights, experts


@dataclass(frozen=True, slots=True)
class Experts:
    """The packed matrices of all experts of a layer; args points into them."""

    gate_up: Sequence[Linear]  # [E] of [2 * I, H], gate first
    down: Sequence[Linear]  # [E] of [H, I]
    gated_rotation: Linear | None
    limit: float  # what gate and up are clamped to
    args: native.ExpertsArgs = field(init=False)

    def __post_init__(self) -> None:
        rotation = None if self.gated_rotation is None else ctypes.pointer(self.gated_rotation.args)
        args = native.ExpertsArgs(len(self.down), _array(self.gate_up), _array(self.down), rotation, self.limit)
        object.__setattr__(self, "args", args)

    @property
    def num_elements(self) -> int:
        """Products of one row in one expert."""
        return self.gate_up[0].num_elements + self.down[0].num_elements

    def nbytes(self, experts: Sequence[int] | None = None) -> int:
        """Bytes that one pass reads when these experts are chosen; None: all."""
        indices = range(len(self.down)) if experts is None else sorted(set(experts))
        return sum(self.gate_up[e].nbytes + self.down[e].nbytes for e in indices)


@operator
def pack_experts(
    gate_up: Sequence[Linear], down: Sequence[Linear], gated_rotation: Linear | None = None, limit: float = math.inf
) -> Experts:
    """Of matrices that `pack_linear` packed, all of one format. limit: what gate and up are clamped to."""
    hidden, inner = gate_up[0].in_features, down[0].in_features
    if hidden % 4 or inner % 4:
        raise ValueError(f"experts of {hidden} -> {inner} do not fill whole words: both must be multiples of 4")
    for kind, name, shape in ((gate_up, "gate_up", (2 * inner, hidden)), (down, "down", (hidden, inner))):
        if len(kind) != len(down):
            raise ValueError(f"{len(gate_up)} gate_up matrices, {len(down)} down matrices")
        for e, each in enumerate(kind):
            if (each.out_features, each.in_features) != shape or each.args.format != gate_up[0].args.format:
                raise ValueError(f"{name} of expert {e} is [{each.out_features}, {each.in_features}], not {shape}")
    return Experts(gate_up, down, gated_rotation, limit)


@operator
def moe_experts(x: torch.Tensor, experts: Experts, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """x [T, H], weights fp32 [T, k], chosen int32 [T, k] -> [T, H]."""
    rows, (hidden, dtype) = len(x), (experts.gate_up[0].in_features, experts.gate_up[0].dtype)
    if x.dtype != dtype or not x.is_cpu or x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"x must be {dtype} [T, {hidden}] on the CPU, not {x.dtype} {list(x.shape)} on {x.device}")
    if x.stride(1) != 1:
        x = x.contiguous()
    _check(weights, "weights", (rows, chosen.shape[1]), torch.float32)
    _check(chosen, "chosen", tuple(weights.shape), torch.int32)
    out = torch.empty(rows, hidden, dtype=dtype)
    _experts(
        *(experts.args, x.data_ptr(), x.stride(0) * x.itemsize, rows, chosen.shape[1]),
        *(weights.data_ptr(), chosen.data_ptr(), out.data_ptr()),
    )
    return out


@dataclass(frozen=True, slots=True)
class LinearGroups:
    """One matrix a group, all of one shape, without bias."""

    parts: Sequence[Linear]
    args: ctypes.Array[native.PackedLinear] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", _array(self.parts))

    @property
    def num_elements(self) -> int:
        """Products of one row of every group."""
        return sum(part.num_elements for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@operator
def pack_groups(parts: Sequence[Linear]) -> LinearGroups:
    first = parts[0]
    for part in parts:
        if (part.in_features, part.out_features) != (first.in_features, first.out_features):
            raise ValueError("the matrices of all groups must have one shape, no bias and no w8a8")
        if part.bias is not None or part.format == W8A8:
            raise ValueError("the matrices of all groups must have one shape, no bias and no w8a8")
    if first.in_features % 4:
        raise ValueError(f"groups of {first.in_features} inputs do not fill whole words: take a multiple of 4")
    return LinearGroups(parts)


@operator
def grouped_linear(x: torch.Tensor, groups: LinearGroups) -> torch.Tensor:
    """x [T, G, in] -> [T, G, out], strided: each group's rows lie together."""
    first, num_groups = groups.parts[0], len(groups.parts)
    if x.dtype != first.dtype or x.dim() != 3 or x.shape[1:] != (num_groups, first.in_features):
        raise ValueError(f"x must be {first.dtype} [T, {num_groups}, {first.in_features}], not {list(x.shape)}")
    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty(num_groups, len(x), first.out_features, dtype=x.dtype)
    strides = (x.stride(1) * x.itemsize, x.stride(0) * x.itemsize)
    _grouped(groups.args, num_groups, x.data_ptr(), *strides, len(x), out.data_ptr())
    return out.transpose(0, 1)


def _array(parts: Sequence[Linear]) -> ctypes.Array[native.PackedLinear]:
    array = (native.PackedLinear * len(parts))()
    for to, part in zip(array, parts, strict=True):
        ctypes.memmove(ctypes.byref(to), ctypes.byref(part.args), ctypes.sizeof(native.PackedLinear))
    return array


def _check(x: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"{name} must be contiguous {dtype} {list(shape)} on the CPU, not {x.dtype} {list(x.shape)}")
