"""Memory for weights in large pages: a core that streams through them loses a quarter of its speed to small ones."""

from __future__ import annotations

import contextlib
import mmap

import torch

_ALIGNMENT = 64
_OWN_FROM = 8 << 20  # bytes from which a tensor gets a mapping of its own


class LargePages:
    """Hands out pieces of large mappings, each of which is unmapped when no tensor lies in it any more."""

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk: mmap.mmap | None = None
        self._taken = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], zeros."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if num_bytes >= _OWN_FROM:
            return torch.frombuffer(_mapping(num_bytes), dtype=torch.uint8)
        if self._chunk is None or self._taken + num_bytes > self._chunk_bytes:
            self._chunk, self._taken = _mapping(self._chunk_bytes), 0
        piece = torch.frombuffer(self._chunk, dtype=torch.uint8, count=num_bytes, offset=self._taken)
        self._taken += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece


def _mapping(num_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
