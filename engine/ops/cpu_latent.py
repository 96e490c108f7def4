"""The CPU backend's latent attention: the native attention kernel with one KV head, latents being keys and values."""

from __future__ import annotations

import torch

from engine.kv_cache import KvView
from engine.latent_cache import LatentView
from engine.ops.cpu_attention import prefill_attention
from engine.ops.reference_latent import gather_latents, store_latents

__all__ = ["gather_latents", "latent_attention", "store_latents"]


def latent_attention(
    q: torch.Tensor,
    view: LatentView,
    block_tables: torch.Tensor,
    query_start: list[int],
    context_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """q [T, N, rank + rope_dim] -> [T, N, rank]. Int8 latents are dequantized for the call, others read in place."""
    rank, joint = view.latents.shape[2], view.joint
    if joint is None:
        counts = [-(-length // view.block_size) for length in context_lens]
        used = torch.arange(block_tables.shape[1]) < torch.tensor(counts).unsqueeze(1)
        joint = gather_latents(view, block_tables[used].long(), q.dtype).unsqueeze(1)
        block_tables = torch.zeros_like(block_tables).masked_scatter_(used, torch.arange(len(joint), dtype=torch.int32))
    # Values as wide as keys: their last part, the rotated keys, is summed for nothing.
    both = KvView(k=joint, v=joint, k_scale=None, v_scale=None)
    out = prefill_attention(q, both, block_tables, query_start, context_lens, scale)
    return out.view(q.shape)[..., :rank]
