"""Latent attention (MLA) over the paged cache in plain torch: the specification of these operators."""

from __future__ import annotations

import torch

from engine.latent_cache import LatentView


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 over the last axis: (codes int8 [..., D], scales fp16 [...]).

    scale = fp16(max|x| / 127), kept at least the smallest normal fp16 so that a zero vector gives zeros; codes are
    x / scale with the ROUNDED scale, to the nearest even integer, clamped to -127 .. 127.
    """
    x32 = x.float()
    scale = (x32.abs().amax(-1) / 127).clamp(6.104e-05, 65504).to(torch.float16)
    codes = (x32 / scale.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
    return codes, scale


def store_latents(latents: torch.Tensor, rope: torch.Tensor, view: LatentView, slots: torch.Tensor) -> None:
    """Writes latents [T, rank] and rotated keys [T, rope_dim] into the cache at slots (int64 [T]: row * block_size +
    place). Quantizes the latents when the cache is int8, else casts both to its dtype."""
    rows, places = slots // view.block_size, slots % view.block_size
    view.rope[rows, places] = rope.to(view.rope.dtype)
    if view.scale is None:
        view.latents[rows, places] = latents.to(view.latents.dtype)
    else:
        view.latents[rows, places], view.scale[rows, places] = quantize(latents)


def gather_items(view: LatentView, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What lies at slots (int64 [...]: row * block_size + place), dequantized: [..., rank + rope_dim]."""
    rows, places = slots // view.block_size, slots % view.block_size
    latents, rope = view.latents[rows, places], view.rope[rows, places].to(dtype)
    if view.scale is not None:
        latents = latents.float() * view.scale[rows, places].float().unsqueeze(-1)
    return torch.cat((latents.to(dtype), rope), dim=-1)


def as_stored(latents: torch.Tensor, rope: torch.Tensor, view: LatentView) -> torch.Tensor:
    """latents [T, rank] and rope [T, rope_dim] as `gather_items` gives them back once they are stored in `view`."""
    turned = rope.to(view.rope.dtype).to(rope.dtype)
    if view.scale is None:
        kept = latents.to(view.latents.dtype).to(latents.dtype)
    else:
        codes, scale = quantize(latents)
        kept = (codes.float() * scale.float().unsqueeze(-1)).to(latents.dtype)
    return torch.cat((kept, turned), dim=-1)


def gather_latents(view: LatentView, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of a sequence or several, dequantized: [blocks, block_size, rank + rope_dim]. block_ids int64 [blocks]."""
    latents, rope = view.latents[block_ids], view.rope[block_ids].to(dtype)
    if view.scale is not None:
        latents = latents.float() * view.scale[block_ids].float().unsqueeze(-1)
    return torch.cat((latents.to(dtype), rope), dim=2)


def latent_attention(
    q: torch.Tensor,
    view: LatentView,
    block_tables: torch.Tensor,
    query_start: list[int],
    context_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """Causal attention of packed queries over the paged cache, all heads over the same latents (the absorbed form).

    q [T, N, rank + rope_dim] is multiplied with latent | rotated key; what is summed are the latents: [T, N, rank] in
    q's dtype. The other arguments are those of `prefill_attention`.
    """
    rank = view.latents.shape[2]
    out = torch.empty(*q.shape[:2], rank, dtype=q.dtype)
    for s, length in enumerate(context_lens):
        begin, end = query_start[s], query_start[s + 1]
        num_blocks = -(-length // view.block_size)
        keys = gather_latents(view, block_tables[s, :num_blocks].long(), q.dtype).flatten(0, 1)[:length]
        scores = torch.einsum("tnd,jd->ntj", q[begin:end].float(), keys.float()) * scale
        hidden = torch.ones(end - begin, length, dtype=torch.bool).triu(length - (end - begin) + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("ntj,jd->tnd", weights, keys[:, :rank].float()).to(q.dtype)
    return out
