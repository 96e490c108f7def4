"""Every operator in plain torch: what each backend is tested against, and the fallback without a compiler.

Shapes: T packed tokens of S sequences, H hidden size, N query heads, M KV heads, D head size. Activations are in the
model's dtype (bf16 or fp32); reductions are done in fp32. Attention always sees what the cache holds, never the values
from before quantization, so that a prompt gives the same result whole, in chunks, behind a cached prefix or after a
transfer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kv_cache import KvView
from engine.ops.reference_compressed import lightning_indexer, pool_windows, sparse_attn_sharedkv
from engine.ops.reference_latent import (
    as_stored,
    gather_items,
    gather_latents,
    latent_attention,
    quantize,
    store_latents,
)
from engine.ops.reference_linear import Linear, OutputLayer, linear, pack_linear
from engine.ops.reference_moe import (
    Experts,
    LinearGroups,
    grouped_linear,
    moe_experts,
    moe_gating_top_k,
    pack_experts,
    pack_groups,
)
from engine.ops.reference_streams import hc_head, hc_post, hc_pre

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
    "gather_kv",
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
    "quantize",
    "rms_norm",
    "rope",
    "set_num_threads",
    "silu_mul",
    "sparse_attn_sharedkv",
    "store_kv",
    "store_latents",
]

NAME = "reference"
DEVICE = "cpu"  # torch's name of what it computes on
SHARES_WEIGHTS = False


def set_num_threads(count: int) -> None:
    """Number of threads, the caller's included, that one operator may use."""
    torch.set_num_threads(count)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H]: x / rms(x) in fp32, cast to x's dtype, times weight (as transformers' LlamaRMSNorm).

    Weights in fp32 where x is not: the product is taken in fp32 and cast once (as its DeepseekV4RMSNorm).
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, H]. May update `residual` in place."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of pairs i, i + D/2. q [T, N, D], k [T, M, D]; cos, sin [T, D/2] fp32, scaled already."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        c, s = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1)

    return rotate(q), rotate(k)


def store_kv(k: torch.Tensor, v: torch.Tensor, view: KvView, slots: torch.Tensor) -> None:
    """Writes k, v [T, M, D] into the cache; token t goes to row slots[t] // block_size, place slots[t] % block_size.

    slots: int64 [T]. Quantizes when the cache is int8, else casts to its dtype.
    """
    rows, places = slots // view.block_size, slots % view.block_size
    if view.k_scale is None or view.v_scale is None:
        view.k[rows, :, places] = k.to(view.k.dtype)
        view.v[rows, :, places] = v.to(view.v.dtype)
        return
    view.k[rows, :, places], view.k_scale[rows, :, places] = quantize(k)
    view.v[rows, :, places], view.v_scale[rows, :, places] = quantize(v)


def gather_kv(
    view: KvView, block_ids: torch.Tensor, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` tokens of a sequence, dequantized: k, v [M, length, D]. block_ids int64 [blocks]."""

    def gather(plane: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        x = plane[block_ids]
        x = x.to(dtype) if scale is None else (x.float() * scale[block_ids].float().unsqueeze(-1)).to(dtype)
        return x.transpose(0, 1).flatten(1, 2)[:, :length]

    return gather(view.k, view.k_scale), gather(view.v, view.v_scale)


def prefill_attention(
    q: torch.Tensor,
    view: KvView,
    block_tables: torch.Tensor,
    query_start: list[int],
    context_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """Causal attention of packed queries over the paged cache, which already holds their own K and V.

    q [T, N, D]; block_tables int32 [S, max_blocks]; sequence s owns queries query_start[s] : query_start[s + 1], which
    are the LAST of its context_lens[s] cached tokens. Returns [T, N * D] in q's dtype.
    """
    out = torch.empty_like(q)
    for s, length in enumerate(context_lens):
        begin, end = query_start[s], query_start[s + 1]
        num_blocks = -(-length // view.block_size)
        k, v = gather_kv(view, block_tables[s, :num_blocks].long(), length, q.dtype)
        num_queries = end - begin
        mask = None
        if num_queries > 1 and num_queries != length:
            mask = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
        attended = F.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1).unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_mask=mask,
            is_causal=num_queries == length and num_queries > 1,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[0],
        )
        out[begin:end] = attended[0].transpose(0, 1)
    return out.flatten(1)


def decode_attention(
    q: torch.Tensor, view: KvView, block_tables: torch.Tensor, context_lens: list[int], scale: float
) -> torch.Tensor:
    """Attention of one query a sequence. q [S, N, D], block_tables int32 [S, max_blocks] -> [S, N * D] in q's dtype."""
    return prefill_attention(q, view, block_tables, list(range(len(context_lens) + 1)), context_lens, scale)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I] (gate first) -> silu(gate) * up [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def decoder(*_: object) -> None:
    """All layers of a model in one call: this backend has no such thing, its operators are the specification."""
