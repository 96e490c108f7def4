"""Packing of a step's tokens."""

from __future__ import annotations

import pytest
import torch

from engine.batch import Batch, BatchItem


def test_tokens_are_packed_with_positions_slots_and_tables() -> None:
    batch = Batch.build(
        [BatchItem([11, 12, 13], 3, [7, 2, 9]), BatchItem([21], 0, [5]), BatchItem([31, 32], 8, [1, 0, 4])], 4
    )
    assert batch.token_ids.tolist() == [11, 12, 13, 21, 31, 32]
    assert batch.positions.tolist() == [3, 4, 5, 0, 8, 9]
    assert batch.slots.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 5 * 4, 4 * 4, 4 * 4 + 1]
    assert batch.query_start == [0, 3, 4, 6]
    assert batch.context_lens == [6, 1, 10]
    assert batch.block_tables.tolist() == [[7, 2, 0], [5, 0, 0], [1, 0, 4]]
    assert batch.last_token_rows.tolist() == [2, 3, 5]
    assert (batch.token_ids.dtype, batch.slots.dtype, batch.block_tables.dtype) == (
        torch.int64,
        torch.int64,
        torch.int32,
    )
    assert not batch.is_decode
    assert batch.states is None


def test_one_token_a_sequence_is_a_decode_step() -> None:
    assert Batch.build([BatchItem([1], 4, [0, 1]), BatchItem([2], 0, [2])], 4).is_decode


@pytest.mark.parametrize("items", [[], [BatchItem([], 0, [1])], [BatchItem([1, 2], 3, [1])]])
def test_an_empty_batch_or_item_or_too_few_blocks_is_an_error(items: list[BatchItem]) -> None:
    with pytest.raises(ValueError, match=r"at least one item|do not fit"):
        Batch.build(items, 4)


def test_rows_of_sequences_come_in_order_and_for_all_or_none() -> None:
    items = [BatchItem([1], 4, [0, 1], 3), BatchItem([2, 3], 0, [2], 0)]
    states = Batch.build(items, 4).states
    assert states is not None
    assert states.dtype == torch.int64
    assert states.tolist() == [3, 0]
    with pytest.raises(ValueError, match="1 of 2 sequences have a state"):
        Batch.build([items[0], BatchItem([2, 3], 0, [2])], 4)
