from __future__ import annotations

import pytest
import torch

from decode.swap import SwapArea
from engine.kv_cache import KvCache, KvLayout
from tests.stateful import StatefulLayout
from twinpool.errors import ConfigError


@pytest.fixture
def cache() -> KvCache:
    layout = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, kv_dtype="int8")
    cache = KvCache(layout, 8)
    for buffer in cache.buffers:
        buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))
    return cache


def test_rows_come_back_bit_for_bit_into_other_blocks(cache: KvCache) -> None:
    swap = SwapArea(cache, 5)
    before = [buffer.clone() for buffer in cache.buffers]
    slots = swap.save([6, 1, 3])
    assert slots is not None
    assert swap.num_free == 2
    for buffer in cache.buffers:
        buffer[[6, 1, 3]] = 0
    swap.restore(slots, [0, 7, 1])
    assert swap.num_free == 5
    for buffer, old in zip(cache.buffers, before, strict=True):
        assert torch.equal(buffer[[0, 7, 1]], old[[6, 1, 3]])
        assert torch.equal(buffer[[2, 4, 5]], old[[2, 4, 5]])


def test_full_area_takes_nothing(cache: KvCache) -> None:
    swap = SwapArea(cache, 2)
    slots = swap.save([0])
    assert slots is not None
    assert swap.save([1, 2]) is None
    assert swap.num_free == 1
    swap.free(slots)
    assert swap.save([1, 2]) is not None


def test_fork_copies_every_layer(cache: KvCache) -> None:
    SwapArea(cache, 0).fork(2, 5)
    for buffer in cache.buffers:
        assert torch.equal(buffer[2], buffer[5])


def test_an_area_over_the_memory_is_refused_before_it_is_touched(cache: KvCache) -> None:
    for num_rows in (1 << 40, 1 << 80):
        with pytest.raises(ConfigError) as caught:
            SwapArea(cache, num_rows)
        assert caught.value.field == "swap"


def test_the_state_of_a_sequence_comes_back_with_its_blocks() -> None:
    cache = KvCache(StatefulLayout(block_size=4), 8, num_states=3)  # a block is 64 bytes, a state 80
    for buffer in cache.buffers:
        buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))
    blocks = [buffer.clone() for buffer in cache.buffers_of("block")]
    states = [buffer.clone() for buffer in cache.buffers_of("sequence")]
    swap = SwapArea(cache, 8)
    other = swap.save([2])
    slots = swap.save([6, 1], [2])
    assert slots is not None
    assert len(slots) == 2 + 2
    assert swap.save([0, 1], [0]) is None  # three are free
    for buffer in cache.buffers:
        buffer.zero_()
    swap.restore(slots, [3, 5, 7], [1])  # the third is for what comes next
    assert swap.num_free == 7
    assert other is not None
    for buffer, old in zip(cache.buffers_of("block"), blocks, strict=True):
        assert torch.equal(buffer[[3, 5]], old[[6, 1]])
        assert not buffer[[0, 1, 2, 4, 6, 7]].any()
    for buffer, old in zip(cache.buffers_of("sequence"), states, strict=True):
        assert torch.equal(buffer[1], old[2])
        assert not buffer[[0, 2]].any()
