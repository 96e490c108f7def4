"""Makes paged caches that hold known sequences in shuffled rows, with rubbish everywhere else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kv_cache import KvCache, KvLayout, KvView
from engine.ops import reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """Sequences in a cache. block_tables int32 [S, max_blocks]; q [S][length, N, D]: a query for every token."""

    view: KvView
    block_tables: torch.Tensor
    lengths: list[int]
    q: list[torch.Tensor]
    scale: float

    def all_queries(self) -> tuple[torch.Tensor, list[int]]:
        """Every sequence's queries, packed, and where each sequence's start."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        return torch.cat(self.q), starts


def paged(
    lengths: list[int],
    *,
    dtype: torch.dtype,
    kv_dtype: str = "int8",
    block_size: int = 16,
    heads: tuple[int, int] = (6, 2),  # query heads, KV heads
    head_dim: int = 32,
    seed: int = 0,
) -> Paged:
    """Random sequences of these lengths. The same seed gives the same values whatever the block size."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    num_blocks = [-(-length // block_size) for length in lengths]
    layout = KvLayout(
        num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, kv_dtype=kv_dtype
    )
    cache = KvCache(layout, sum(num_blocks) + 2)
    cache.buffers[0].fill_(0xFF)  # NaN in every float format
    view = cache.views[0]
    rows = torch.randperm(cache.num_rows, generator=torch.Generator().manual_seed(seed + 1)).tolist()
    tables = torch.full((len(lengths), max(num_blocks) + 1), 2**30, dtype=torch.int32)
    queries = []
    for s, length in enumerate(lengths):
        ids = [rows.pop() for _ in range(num_blocks[s])]
        tables[s, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        k = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
        v = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
        queries.append((2 * torch.randn(length, num_heads, head_dim, generator=generator)).to(dtype))
        slots = torch.tensor([ids[t // block_size] * block_size + t % block_size for t in range(length)])
        reference.store_kv(k, v, view, slots)
    return Paged(view=view, block_tables=tables, lengths=lengths, q=queries, scale=head_dim**-0.5)
