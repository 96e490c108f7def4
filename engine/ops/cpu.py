"""The CPU backend: native kernels (csrc/) on raw pointers. Shapes and meaning of every function: reference.py.

What the kernels promise beyond the reference: an output row of `linear`, of the norms and of attention is the same
bits whatever other rows are in the call, however a prompt is cut into chunks, with any number of threads (which may
share one sequence's context), and `decode_attention` gives what `prefill_attention` gives for that query. Arguments
that do not fit raise TypeError or ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from engine.ops import native
from engine.ops.cpu_attention import decode_attention, prefill_attention, store_kv
from engine.ops.cpu_compressed import (
    as_stored,
    gather_items,
    hc_head,
    hc_post,
    hc_pre,
    lightning_indexer,
    pool_windows,
    sparse_attn_sharedkv,
)
from engine.ops.cpu_decoder import Decoder, can_decode
from engine.ops.cpu_latent import gather_latents, latent_attention, store_latents
from engine.ops.cpu_moe import (
    Experts,
    LinearGroups,
    grouped_linear,
    moe_experts,
    moe_gating_top_k,
    pack_experts,
    pack_groups,
)
from engine.ops.cpu_pages import LargePages
from engine.ops.cpu_sampling import OutputLayer
from engine.ops.cpu_tensors import CODES, check_tensor, dense_rows, dtype_code, operator
from engine.quantization import AS_LOADED, W8A8, WEIGHT_FORMATS, quantize_rows

if TYPE_CHECKING:
    from engine.model_config import ModelConfig
    from engine.models.decoder import Layer
    from engine.rope import Rotary

__all__ = [
    "Experts",
    "Linear",
    "LinearGroups",
    "OutputLayer",
    "add_rms_norm",
    "as_stored",
    "decode_attention",
    "decoder",
    "gather_items",
    "gather_latents",
    "grouped_linear",
    "hc_head",
    "hc_post",
    "hc_pre",
    "latent_attention",
    "lightning_indexer",
    "linear",
    "moe_experts",
    "moe_gating_top_k",
    "pack_experts",
    "pack_groups",
    "pack_linear",
    "pool_windows",
    "prefill_attention",
    "rms_norm",
    "rope",
    "set_num_threads",
    "silu_mul",
    "sparse_attn_sharedkv",
    "store_kv",
    "store_latents",
]

NAME = "cpu"
DEVICE = "cpu"  # torch's name of what it computes on
SHARES_WEIGHTS = True  # packed tensors are only read, and may lie in memory shared with other processes

_library = native.library()
if _library is None:
    raise ImportError("the native kernels are not built: reinstall with a C++ compiler, or use the reference backend")
_linear, _rms_norm, _rope = _library.twinpool_linear, _library.twinpool_rms_norm, _library.twinpool_rope
_silu_mul = _library.twinpool_silu_mul
_set_num_threads = _library.twinpool_set_num_threads
_PANEL = _library.twinpool_panel()  # output features side by side in packed weights
_MOST_EXACT_INPUTS = (2**31 - 1) // (127 * 255)  # products of int8 and of int8 plus 128 that int32 surely holds


_WEIGHT_MEMORY = LargePages()


def set_num_threads(count: int) -> None:
    """Number of threads, the caller's included, that one operator may use (default 1). Results do not depend on it.

    torch gets one: what is left to it is small, and its pool would fight with this one for the same cores.
    """
    if count < 1:
        raise ValueError(f"the number of threads must be at least 1, not {count}")
    torch.set_num_threads(1)
    _set_num_threads(count)


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight in panels of _PANEL output features, interleaved so that a panel is read front to back (kernels.h).

    args points into the tensors, which it does not own.
    """

    format: str  # one of WEIGHT_FORMATS
    panels: torch.Tensor  # uint8
    scales: torch.Tensor | None  # fp32, int8 formats only
    column_sums: torch.Tensor | None  # int32, int8 formats only
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    dtype: torch.dtype  # of activations
    args: native.PackedLinear = field(init=False)

    def __post_init__(self) -> None:
        if self.format == W8A8 and self.in_features > _MOST_EXACT_INPUTS:
            raise ValueError(
                f"w8a8 sums are exact up to {_MOST_EXACT_INPUTS} inputs, the weight has {self.in_features}"
            )
        pointers = (None if x is None else x.data_ptr() for x in (self.scales, self.column_sums, self.bias))
        args = native.PackedLinear(
            *(WEIGHT_FORMATS.index(self.format), CODES[self.dtype], self.panels.shape[1]),
            *(self.in_features, self.out_features, self.panels.data_ptr(), *pointers),
        )
        object.__setattr__(self, "args", args)

    @property
    def num_elements(self) -> int:
        """Products of one row."""
        return self.in_features * self.out_features

    @property
    def nbytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return sum(x.nbytes for x in (self.panels, self.scales, self.column_sums, self.bias) if x is not None)

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] as the kernels read it: dense rows, which w8a8 makes whole words itself."""
        if self.in_features % 4 and self.format != W8A8:
            x = F.pad(x, (0, -self.in_features % 4))  # to whole words of every format
        return dense_rows(x)


@operator
def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, weights: str = AS_LOADED) -> Linear:
    """Packs weight [out, in] and bias [out], both bf16 or both fp32, in one of WEIGHT_FORMATS."""
    dtype_code(weight, "weight")
    if weight.dim() != 2:
        raise ValueError(f"weight must be [out, in], not {list(weight.shape)}")
    if weights not in WEIGHT_FORMATS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHT_FORMATS)}, not {weights!r}")
    dtype, (out_features, in_features) = weight.dtype, weight.shape
    if bias is not None:
        check_tensor(bias, "bias", (out_features,), dtype)
        bias = bias.contiguous()
    scales = column_sums = None
    if weights != AS_LOADED:  # all of either int8 format is packed, so that workers of both can share it
        weight, scales = quantize_rows(weight)
        scales = F.pad(scales, (0, -out_features % _PANEL))
        column_sums = F.pad(weight.sum(1, dtype=torch.int32), (0, -out_features % _PANEL))
    return Linear(weights, _panels(weight), scales, column_sums, bias, in_features, out_features, dtype)


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """[panels, steps, _PANEL * 4] uint8 of a weight [out, in]; a word holds neighbours along `in`."""
    per_word = 4 // weight.dtype.itemsize
    padded = F.pad(weight, (0, -weight.shape[1] % per_word, 0, -weight.shape[0] % _PANEL))
    panels = padded.view(-1, _PANEL, padded.shape[1] // per_word, per_word).transpose(1, 2)
    packed = _WEIGHT_MEMORY.take(panels.numel() * panels.itemsize)
    packed.view(panels.dtype).view(panels.shape).copy_(panels)
    return packed.view(panels.shape[0], panels.shape[1], -1)


@operator
def linear(x: torch.Tensor, packed: Linear) -> torch.Tensor:
    """x [T, in] -> [T, out]. T may be 0; rows may be strided."""
    dtype_code(x, "x")
    if x.dtype != packed.dtype:
        raise TypeError(f"x is {x.dtype}, the packed weight {packed.dtype}")
    if x.dim() != 2 or x.shape[1] != packed.in_features:
        raise ValueError(f"x must be [T, {packed.in_features}], not {list(x.shape)}")
    x = packed.inputs(x)
    out = torch.empty(x.shape[0], packed.out_features, dtype=x.dtype)
    _linear(packed.args, x.data_ptr(), x.stride(0) * x.itemsize, x.shape[0], out.data_ptr())
    return out


@operator
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H] -> [..., H]."""
    if weight.dtype == torch.float32 != x.dtype:  # rounded once, at the end
        return rms_norm(x.float(), weight, eps).to(x.dtype)
    code, width = dtype_code(x, "x"), x.shape[-1]
    check_tensor(weight, "weight", (width,), x.dtype)
    flat = dense_rows(x if x.dim() == 2 else x.reshape(-1, width))
    out = torch.empty(x.shape, dtype=x.dtype)
    stride = flat.stride(0) * x.itemsize
    weight = weight.contiguous()
    _rms_norm(
        *(code, flat.data_ptr(), stride, flat.shape[0], width, None, 0, weight.data_ptr(), eps, out.data_ptr()),
    )
    return out


