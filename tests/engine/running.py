"""Runs an engine on token ids: whole, in chunks, several sequences in a batch, greedily."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import Batch, BatchItem
from engine.engine import Engine


class Running:
    """One sequence in an engine's cache: the blocks it owns and how much of it is computed."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        block_size = engine.cache.layout.block_size
        block_ids = engine.blocks.allocate(-(-max_tokens // block_size))
        assert block_ids is not None, "the test's cache is too small"
        self.states = engine.states.allocate(1)
        assert self.states is not None, "the test's cache has too few rows of sequences"
        self.engine, self.block_ids, self.computed = engine, block_ids, 0

    def item(self, token_ids: Sequence[int]) -> BatchItem:
        item = BatchItem(token_ids, self.computed, self.block_ids, *self.states)
        self.computed += len(token_ids)
        return item

    def end(self) -> None:
        self.engine.blocks.release(self.block_ids)
        self.engine.states.release(self.states)


def step(engine: Engine, items: list[BatchItem]) -> list[torch.Tensor]:
    """One forward: the logits [tokens of the item, vocab] of every item."""
    batch = Batch.build(items, engine.cache.layout.block_size)
    logits = engine.logits(engine.forward(batch))
    return list(logits.split([len(item.token_ids) for item in items]))


def logits_in_chunks(engine: Engine, token_ids: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Logits [len(token_ids), vocab] of a prompt computed in chunks of the given sizes, in turn until it ends."""
    sequence = Running(engine, len(token_ids))
    pieces, start = [], 0
    while start < len(token_ids):
        size = sizes[len(pieces) % len(sizes)]
        pieces += step(engine, [sequence.item(token_ids[start : start + size])])
        start += size
    sequence.end()
    return torch.cat(pieces)


def greedy(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """The likeliest continuations, all prompts in one batch: prefilled together, then decoded together."""
    sequences = [Running(engine, len(prompt) + max_tokens) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    new: list[Sequence[int]] = list(prompts)
    for _ in range(max_tokens):
        logits = step(engine, [s.item(ids) for s, ids in zip(sequences, new, strict=True)])
        for output, rows in zip(outputs, logits, strict=True):
            output.append(int(rows[-1].argmax()))
        new = [output[-1:] for output in outputs]
    for sequence in sequences:
        sequence.end()
    return outputs
