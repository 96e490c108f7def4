"""Ownership of cache blocks and the prefix cache."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, 16)
    mine = pool.allocate(3)
    assert mine is not None
    assert len(set(mine)) == 3
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(0) == []
    pool.release(mine)
    assert pool.num_free == 4


def test_a_prefix_is_found_by_full_blocks_and_never_as_the_whole_prompt() -> None:
    pool = BlockPool(8, 4)
    blocks = pool.allocate(3)
    pool.publish(tokens(10), blocks)
    assert pool.match_prefix(tokens(10)) == blocks[:2]
    assert pool.match_prefix(tokens(9)) == blocks[:2]
    assert pool.match_prefix(tokens(8)) == blocks[:1]  # the last token is left to compute
    assert pool.match_prefix(tokens(4)) == []
    assert pool.match_prefix([]) == []
    assert pool.match_prefix([*tokens(4), 99, 98, 97, 96, 95]) == blocks[:1]
    assert pool.match_prefix(tokens(10, first=1)) == []


def test_a_block_is_found_only_behind_the_tokens_it_was_computed_behind() -> None:
    pool = BlockPool(8, 4)
    pool.publish(tokens(8), pool.allocate(2))
    assert pool.match_prefix([*tokens(4, first=50), *tokens(4, first=4), 1]) == []


def test_prefixes_never_cross_salts() -> None:
    pool = BlockPool(8, 4)
    blocks = pool.allocate(2)
    pool.publish(tokens(8), blocks, salt="tenant a")
    assert pool.match_prefix(tokens(9)) == []
    assert pool.match_prefix(tokens(9), salt="tenant b") == []
    assert pool.match_prefix(tokens(9), salt="tenant a") == blocks


def test_where_only_some_ends_are_of_use_the_longest_such_prefix_is_found() -> None:
    pool = BlockPool(8, 4)
    blocks = pool.allocate(3) or []
    assert pool.publish(tokens(11), blocks) == pool.digest_of(blocks[1])  # of the last full block
    pool.publish(tokens(12), blocks)
    first, second, third = map(pool.digest_of, blocks)
    assert pool.match_prefix(tokens(13), ends={first, second}) == blocks[:2]
    assert pool.match_prefix(tokens(12), ends={first, third}) == blocks[:1]
    assert pool.match_prefix(tokens(13), ends={b"another"}) == []
    assert [pool.num_references(block) for block in blocks] == [3, 2, 1]


def test_a_prefix_is_whole_as_long_as_all_its_blocks_are_there() -> None:
    pool = BlockPool(4, 4)
    blocks, own = pool.allocate(2) or [], pool.allocate(2) or []
    pool.publish(tokens(8), blocks[:1])
    pool.publish(tokens(8), own)  # the first is published already: the second stands behind another's block
    first, second = pool.digest_of(blocks[0]), pool.digest_of(own[1])
    assert pool.whole([second, b"another", first]) == [second, first]
    pool.release(blocks)
    pool.allocate(2)
    assert pool.whole([second, first]) == []
    assert pool.match_prefix(tokens(9)) == []


def test_released_prefix_stays_findable_until_its_block_is_needed_least_recent_first() -> None:
    pool = BlockPool(3, 4)
    old, new = pool.allocate(1), pool.allocate(1)
    pool.publish(tokens(4), old)
    pool.publish(tokens(4, first=100), new)
    pool.release(old)
    pool.release(new)
    assert pool.num_free == 3
    assert pool.match_prefix(tokens(5)) == old  # used again: now `new` is the least recent
    pool.release(old)
    taken = pool.allocate(2)
    assert new[0] in taken
    assert pool.match_prefix(tokens(5, first=100)) == []
    assert pool.match_prefix(tokens(5)) == old


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    pool.publish(tokens(12), blocks)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.match_prefix(tokens(13)) == blocks[:2]


def test_content_published_twice_stays_with_the_first_block() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.publish(tokens(4), first)
    pool.publish(tokens(4), second)
    assert pool.match_prefix(tokens(5)) == first
    pool.release(second)
    assert pool.allocate(1) == second  # it holds nothing worth keeping


def test_double_release_and_retaining_a_free_block_are_errors() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="is free"):
        pool.retain(blocks)
    assert pool.num_free == 2


class PoolModel(RuleBasedStateMachine):
    """Random sequences of calls: no block is ever with two owners that did not share it, and none gets lost."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 2)
        self.held: list[tuple[list[int], list[int]]] = []  # (token ids, block ids) of every live sequence

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def start(self, token_ids: list[int]) -> None:
        shared = self.pool.match_prefix(token_ids)
        for other_tokens, other_blocks in self.held:
            for i in set(range(len(shared))) & set(range(len(other_blocks))):
                assert (shared[i] != other_blocks[i]) or token_ids[: 2 * i + 2] == other_tokens[: 2 * i + 2]
        fresh = self.pool.allocate(-(-len(token_ids) // 2) - len(shared))
        if fresh is None:
            self.pool.release(shared)
            return
        in_use = {block for _, blocks in self.held for block in blocks}
        assert not in_use & set(fresh)
        self.pool.publish(token_ids, shared + fresh)
        self.held.append((token_ids, shared + fresh))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)

    @invariant()
    def references_and_free_blocks_add_up(self) -> None:
        in_use = [block for _, blocks in self.held for block in blocks]
        assert self.pool.num_free == 6 - len(set(in_use))
        assert all(self.pool.num_references(block) == in_use.count(block) for block in range(6))


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
