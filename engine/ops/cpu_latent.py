"""The CPU backend's latent attention. Shapes and meaning: reference_latent.py.

Over bf16 and fp32 caches it is the attention kernel with one KV head, latents being keys and values; over int8 ones a
kernel of its own (csrc/latent.inl).
"""

from __future__ import annotations

from array import array

import torch

from engine.kv_cache import KvView
from engine.latent_cache import LatentView
from engine.ops import native
from engine.ops.cpu_attention import KV_CODES, prefill_attention
from engine.ops.cpu_tensors import check_tensor, dense_rows, dtype_code, operator
from engine.ops.reference_latent import gather_latents

__all__ = ["entry_args", "gather_latents", "latent_attention", "store_latents"]

HEADS_AT_ONCE = 64  # enough to make unpacking a tile cheap, few enough for several threads to share one token's

_library = native.library()
if _library is None:
    raise ImportError("the native kernels are not built: reinstall with a C++ compiler, or use the reference backend")
_latent_attention, _store_latents = _library.twinpool_latent_attention, _library.twinpool_store_latents


@operator
def store_latents(latents: torch.Tensor, rope: torch.Tensor, view: LatentView, slots: torch.Tensor) -> None:
    """Writes latents [T, rank] and rope [T, rope_dim] into the cache at `slots` (int64 [T]), which the caller keeps
    within it."""
    code, tokens = dtype_code(latents, "latents"), len(slots)
    check_tensor(latents, "latents", (tokens, view.latents.shape[2]), latents.dtype)
    check_tensor(rope, "rope", (tokens, view.rope.shape[2]), latents.dtype)
    check_tensor(slots, "slots", (tokens,), torch.int64)
    latents, rope, slots = dense_rows(latents), dense_rows(rope), slots.contiguous()
    args = native.StoreLatentsArgs(
        *(entry_args(view), code, latents.data_ptr(), rope.data_ptr()),
        *(latents.stride(0) * latents.itemsize, rope.stride(0) * rope.itemsize, slots.data_ptr()),
    )
    _store_latents(args, tokens)


def entry_args(view: LatentView) -> native.EntryArgs:
    rank, key_dim = view.latents.shape[2], view.rope.shape[2]
    return native.EntryArgs(
        dtype=KV_CODES[view.latents.dtype],
        latents=view.latents.data_ptr(),
        keys=view.rope.data_ptr() if key_dim else None,
        scales=None if view.scale is None else view.scale.data_ptr(),
        row_bytes=view.latents.stride(0) * view.latents.itemsize,
        item_stride=view.latents.stride(1) * view.latents.itemsize,
        block_size=view.block_size,
        rank=rank,
        key_dim=key_dim,
    )


@operator
def latent_attention(
    q: torch.Tensor,
    view: LatentView,
    block_tables: torch.Tensor,
    query_start: list[int],
    context_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """q [T, N, rank + rope_dim] -> [T, N, rank]."""
    rank = view.latents.shape[2]
    if view.joint is not None:
        # Values as wide as keys: their last part, the rotated keys, is summed for nothing.
        both = KvView(k=view.joint, v=view.joint, k_scale=None, v_scale=None)
        out = prefill_attention(q, both, block_tables, query_start, context_lens, scale)
        return out.view(q.shape)[..., :rank]
    assert view.scale is not None
    tokens, num_heads, width = q.shape
    key_dim = view.rope.shape[2]
    if width != rank + key_dim or rank % 4 or key_dim % 4:
        raise ValueError(f"q is [T, {num_heads}, {width}], the cache holds {rank} + {key_dim}, multiples of 4")
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or len(block_tables) != len(context_lens):
        raise ValueError(f"block_tables must be int32 [{len(context_lens)}, max_blocks]")
    if len(query_start) != len(context_lens) + 1 or query_start[0] != 0 or query_start[-1] != tokens:
        raise ValueError(f"query_start must run from 0 to {tokens} in {len(context_lens) + 1} numbers")
    if context_lens and max(context_lens) > block_tables.shape[1] * view.block_size:
        raise ValueError(f"a context of {max(context_lens)} tokens does not fit in {block_tables.shape[1]} blocks")
    q, block_tables = dense_rows(q), dense_rows(block_tables)
    starts, lengths = array("i", query_start), array("i", context_lens)
    out = torch.empty(tokens, num_heads, rank, dtype=q.dtype)
    args = native.LatentArgs(
        dtype=dtype_code(q, "q"),
        latents=view.latents.data_ptr(),
        keys=view.rope.data_ptr(),
        scales=view.scale.data_ptr(),
        row_bytes=view.latents.stride(0),
        block_size=view.block_size,
        rank=rank,
        key_dim=key_dim,
        q=q.data_ptr(),
        q_token_stride=q.stride(0) * q.itemsize,
        q_head_stride=q.stride(1) * q.itemsize,
        num_heads=num_heads,
        heads_at_once=min(num_heads, HEADS_AT_ONCE),
        block_tables=block_tables.data_ptr(),
        block_tables_stride=block_tables.stride(0) * 4,
        context_lens=lengths.buffer_info()[0],
        scale=scale,
        out=out.data_ptr(),
    )
    _latent_attention(args, len(context_lens), starts.buffer_info()[0])
    return out
