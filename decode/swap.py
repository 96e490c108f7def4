"""Copies of cache rows: to host memory and back for preempted sequences, and within the cache for forks.

The swap area is allocated at start and has the cache's rows, so that a sequence comes back bit for bit.
"""

from __future__ import annotations

import torch

from engine import memory
from engine.kv_cache import KvCache
from twinpool.errors import ConfigError


class SwapArea:
    """`num_rows` rows in host memory, handed out as slots. The device thread owns it."""

    def __init__(self, cache: KvCache, num_rows: int) -> None:
        self.num_rows = num_rows
        self._cache = cache
        wanted, available = num_rows * cache.layout.block_bytes, memory.available_bytes()
        if available is not None and wanted > available:  # the kernel would promise it, and kill the worker much later
            raise ConfigError(f"--swap takes {wanted} bytes, but {available} are available: lower it", field="swap")
        try:
            self._free = list(range(num_rows - 1, -1, -1))
            self._buffers = [torch.zeros(num_rows, cache.layout.row_bytes, dtype=torch.uint8) for _ in cache.buffers]
        except (RuntimeError, MemoryError, OverflowError) as error:
            raise ConfigError(
                f"cannot allocate {num_rows * cache.layout.block_bytes} bytes to swap to: lower --swap", field="swap"
            ) from error

    @property
    def num_free(self) -> int:
        return len(self._free)

    @torch.inference_mode()
    def save(self, block_ids: list[int]) -> list[int] | None:
        """Copies blocks out of the cache; the slots that hold them now, or None when too few are free."""
        if len(block_ids) > len(self._free):
            return None
        slots = [self._free.pop() for _ in block_ids]
        for swapped, layer in zip(self._buffers, self._cache.buffers, strict=True):
            swapped[slots] = layer[block_ids].to(swapped.device)
        return slots

    @torch.inference_mode()
    def restore(self, slots: list[int], block_ids: list[int]) -> None:
        """Copies slots into the blocks of the same index, and frees the slots."""
        for swapped, layer in zip(self._buffers, self._cache.buffers, strict=True):
            layer[block_ids] = swapped[slots].to(layer.device)
        self.free(slots)

    def free(self, slots: list[int]) -> None:
        self._free += slots

    @torch.inference_mode()
    def fork(self, block_id: int, copy_id: int) -> None:
        """Copies one block to another within the cache."""
        for layer in self._cache.buffers:
            layer[copy_id] = layer[block_id]