@operator
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, H]. The sum is written into `residual`."""
    code, width = dtype_code(x, "x"), x.shape[-1]
    check_tensor(residual, "residual", tuple(x.shape), x.dtype)
    check_tensor(weight, "weight", (width,), x.dtype)
    if x.dim() != 2:
        raise ValueError(f"x must be [T, H], not {list(x.shape)}")
    x, residual, weight = dense_rows(x), dense_rows(residual), weight.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    _rms_norm(
        *(code, x.data_ptr(), x.stride(0) * x.itemsize, x.shape[0], width),
        *(residual.data_ptr(), residual.stride(0) * x.itemsize, weight.data_ptr(), eps, out.data_ptr()),
    )
    return out, residual


@operator
def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, N, D], k [T, M, D], cos and sin [T, D/2] fp32 -> new q, k."""
    tokens, _, head_dim = q.shape
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, not {head_dim}")
    check_tensor(cos, "cos", (tokens, head_dim // 2), torch.float32)
    check_tensor(sin, "sin", (tokens, head_dim // 2), torch.float32)
    check_tensor(k, "k", (tokens, k.shape[1], head_dim), q.dtype)
    cos, sin = cos.contiguous(), sin.contiguous()
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    code = dtype_code(x, "q and k")
    x = dense_rows(x)
    tokens, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype)
    _rope(
        *(code, x.data_ptr(), x.stride(0) * x.itemsize, x.stride(1) * x.itemsize, tokens, num_heads, head_dim),
        *(cos.data_ptr(), sin.data_ptr(), out.data_ptr()),
    )
    return out


@operator
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I] -> silu(gate) * up [T, I]."""
    code = dtype_code(gate_up, "gate_up")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [T, 2 * I], not {list(gate_up.shape)}")
    gate_up = dense_rows(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)
    _silu_mul(code, gate_up.data_ptr(), gate_up.stride(0) * gate_up.itemsize, rows, width, out.data_ptr())
    return out


def decoder(
    config: ModelConfig,
    layers: Sequence[Layer],
    final_norm: torch.Tensor,
    views: Sequence[Any],
    embedding: torch.Tensor,
    rotary: Rotary,
) -> Decoder | None:
    """All layers of a model over one cache as one call, or None where its sizes are none that fill whole words."""
    return Decoder(config, layers, final_norm, views, embedding, rotary) if can_decode(config, layers) else None
