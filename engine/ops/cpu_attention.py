"""The CPU backend's cache: storing K and V in it and attention over it. Shapes and meaning: reference.py."""

from __future__ import annotations

from array import array

import torch

from engine.kv_cache import KvView
from engine.ops import native
from engine.ops.cpu_tensors import check_tensor, dense_rows, dtype_code, operator

KV_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # as Dtype of kernels.h

_library = native.library()
if _library is None:
    raise ImportError("the native kernels are not built: reinstall with a C++ compiler, or use the reference backend")
_store_kv, _attention = _library.twinpool_store_kv, _library.twinpool_attention


@operator
def store_kv(k: torch.Tensor, v: torch.Tensor, view: KvView, slots: torch.Tensor) -> None:
    """Writes k, v [T, M, D] into the cache at `slots` (int64 [T]), which the caller keeps within it."""
    code, tokens = dtype_code(k, "k"), k.shape[0]
    shape = (tokens, view.k.shape[1], view.k.shape[3])
    check_tensor(k, "k", shape, k.dtype)
    check_tensor(v, "v", shape, k.dtype)
    check_tensor(slots, "slots", (tokens,), torch.int64)
    k, v, slots = dense_rows(k), dense_rows(v), slots.contiguous()
    _store_kv(
        *(cache_args(view), code, k.data_ptr(), k.stride(0) * k.itemsize, k.stride(1) * k.itemsize),
        *(v.data_ptr(), v.stride(0) * v.itemsize, v.stride(1) * v.itemsize, slots.data_ptr(), tokens),
    )


@operator
def prefill_attention(
    q: torch.Tensor,
    view: KvView,
    block_tables: torch.Tensor,
    query_start: list[int],
    context_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """Causal attention of packed queries q [T, N, D] over the paged cache -> [T, N * D]."""
    code, num_sequences = dtype_code(q, "q"), len(context_lens)
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
    q, block_tables = dense_rows(q), dense_rows(block_tables)
    starts, lengths = array("i", query_start), array("i", context_lens)
    out = torch.empty(tokens, num_heads * head_dim, dtype=q.dtype)
    _attention(
        *(cache_args(view), code, q.data_ptr(), q.stride(0) * q.itemsize, q.stride(1) * q.itemsize, num_heads),
        *(block_tables.data_ptr(), block_tables.stride(0) * 4, num_sequences),
        *(starts.buffer_info()[0], lengths.buffer_info()[0], scale, out.data_ptr()),
    )
    return out


@operator
def decode_attention(
    q: torch.Tensor, view: KvView, block_tables: torch.Tensor, context_lens: list[int], scale: float
) -> torch.Tensor:
    """Attention of one query a sequence, q [S, N, D] -> [S, N * D]: the bits that prefill_attention gives."""
    return prefill_attention(q, view, block_tables, list(range(len(context_lens) + 1)), context_lens, scale)


def cache_args(view: KvView) -> native.KvCacheArgs:
    k, v, k_scale, v_scale = view.k, view.v, view.k_scale, view.v_scale
    dtype = KV_CODES.get(k.dtype)
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
