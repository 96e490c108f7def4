"""The CPU backend's attention over windows and compressed entries, and its streams of residuals: native kernels
(csrc/compressed.inl, csrc/streams.inl). Shapes and meaning: reference_compressed.py, reference_streams.py.

As with the other operators a token's output is the same bits whatever other tokens are in the call.
"""

from __future__ import annotations

from array import array

import torch

from engine.latent_cache import LatentView
from engine.ops import native
from engine.ops.cpu_latent import entry_args
from engine.ops.cpu_tensors import check_tensor, dense_rows, dtype_code, operator
from engine.ops.reference_latent import as_stored, gather_items

__all__ = [
    "as_stored",
    "gather_items",
    "hc_head",
    "hc_post",
    "hc_pre",
    "lightning_indexer",
    "pool_windows",
    "sparse_attn_sharedkv",
]

_HEADS_AT_ONCE = 32  # enough to make unpacking a tile cheap, few enough for several threads to share one token's
_MOST_STREAMS = 16

_library = native.library()
if _library is None:
    raise ImportError("the native kernels are not built: reinstall with a C++ compiler, or use the reference backend")
_shared_attention, _indexer = _library.twinpool_shared_attention, _library.twinpool_lightning_indexer
_pool_windows = _library.twinpool_pool_windows
_streams_in, _streams_out = _library.twinpool_streams_in, _library.twinpool_streams_out


