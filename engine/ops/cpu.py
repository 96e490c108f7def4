"""The CPU backend: native kernels (csrc/) on raw pointers. Shapes and meaning of every function: reference.py.

What the kernels promise beyond the reference: an output row of `linear`, of the norms and of attention is the same
bits whatever other rows are in the call, however a prompt is cut into chunks, with any number of threads, and
`decode_attention` gives what `prefill_attention` gives for that query. Arguments that do not fit raise TypeError or
ValueError.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.kv_cache import KvView
from engine.ops import native
from engine.ops.cpu_decoder import Decoder
from engine.ops.cpu_moe import (
    Experts,
    LinearGroups,
    grouped_linear,
    moe_experts,
    moe_gating_top_k,
    pack_experts,
    pack_groups,
)
from engine.quantization import AS_LOADED, W8A8, WEIGHT_FORMATS, quantize_rows

if TYPE_CHECKING:
    from engine.model_config import ModelConfig
    from engine.models.decoder import Layer

__all__ = [
    "Experts",
    "Linear",
    "LinearGroups",
    "add_rms_norm",
    "decode_attention",
    "decoder",
    "grouped_linear",
    "linear",
    "moe_experts",
    "moe_gating_top_k",
    "pack_experts",
    "pack_groups",
    "pack_linear",
    "prefill_attention",
    "rms_norm",
    "rope",
    "set_num_threads",
    "silu_mul",
    "store_kv",
]

NAME = "cpu"

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_KV_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}

_library = native.library()
if _library is None:
    raise ImportError("the native kernels are not built: reinstall with a C++ compiler, or use the reference backend")
_linear, _rms_norm, _rope = _library.twinpool_linear, _library.twinpool_rms_norm, _library.twinpool_rope
_silu_mul, _store_kv, _attention = _library.twinpool_silu_mul, _library.twinpool_store_kv, _library.twinpool_attention
_set_num_threads = _library.twinpool_set_num_threads
_PANEL = _library.twinpool_panel()  # output features side by side in packed weights
_MOST_EXACT_INPUTS = (2**31 - 1) // (127 * 255)  # products of int8 and of int8 plus 128 that int32 surely holds


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

    args: native.PackedLinear
    panels: torch.Tensor  # uint8
    scales: torch.Tensor | None  # fp32, int8 formats only
    column_sums: torch.Tensor | None  # int32, w8a8 only
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    dtype: torch.dtype  # of activations

    @property
    def nbytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return sum(x.nbytes for x in (self.panels, self.scales, self.column_sums, self.bias) if x is not None)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, weights: str = AS_LOADED) -> Linear:
    """Packs weight [out, in] and bias [out], both bf16 or both fp32, in one of WEIGHT_FORMATS."""
    code = _code(weight, "weight")
    if weight.dim() != 2:
        raise ValueError(f"weight must be [out, in], not {list(weight.shape)}")
    if weights not in WEIGHT_FORMATS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHT_FORMATS)}, not {weights!r}")
    dtype, (out_features, in_features) = weight.dtype, weight.shape
    if bias is not None:
        _check(bias, "bias", (out_features,), dtype)
        bias = bias.contiguous()
    scales = column_sums = None
    if weights != AS_LOADED:
        weight, scales = quantize_rows(weight)
        scales = F.pad(scales, (0, -out_features % _PANEL))
    if weights == W8A8:
        if in_features > _MOST_EXACT_INPUTS:
            raise ValueError(f"w8a8 sums are exact up to {_MOST_EXACT_INPUTS} inputs, the weight has {in_features}")
        column_sums = F.pad(weight.sum(1, dtype=torch.int32), (0, -out_features % _PANEL))
    panels = _panels(weight)
    args = native.PackedLinear(
        *(WEIGHT_FORMATS.index(weights), code, panels.shape[1], in_features, out_features, panels.data_ptr()),
        *(None if x is None else x.data_ptr() for x in (scales, column_sums, bias)),
    )
    return Linear(args, panels, scales, column_sums, bias, in_features, out_features, dtype)


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """[panels, steps, _PANEL * 4] uint8 of a weight [out, in]; a word holds neighbours along `in`."""
    per_word = 4 // weight.dtype.itemsize
    padded = F.pad(weight, (0, -weight.shape[1] % per_word, 0, -weight.shape[0] % _PANEL))
    panels = padded.view(-1, _PANEL, padded.shape[1] // per_word, per_word).transpose(1, 2).contiguous()
    return panels.view(torch.uint8).flatten(2)


def linear(x: torch.Tensor, packed: Linear) -> torch.Tensor:
    """x [T, in] -> [T, out]. T may be 0; rows may be strided."""
    _code(x, "x")
    if x.dtype != packed.dtype:
        raise TypeError(f"x is {x.dtype}, the packed weight {packed.dtype}")
    if x.dim() != 2 or x.shape[1] != packed.in_features:
        raise ValueError(f"x must be [T, {packed.in_features}], not {list(x.shape)}")
    if packed.in_features % 4 and packed.column_sums is None:
        x = F.pad(x, (0, -packed.in_features % 4))  # to whole words of every format
    x = _rows(x)
    out = torch.empty(x.shape[0], packed.out_features, dtype=x.dtype)
    _linear(packed.args, x.data_ptr(), x.stride(0) * x.itemsize, x.shape[0], out.data_ptr())
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H] -> [..., H]."""
    code, width = _code(x, "x"), x.shape[-1]
    _check(weight, "weight", (width,), x.dtype)
    flat = _rows(x if x.dim() == 2 else x.reshape(-1, width))
    out = torch.empty(x.shape, dtype=x.dtype)
    stride = flat.stride(0) * x.itemsize
    weight = weight.contiguous()
    _rms_norm(
        *(code, flat.data_ptr(), stride, flat.shape[0], width, None, 0, weight.data_ptr(), eps, out.data_ptr()),
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, H]. The sum is written into `residual`."""
    code, width = _code(x, "x"), x.shape[-1]
    _check(residual, "residual", tuple(x.shape), x.dtype)
    _check(weight, "weight", (width,), x.dtype)
    if x.dim() != 2:
        raise ValueError(f"x must be [T, H], not {list(x.shape)}")
    x, residual, weight = _rows(x), _rows(residual), weight.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    _rms_norm(
        *(code, x.data_ptr(), x.stride(0) * x.itemsize, x.shape[0], width),
        *(residual.data_ptr(), residual.stride(0) * x.itemsize, weight.data_ptr(), eps, out.data_ptr()),
    )
    return out, residual


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, N, D], k [T, M, D], cos and sin [T, D/2] fp32 -> new q, k."""
    tokens, _, head_dim = q.shape
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, not {head_dim}")
    _check(cos, "cos", (tokens, head_dim // 2), torch.float32)
    _check(sin, "sin", (tokens, head_dim // 2), torch.float32)
    _check(k, "k", (tokens, k.shape[1], head_dim), q.dtype)
    cos, sin = cos.contiguous(), sin.contiguous()
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    code = _code(x, "q and k")
    x = _rows(x)
    tokens, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype)
    _rope(
        *(code, x.data_ptr(), x.stride(0) * x.itemsize, x.stride(1) * x.itemsize, tokens, num_heads, head_dim),
        *(cos.data_ptr(), sin.data_ptr(), out.data_ptr()),
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I] -> silu(gate) * up [T, I]."""
    code = _code(gate_up, "gate_up")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [T, 2 * I], not {list(gate_up.shape)}")
    gate_up = _rows(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)
    _silu_mul(code, gate_up.data_ptr(), gate_up.stride(0) * gate_up.itemsize, rows, width, out.data_ptr())
    return out


def store_kv(k: torch.Tensor, v: torch.Tensor, view: KvView, slots: torch.Tensor) -> None:
    """Writes k, v [T, M, D] into the cache at `slots` (int64 [T]), which the caller keeps within it."""
    code, tokens = _code(k, "k"), k.shape[0]
    shape = (tokens, view.k.shape[1], view.k.shape[3])
    _check(k, "k", shape, k.dtype)
    _check(v, "v", shape, k.dtype)
    _check(slots, "slots", (tokens,), torch.int64)
    k, v, slots = _rows(k), _rows(v), slots.contiguous()
    _store_kv(
        *(_cache_args(view), code, k.data_ptr(), k.stride(0) * k.itemsize, k.stride(1) * k.itemsize),
        *(v.data_ptr(), v.stride(0) * v.itemsize, v.stride(1) * v.itemsize, slots.data_ptr(), tokens),
    )


def prefill_attention(
    q: torch.Tensor,
    view: KvView,
    block_tables: torch.Tensor,
    query_start: list[int],
    context_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """Causal attention of packed queries q [T, N, D] over the paged cache -> [T, N * D]."""
    code, num_sequences = _code(q, "q"), len(context_lens)
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = view.k.shape[1]
    if num_heads % num_kv_heads or head_dim != view.k.shape[3]:
        raise ValueError(
            f"q is [T, {num_heads}, {head_dim}]; the cache has {num_kv_heads} KV heads of {view.k.shape[3]}"
        )
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, not {head_dim}")
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or block_tables.shape[0] != num_sequences:
        got = f"{block_tables.dtype} {list(block_tables.shape)}"
        raise ValueError(f"block_tables must be int32 [{num_sequences}, max_blocks], not {got}")
    if len(query_start) != num_sequences + 1 or query_start[0] != 0 or query_start[-1] != tokens:
        raise ValueError(f"query_start must run from 0 to {tokens} in {num_sequences + 1} numbers, not {query_start}")
    if context_lens and max(context_lens) > block_tables.shape[1] * view.block_size:
        raise ValueError(f"a context of {max(context_lens)} tokens does not fit in {block_tables.shape[1]} blocks")
    q, block_tables = _rows(q), _rows(block_tables)
    starts, lengths = array("i", query_start), array("i", context_lens)
    out = torch.empty(tokens, num_heads * head_dim, dtype=q.dtype)
    _attention(
        *(_cache_args(view), code, q.data_ptr(), q.stride(0) * q.itemsize, q.stride(1) * q.itemsize, num_heads),
        *(block_tables.data_ptr(), block_tables.stride(0) * 4, num_sequences),
        *(starts.buffer_info()[0], lengths.buffer_info()[0], scale, out.data_ptr()),
    )
    return out


def decode_attention(
    q: torch.Tensor, view: KvView, block_tables: torch.Tensor, context_lens: list[int], scale: float
) -> torch.Tensor:
    """Attention of one query a sequence, q [S, N, D] -> [S, N * D]: the bits that prefill_attention gives."""
    return prefill_attention(q, view, block_tables, list(range(len(context_lens) + 1)), context_lens, scale)


def decoder(
    config: ModelConfig,
    layers: Sequence[Layer],
    final_norm: torch.Tensor,
    rotations: Sequence[Linear] | None,
    gated_rotation: Linear | None,
    views: Sequence[KvView],
) -> Decoder | None:
    """All layers of a model over one cache as one call, or None where its sizes are none that fill whole words."""
    sizes = [config.hidden_size, config.intermediate_size, config.head_dim]
    sizes += [] if gated_rotation is None else [gated_rotation.in_features]
    if any(size % 4 for size in sizes) or any(view.k.shape[0] < 1 for view in views):
        return None
    code = _code(final_norm, "final_norm")
    return Decoder(config, layers, final_norm, rotations, gated_rotation, views, _cache_args, code)


def _code(x: torch.Tensor, name: str) -> int:
    code = _DTYPES.get(x.dtype)
    if code is None or not x.is_cpu:
        raise TypeError(f"{name} must be bfloat16 or float32 on the CPU, not {x.dtype} on {x.device}")
    return code


def _check(x: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.dtype != dtype or not x.is_cpu:
        raise TypeError(f"{name} must be {dtype} on the CPU, not {x.dtype} on {x.device}")
    if x.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, not {list(x.shape)}")


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x itself if its last axis is dense, as the kernels want it, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _cache_args(view: KvView) -> native.KvCacheArgs:
    k, v, k_scale, v_scale = view.k, view.v, view.k_scale, view.v_scale
    dtype = _KV_DTYPES.get(k.dtype)
    if dtype is None or v.dtype != k.dtype or (dtype == 2) != (k_scale is not None and v_scale is not None):
        raise TypeError(f"the cache must be int8 with scales, bfloat16 or float32, not {k.dtype} and {v.dtype}")
    num_rows, num_kv_heads, block_size, head_dim = k.shape
    row_bytes = k.stride(0) * k.itemsize
    dense = (block_size * head_dim, head_dim, 1)
    for plane in (k, v) if k_scale is None or v_scale is None else (k, v, k_scale, v_scale):
        dims = plane.dim()
        if plane.shape != k.shape[:dims] or plane.stride()[1:] != (dense if dims == 4 else (block_size, 1)):
            raise ValueError("the planes of a cache row must have one shape and be contiguous")
        if num_rows > 1 and plane.stride(0) * plane.itemsize != row_bytes:
            raise ValueError("the rows of all planes of a cache must be equally far apart")
    return native.KvCacheArgs(
        *(dtype, k.data_ptr(), v.data_ptr(), None if k_scale is None else k_scale.data_ptr()),
        *(None if v_scale is None else v_scale.data_ptr(), row_bytes, num_kv_heads, block_size, head_dim),
    )
