"""The paged cache of latent attention (MLA): for each token one latent and one rotated key, which all heads share.

A row holds a block of tokens, token-major. As bf16 or fp32 latent and key lie side by side, as decode attention reads
them; as int8 they are planes of their own:

    latents [block_size, rank] and rope [block_size, rope_dim] as one plane [block_size, rank + rope_dim]    bf16 | fp32

    latents [block_size, rank]      int8, with one scale a token
    rope    [block_size, rope_dim]  bf16: few numbers, which scores hang on
    scales  [block_size]            fp16

No head owns any of it: it is shipped once, however many heads or ranks read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kv_cache import KV_DTYPES, one_a_layer
from engine.region_shape import BlockParts, RegionShape, row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayout:
    """Shape of every row of every layer's region."""

    num_layers: int
    rank: int
    rope_dim: int
    block_size: int  # tokens a row
    kv_dtype: str  # a key of KV_DTYPES

    @property
    def regions(self) -> tuple[RegionShape, ...]:
        parts = BlockParts(tokens=self.block_size, num_heads=1, item_bytes=self.item_bytes, is_shared=True)
        return one_a_layer(self.num_layers, self.row_bytes, parts)

    @property
    def item_bytes(self) -> tuple[int, ...]:
        """The planes of a row, in order: bytes for each token."""
        return item_bytes(self.rank, self.rope_dim, self.kv_dtype)

    @property
    def row_bytes(self) -> int:
        return sum(self.item_bytes) * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes that one block of tokens takes over all layers."""
        return row_bytes(self.regions, "block")

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence takes over all layers, beside its blocks."""
        return 0

    def describe(self) -> str:
        """Everything two caches must agree on to exchange rows, as one line (part of the fingerprint)."""
        return (
            f"layers={self.num_layers} latent={self.rank} rope={self.rope_dim} dtype={self.kv_dtype} order=latents/v1"
            f"{' rope-dtype=bf16 scales=token-fp16' if self.kv_dtype == 'int8' else ''}"
        )

    def view(self, layer: int, buffers: Sequence[torch.Tensor]) -> LatentView:
        """The layer's one buffer, uint8 [num_rows, row_bytes], seen as what it holds."""
        (buffer,) = buffers
        return view_items(buffer, self.block_size, self.rank, self.rope_dim, self.kv_dtype)


def item_bytes(rank: int, rope_dim: int, kv_dtype: str) -> tuple[int, ...]:
    """The planes of a row, in order: bytes for each item, which is a latent with its rotated part."""
    if kv_dtype == "int8":
        return rank, 2 * rope_dim, 2
    return ((rank + rope_dim) * KV_DTYPES[kv_dtype].itemsize,)


def view_items(buffer: torch.Tensor, count: int, rank: int, rope_dim: int, kv_dtype: str) -> LatentView:
    """uint8 [rows, count * bytes of an item], whose rows may lie apart, seen as what it holds."""
    sizes = [count * size for size in item_bytes(rank, rope_dim, kv_dtype)]
    if kv_dtype == "int8":
        latents, rope, scale = buffer.split(sizes, dim=1)
        return LatentView(
            latents=latents.view(torch.int8).unflatten(1, (count, rank)),
            rope=rope.view(torch.bfloat16).unflatten(1, (count, rope_dim)),
            scale=scale.view(torch.float16),
            joint=None,
        )
    joint = buffer.view(KV_DTYPES[kv_dtype]).unflatten(1, (count, -1))
    latents, rope = joint.split((rank, rope_dim), dim=2)
    return LatentView(latents=latents, rope=rope, scale=None, joint=joint.unsqueeze(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentView:
    """One layer's region seen as tensors that share its memory.

    latents [num_rows, block_size, rank], rope [num_rows, block_size, rope_dim]; scale [num_rows, block_size] fp16 for
    int8, else None; joint [num_rows, 1, block_size, rank + rope_dim] unless int8.
    """

    latents: torch.Tensor
    rope: torch.Tensor
    scale: torch.Tensor | None
    joint: torch.Tensor | None

    @property
    def block_size(self) -> int:
        return self.latents.shape[1]
