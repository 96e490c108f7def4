"""The input of one forward step: the new tokens of several sequences, packed without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class BatchItem:
    """What one sequence brings to a step.

    token_ids: the new tokens; start: the position of the first of them, which is the number of tokens already in the
    cache; block_ids: the sequence's blocks in order, at least as many as start + len(token_ids) tokens need; state: its
    row in the regions of sequences, for a model that has such. Where start is 0, nothing in that row counts.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    state: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """T packed tokens of S sequences. Sequence s owns tokens query_start[s] : query_start[s + 1]."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [T]: block id * block_size + place in the block, where the token's K and V go
    block_tables: torch.Tensor  # int32 [S, most blocks of a sequence], rows padded with 0
    query_start: list[int]  # S + 1 entries
    context_lens: list[int]  # tokens of each sequence in the cache after this step
    last_token_rows: torch.Tensor  # int64 [S]: row of the last token of each sequence
    states: torch.Tensor | None = None  # int64 [S]: each sequence's row in the regions of sequences

    @property
    def num_tokens(self) -> int:
        return self.query_start[-1]

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence brings exactly one token."""
        return self.num_tokens == self.num_sequences

    @classmethod
    def build(cls, items: Sequence[BatchItem], block_size: int) -> Batch:
        """Packs `items` in order.

        Raises ValueError for an item without tokens or with too few blocks, and when only some have a state.
        """
        token_ids: list[int] = []  # plain lists: most steps bring one token a sequence, where arrays cost more
        positions: list[int] = []
        slots: list[int] = []
        query_start = [0]
        context_lens = []
        for item in items:
            end = item.start + len(item.token_ids)
            if end == item.start or end > len(item.block_ids) * block_size:
                raise ValueError(
                    f"{len(item.token_ids)} tokens from position {item.start} do not fit "
                    f"{len(item.block_ids)} blocks of {block_size}"
                )
            token_ids += item.token_ids
            positions += range(item.start, end)
            slots += [item.block_ids[p // block_size] * block_size + p % block_size for p in range(item.start, end)]
            query_start.append(len(token_ids))
            context_lens.append(end)
        if not context_lens:
            raise ValueError("a batch needs at least one item")
        states = [item.state for item in items if item.state is not None]
        if len(states) not in (0, len(items)):
            raise ValueError(f"{len(states)} of {len(items)} sequences have a state: all must, or none")

        tables = np.zeros((len(items), -(-max(context_lens) // block_size)), dtype=np.int32)
        for row, item in enumerate(items):
            num_blocks = -(-context_lens[row] // block_size)
            tables[row, :num_blocks] = item.block_ids[:num_blocks]
        packed = torch.from_numpy(np.array((token_ids, positions, slots), dtype=np.int64))
        return cls(
            token_ids=packed[0],
            positions=packed[1],
            slots=packed[2],
            block_tables=torch.from_numpy(tables),
            query_start=query_start,
            context_lens=context_lens,
            last_token_rows=torch.from_numpy(np.array(query_start[1:], dtype=np.int64) - 1),
            states=torch.from_numpy(np.array(states, dtype=np.int64)) if states else None,
        )


class DecodeBatches:
    """Builds batches of one token a sequence in arrays that are kept, for sequences without a state.

    A batch is good until the next is built. Nothing is allocated unless a batch has more sequences, or a sequence more
    blocks, than any before; of a sequence's blocks only what has changed since the last step is written again.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._packed, self._tables = np.zeros((3, 0), dtype=np.int64), np.zeros((0, 0), dtype=np.int32)
        self._written: list[list[int]] = []  # by row: the blocks that its table holds
        self._tensors: tuple[torch.Tensor, ...] = ()  # of the last number of sequences

    def build(self, items: Sequence[BatchItem]) -> Batch:
        """Raises ValueError as Batch.build, and for an item of more than one token or with a state."""
        count, block_size = len(items), self._block_size
        context_lens = [item.start + 1 for item in items]
        if not items or any(len(item.token_ids) != 1 or item.state is not None for item in items):
            raise ValueError("every sequence must bring one token and have no state")
        self._make_room(count, -(-max(context_lens) // block_size))
        token_ids, positions, slots = self._packed
        for row, item in enumerate(items):
            start, block_ids = item.start, item.block_ids
            if start >= len(block_ids) * block_size:
                raise ValueError(f"1 token from position {start} does not fit {len(block_ids)} blocks of {block_size}")
            token_ids[row], positions[row] = item.token_ids[0], start
            slots[row] = block_ids[start // block_size] * block_size + start % block_size
            used = list(block_ids[: start // block_size + 1])
            if used != self._written[row]:
                self._tables[row, : len(used)] = used
                self._written[row] = used
        if not self._tensors or len(self._tensors[0]) != count:
            packed = torch.from_numpy(self._packed)[:, :count]
            self._tensors = (*packed, torch.from_numpy(self._tables)[:count], torch.arange(count))
        token, position, slot, tables, rows = self._tensors
        return Batch(
            token_ids=token,
            positions=position,
            slots=slot,
            block_tables=tables,
            query_start=list(range(count + 1)),
            context_lens=context_lens,
            last_token_rows=rows,
        )

    def _make_room(self, sequences: int, blocks: int) -> None:
        rows, width = self._tables.shape
        if sequences > rows or blocks > width:
            rows, width = (
                max(has, 1 << (needs - 1).bit_length()) for has, needs in ((rows, sequences), (width, blocks))
            )
            self._packed, self._tables = np.zeros((3, rows), dtype=np.int64), np.zeros((rows, width), dtype=np.int32)
            self._written, self._tensors = [[] for _ in range(rows)], ()
