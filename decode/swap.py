"""Copies of cache rows: to host memory and back for preempted sequences, and within the cache for forks.

A swap area is allocated at start and has the cache's rows, of blocks or of sequences, so that a sequence comes back bit
for bit.
"""

from __future__ import annotations

import torch

from engine import memory
from engine.kv_cache import KvCache
from engine.region_shape import Per, row_bytes
from twinpool.errors import ConfigError


class SwapArea:
    """`num_rows` rows in host memory, handed out as slots. The device thread owns it."""

    def __init__(self, cache: KvCache, num_rows: int, per: Per = "block") -> None:
        """per: what the rows are of, which `save` and the others name by their row ids."""
        self.num_rows = num_rows
        self._cached = cache.buffers_of(per)
        wanted, available = num_rows * row_bytes(cache.regions, per), memory.available_bytes()
        if available is not None and wanted > available:  # the kernel would promise it, and kill the worker much later
            raise ConfigError(f"--swap takes {wanted} bytes, but {available} are available: lower it", field="swap")
        try:
            self._free = list(range(num_rows - 1, -1, -1))
            self._buffers = [torch.zeros(num_rows, buffer.shape[1], dtype=torch.uint8) for buffer in self._cached]
        except (RuntimeError, MemoryError, OverflowError) as error:
            raise ConfigError(f"cannot allocate {wanted} bytes to swap to: lower --swap", field="swap") from error

    @property
    def num_free(self) -> int:
        return len(self._free)

    @torch.inference_mode()
    def save(self, row_ids: list[int]) -> list[int] | None:
        """Copies rows out of the cache; the slots that hold them now, or None when too few are free."""
        if len(row_ids) > len(self._free):
            return None
        slots = [self._free.pop() for _ in row_ids]
        for swapped, cached in zip(self._buffers, self._cached, strict=True):
            swapped[slots] = cached[row_ids].to(swapped.device)
        return slots

    @torch.inference_mode()
    def restore(self, slots: list[int], row_ids: list[int]) -> None:
        """Copies slots into the rows of the same index, and frees the slots."""
        for swapped, cached in zip(self._buffers, self._cached, strict=True):
            cached[row_ids] = swapped[slots].to(cached.device)
        self.free(slots)

    def free(self, slots: list[int]) -> None:
        self._free += slots

    @torch.inference_mode()
    def fork(self, row_id: int, copy_id: int) -> None:
        """Copies one row to another within the cache."""
        for cached in self._cached:
            cached[copy_id] = cached[row_id]


def division(cache: KvCache, swap_bytes: int) -> tuple[int, int]:
    """Slots for blocks and slots for the states of sequences, in the proportion of the cache's rows."""
    block_bytes, state_bytes = cache.layout.block_bytes, cache.layout.state_bytes
    num_states = swap_bytes * cache.num_states // (cache.num_rows * block_bytes + cache.num_states * state_bytes)
    return (swap_bytes - num_states * state_bytes) // block_bytes, num_states
