"""Who owns which row of the regions of sequences: what a sequence remembers beside its blocks, and snapshots of it.

A sequence holds one row from its admission to its end. A step overwrites it, so that a prefix is of use to another
sequence only where somebody kept a copy: a snapshot, found by the digest of the blocks that led to it. Snapshots lie in
rows that nobody holds. They count as free, and are given up when a row is wanted, least recently used first. Those
taken on the way through a prompt go before those of its end, until somebody has used them: one long prompt takes many,
and must not drive out all others.

A model without such regions has a pool of no rows, in which every sequence finds what it needs: nothing.

Not thread safe: the device thread owns the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch

from engine.kv_cache import KvCache


class StatePool:
    def __init__(self, cache: KvCache) -> None:
        self.num_rows = cache.num_states
        self._cache, self._buffers = cache, cache.buffers_of("sequence")
        self._free = list(range(self.num_rows - 1, -1, -1))  # the end is handed out first
        # Digest -> row; the front is given up first, and all that were taken on the way before all others.
        self._on_the_way: OrderedDict[bytes, int] = OrderedDict()
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()

    @property
    def exists(self) -> bool:
        """Whether the model remembers anything for a sequence."""
        return self.num_rows > 0

    @property
    def num_free(self) -> int:
        """Rows that `allocate` could hand out now."""
        return len(self._free) + self.num_snapshots

    @property
    def num_snapshots(self) -> int:
        return len(self._on_the_way) + len(self._snapshots)

    def has_room(self, count: int) -> bool:
        """Whether `allocate` would succeed."""
        return not self.exists or count <= self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """`count` rows of any content, or None (and nothing taken) when fewer are free."""
        if not self.exists:
            return []
        if count > self.num_free:
            return None
        while len(self._free) < count:
            self._free.append((self._on_the_way or self._snapshots).popitem(last=False)[1])
        return [self._free.pop() for _ in range(count)]

    def release(self, rows: Iterable[int]) -> None:
        """Raises ValueError for a row that nobody holds."""
        for row in rows:
            if row in self._free or row in self._on_the_way.values() or row in self._snapshots.values():
                raise ValueError(f"state row {row} is released twice")
            self._free.append(row)

    def clear(self, rows: Sequence[int]) -> None:
        """Nothing of whoever had these rows before is left in them."""
        self._cache.clear("sequence", rows)

    @torch.inference_mode()
    def copy(self, row: int, to: int) -> None:
        for buffer in self._buffers:
            buffer[to] = buffer[row]

    # Snapshots

    def __contains__(self, digest: object) -> bool:
        return digest in self._snapshots or digest in self._on_the_way

    def publish(self, digest: bytes, row: int, *, on_the_way: bool = False) -> None:
        """Keeps a copy of what a sequence remembers at the end of that prefix, if a row can be had for it.

        on_the_way: the prompt goes on, and so does the taking of snapshots.
        """
        if on_the_way and (digest in self or not (self._free or self._on_the_way)):
            return
        source = self._pop(digest)
        if source is None:
            rows = self.allocate(1)
            if not rows:
                return
            source = rows[0]
            self.copy(row, source)
        (self._on_the_way if on_the_way else self._snapshots)[digest] = source

    def resume(self, digest: bytes) -> int:
        """A row for a sequence that goes on from the snapshot, which must exist.

        The last row there is may be the snapshot's own: then it is taken, and the snapshot is gone.
        """
        source = self._pop(digest)
        if source is None:
            raise ValueError("there is no snapshot of that prefix")
        rows = self.allocate(1)
        if rows is None:
            return source
        self.copy(source, rows[0])
        self._snapshots[digest] = source
        return rows[0]

    def published(self) -> list[bytes]:
        """Digests of all snapshots, the one that is given up last first."""
        return [*reversed(self._snapshots), *reversed(self._on_the_way)]

    def _pop(self, digest: bytes) -> int | None:
        row = self._on_the_way.pop(digest, None)
        return self._snapshots.pop(digest, None) if row is None else row