@operator
def pool_windows(keys: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """keys, gates fp32 [N, M, D] -> [N, D]."""
    rows, count, width = keys.shape
    check_tensor(keys, "keys", (rows, count, width), torch.float32)
    check_tensor(gates, "gates", (rows, count, width), torch.float32)
    keys, gates, out = keys.contiguous(), gates.contiguous(), torch.empty(rows, width)
    _pool_windows(native.PoolArgs(keys.data_ptr(), gates.data_ptr(), count, width, out.data_ptr()), rows)
    return out


@operator
def lightning_indexer(
    q: torch.Tensor,
    weights: torch.Tensor,
    view: LatentView,
    block_tables: torch.Tensor,
    query_start: list[int],
    visible: list[int],
    k: int,
) -> torch.Tensor:
    """int32 [T, min(k, most of `visible`)]."""
    tokens, num_heads, dim = q.shape
    if dim % 4 or dim != view.latents.shape[2] + view.rope.shape[2]:
        raise ValueError(f"q is [T, {num_heads}, {dim}], which must be a multiple of 4 and what entries are")
    if len(visible) != tokens or query_start[-1] != tokens or len(query_start) != len(block_tables) + 1:
        raise ValueError(f"visible and query_start must be of {tokens} tokens and {len(block_tables)} sequences")
    if block_tables.dtype != torch.int32:
        raise TypeError(f"block_tables must be int32, not {block_tables.dtype}")
    check_tensor(weights, "weights", (tokens, num_heads), torch.float32)
    most = max(visible, default=0)
    if most > block_tables.shape[1] * view.block_size:
        raise ValueError(f"{most} entries do not fit in {block_tables.shape[1]} blocks of {view.block_size}")
    width = min(k, most)
    places = torch.arange(width, dtype=torch.int32)
    chosen = torch.where(places < torch.tensor(visible).unsqueeze(1), places, -1)
    if most <= k:
        return chosen
    q, weights, block_tables = dense_rows(q), weights.contiguous(), dense_rows(block_tables)
    sequences = array("i", (s for s in range(len(block_tables)) for _ in range(query_start[s], query_start[s + 1])))
    seen, scores = array("i", visible), torch.empty(tokens, most)
    args = native.IndexArgs(
        dtype=dtype_code(q, "q"),
        q=q.data_ptr(),
        q_token_stride=q.stride(0) * q.itemsize,
        q_head_stride=q.stride(1) * q.itemsize,
        num_heads=num_heads,
        dim=dim,
        weights=weights.data_ptr(),
        entries=entry_args(view),
        block_tables=block_tables.data_ptr(),
        block_tables_stride=block_tables.stride(0) * 4,
        sequences=sequences.buffer_info()[0],
        visible=seen.buffer_info()[0],
        scores=scores.data_ptr(),
        scores_stride=most,
    )
    _indexer(args, tokens, k, chosen.data_ptr(), width)
    return chosen


@operator
def sparse_attn_sharedkv(
    q: torch.Tensor,
    local: torch.Tensor,
    spans: torch.Tensor,
    view: LatentView | None,
    slots: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [T, H, D] -> [T, H, D]."""
    tokens, num_heads, dim = q.shape
    if dim % 4:
        raise ValueError(f"heads of {dim} do not fill whole words: take a multiple of 4")
    check_tensor(local, "local", (len(local), dim), q.dtype)
    check_tensor(spans, "spans", (tokens, 2), torch.int64)
    check_tensor(slots, "slots", (tokens, slots.shape[1]), torch.int32)
    check_tensor(sinks, "sinks", (num_heads,), torch.float32)
    if view is None and slots.shape[1]:
        raise ValueError("slots need the view that they are of")
    q, local, spans = dense_rows(q), dense_rows(local), spans.contiguous()
    slots, sinks, out = slots.contiguous(), sinks.contiguous(), torch.empty(q.shape, dtype=q.dtype)
    args = native.SharedArgs(
        dtype=dtype_code(q, "q"),
        q=q.data_ptr(),
        q_token_stride=q.stride(0) * q.itemsize,
        q_head_stride=q.stride(1) * q.itemsize,
        num_heads=num_heads,
        heads_at_once=min(num_heads, _HEADS_AT_ONCE),
        dim=dim,
        local=local.data_ptr(),
        local_stride=local.stride(0) * local.itemsize,
        spans=spans.data_ptr(),
        slots=slots.data_ptr(),
        slots_stride=slots.shape[1],
        num_slots=slots.shape[1],
        sinks=sinks.data_ptr(),
        scale=scale,
        out=out.data_ptr(),
    )
    if view is not None:
        args.entries = entry_args(view)
        if args.entries.rank + args.entries.key_dim != dim:
            raise ValueError(f"entries of {args.entries.rank} + {args.entries.key_dim} are no keys of {dim}")
    _shared_attention(args, tokens)
    return out


@operator
def hc_pre(
    x: torch.Tensor, mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, n, H] -> [T, H], post fp32 [T, n], comb fp32 [T, n, n]."""
    tokens, n, _ = x.shape
    post, comb = torch.empty(tokens, n), torch.empty(tokens, n, n)
    return _read_streams(x, mixes, scale, base, iterations, eps, post, comb), post, comb


@operator
def hc_head(x: torch.Tensor, mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, n, H] -> [T, H]."""
    return _read_streams(x, mixes, scale, base, 0, eps, None, None)


@operator
def hc_post(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """y [T, H], x [T, n, H] -> [T, n, H]."""
    tokens, n, width = x.shape
    check_tensor(y, "y", (tokens, width), x.dtype)
    check_tensor(post, "post", (tokens, n), torch.float32)
    check_tensor(comb, "comb", (tokens, n, n), torch.float32)
    y, x, post, comb = (each.contiguous() for each in (y, x, post, comb))
    out = torch.empty(x.shape, dtype=x.dtype)
    addresses = (each.data_ptr() for each in (y, x, post, comb))
    _streams_out(native.StreamsOutArgs(dtype_code(x, "x"), *addresses, n, width, out.data_ptr()), tokens)
    return out


def _read_streams(
    x: torch.Tensor,
    mixes: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    iterations: int,
    eps: float,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
) -> torch.Tensor:
    """post, comb: where these go; None: the last reading, which needs none."""
    tokens, n, width = x.shape
    outputs, scales = (n, 1) if post is None else (n * (2 + n), 3)
    if n > _MOST_STREAMS:
        raise ValueError(f"{n} streams: the kernel mixes {_MOST_STREAMS} at most")
    for each, name, shape in (
        (mixes, "mixes", (tokens, outputs)),
        (scale, "scale", (scales,)),
        (base, "base", (outputs,)),
    ):
        check_tensor(each, name, shape, torch.float32)
    x, mixes, scale, base = (each.contiguous() for each in (x, mixes, scale, base))
    out = torch.empty(tokens, width, dtype=x.dtype)
    args = native.StreamsInArgs(
        dtype_code(x, "x"),
        *(each.data_ptr() for each in (x, mixes, scale, base)),
        *(n, width, iterations, eps, out.data_ptr()),
        *(None if each is None else each.data_ptr() for each in (post, comb)),
    )
    _streams_in(args, tokens)
    return out
