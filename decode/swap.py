"""Copies of cache rows: to host memory and back for preempted sequences, and within the cache for forks.

The swap area is allocated at start and keeps every byte, so that a sequence comes back bit for bit. Its unit, a slot,
holds a block of all layers; the state of a sequence, for models that have such, takes as many slots as it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine import memory
from engine.kv_cache import KvCache
from twinpool.errors import ConfigError


class SwapArea:
    """`num_rows` slots in host memory. The device thread owns it."""

    def __init__(self, cache: KvCache, num_rows: int) -> None:
        self.num_rows = num_rows
        self._blocks, self._states = cache.buffers_of("block"), cache.buffers_of("sequence")
        self._slot_bytes = cache.layout.block_bytes
        self._state_slots = -(-cache.layout.state_bytes // self._slot_bytes)  # for each sequence
        wanted, available = num_rows * self._slot_bytes, memory.available_bytes()
        if available is not None and wanted > available:  # the kernel would promise it, and kill the worker much later
            sizes = f"--swap takes {wanted / 2**20:,.0f} MiB, but {available / 2**20:,.0f} MiB are available"
            raise ConfigError(f"{sizes}: lower it", field="swap")
        try:
            self._free = list(range(num_rows - 1, -1, -1))
            self._slots = torch.zeros(num_rows, self._slot_bytes, dtype=torch.uint8)
        except (RuntimeError, MemoryError, OverflowError) as error:
            raise ConfigError(f"cannot allocate {wanted} bytes to swap to: lower --swap", field="swap") from error

    @property
    def num_free(self) -> int:
        return len(self._free)

    @torch.inference_mode()
    def save(self, block_ids: Sequence[int], states: Sequence[int] = ()) -> list[int] | None:
        """Copies rows of blocks and of sequences out of the cache.

        The slots that hold them now, or None when too few are free.
        """
        needed = len(block_ids) + self._state_slots * len(states)
        if needed > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(needed)]
        own, begin = slots[: len(block_ids)], 0
        for cached in self._blocks:
            end = begin + cached.shape[1]
            self._slots[own, begin:end] = cached[list(block_ids)].to(self._slots.device)
            begin = end
        for state, rest in self._slots_of(slots, states):
            whole = torch.cat([cached[state] for cached in self._states]).to(self._slots.device)
            padding = len(rest) * self._slot_bytes - len(whole)
            self._slots[rest] = F.pad(whole, (0, padding)).view(len(rest), self._slot_bytes)
        return slots

    @torch.inference_mode()
    def restore(self, slots: list[int], block_ids: Sequence[int], states: Sequence[int] = ()) -> None:
        """Copies slots into rows of blocks and of sequences in the order in which they were saved; frees the slots.

        What is in further blocks stays.
        """
        own, begin = slots[: len(slots) - self._state_slots * len(states)], 0
        for cached in self._blocks:
            end = begin + cached.shape[1]
            cached[list(block_ids[: len(own)])] = self._slots[own, begin:end].to(cached.device)
            begin = end
        for state, rest in self._slots_of(slots, states):
            whole, begin = self._slots[rest].flatten(), 0
            for cached in self._states:
                end = begin + cached.shape[1]
                cached[state] = whole[begin:end].to(cached.device)
                begin = end
        self.free(slots)

    def free(self, slots: list[int]) -> None:
        self._free += slots

    @torch.inference_mode()
    def fork(self, block_id: int, copy_id: int) -> None:
        """Copies one block to another within the cache."""
        for cached in self._blocks:
            cached[copy_id] = cached[block_id]

    def _slots_of(self, slots: list[int], states: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Each state and its slots, which stand behind those of the blocks."""
        size = self._state_slots
        begin = len(slots) - size * len(states)
        return [(state, slots[begin + i * size : begin + (i + 1) * size]) for i, state in enumerate(states)]
