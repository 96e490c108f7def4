"""Sequences of random tokens in an engine's cache, for benchmarks that take steps without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch import Batch, BatchItem
from engine.engine import Engine
from twinpool.errors import ConfigError


class CachedSequences:
    """`count` sequences with room for `max_tokens` each, and a row of their own where the model remembers more."""

    def __init__(self, engine: Engine, count: int, max_tokens: int) -> None:
        """Raises ConfigError when the cache has no room for them."""
        self.engine, self.count = engine, count
        self.block_size = engine.cache.layout.block_size
        num_blocks = -(-max_tokens // self.block_size)
        blocks = engine.blocks.allocate(count * num_blocks)
        states = engine.states.allocate(count) if blocks is not None else None
        if blocks is None or states is None:
            engine.blocks.release(blocks or [])
            raise ConfigError(f"{count} sequences of {max_tokens} tokens do not fit the cache: it needs more memory")
        self._block_ids = [blocks[i * num_blocks : (i + 1) * num_blocks] for i in range(count)]
        self._states = states

    def items(self, token_ids: Sequence[int], start: int) -> list[BatchItem]:
        """The same tokens for every sequence."""
        return [self.item(index, token_ids, start) for index in range(self.count)]

    def item(self, index: int, token_ids: Sequence[int], start: int) -> BatchItem:
        return BatchItem(token_ids, start, self._block_ids[index], self._states[index] if self._states else None)

    def batch(self, items: Sequence[BatchItem]) -> Batch:
        return Batch.build(items, self.block_size)

    def release(self) -> None:
        for block_ids in self._block_ids:
            self.engine.blocks.release(block_ids)
        self.engine.states.release(self._states)
