"""Rows of sequences: who owns them, and snapshots that later sequences go on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv_cache import KvCache, KvLayout, division
from engine.region_shape import RegionShape, row_bytes
from engine.state_pool import StatePool
from twinpool.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLayout:
    """Two layers: one with rows of blocks and of sequences, one with rows of sequences alone."""

    num_layers: int = 2
    block_size: int = 4

    @property
    def regions(self) -> tuple[RegionShape, ...]:
        return (
            RegionShape(name="layer.0", layer=0, per="block", row_bytes=6),
            RegionShape(name="layer.0.state", layer=0, per="sequence", row_bytes=20),
            RegionShape(name="layer.1.state", layer=1, per="sequence", row_bytes=12),
        )

    @property
    def block_bytes(self) -> int:
        return row_bytes(self.regions, "block")

    @property
    def state_bytes(self) -> int:
        return row_bytes(self.regions, "sequence")

    def describe(self) -> str:
        return "mixed"

    def view(self, layer: int, buffers: Sequence[torch.Tensor]) -> Any:
        return layer, list(buffers)


def content(pool: StatePool, row: int) -> list[int]:
    """The first byte of the row in every region."""
    return [int(buffer[row, 0]) for buffer in pool._buffers]


def fill(pool: StatePool, row: int, value: int) -> None:
    for buffer in pool._buffers:
        buffer[row] = value


@pytest.fixture
def pool() -> StatePool:
    return StatePool(KvCache(MixedLayout(), 3, num_states=3))


def test_every_region_has_the_rows_of_its_kind_whatever_the_memory_comes_from() -> None:
    memory = bytearray(1 << 12)
    for allocate in (None, lambda size: memoryview(memory)[:size]):
        cache = KvCache(MixedLayout(), 5, num_states=2, allocate=allocate)
        assert [tuple(buffer.shape) for buffer in cache.buffers] == [(5, 6), (2, 20), (2, 12)]
        assert [[tuple(buffer.shape) for buffer in view[1]] for view in cache.views] == [[(5, 6), (2, 20)], [(2, 12)]]
        assert cache.numbers(0, "sequence") == (1,)
        assert cache.numbers(1, "block") == ()
        for number, buffer in enumerate(cache.buffers):
            buffer.fill_(number + 1)
        assert [buffer.unique().tolist() for buffer in cache.buffers] == [[1], [2], [3]]  # none lies in another


def test_memory_is_divided_between_blocks_and_sequences() -> None:
    layout = MixedLayout()
    assert division(layout, 6000, 10) == ((6000 - 320) // 6, 10)
    assert division(layout, 600, 10) == ((600 - 9 * 32) // 6, 9)  # half of it at most
    assert division(layout, 38, 10) == (1, 1)
    assert division(KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, kv_dtype="bf16"), 70, 9) == (2, 0)
    with pytest.raises(ConfigError, match="and the state of one sequence: raise --memory to 38 "):
        division(layout, 37, 10)


def test_rows_are_held_by_one_and_given_back(pool: StatePool) -> None:
    rows = pool.allocate(2)
    assert rows is not None
    assert pool.allocate(2) is None
    assert pool.has_room(1)
    assert not pool.has_room(2)
    pool.release(rows)
    assert pool.num_free == 3
    with pytest.raises(ValueError, match="released twice"):
        pool.release(rows[:1])


def test_cleared_and_copied_rows_leave_others_alone(pool: StatePool) -> None:
    for row in range(3):
        fill(pool, row, row + 1)
    pool.copy(0, to=2)
    pool.clear([0])
    assert [content(pool, row) for row in range(3)] == [[0, 0], [2, 2], [1, 1]]


def test_a_snapshot_is_a_copy_and_so_is_what_goes_on_from_it(pool: StatePool) -> None:
    (own,) = pool.allocate(1) or []
    fill(pool, own, 7)
    pool.publish(b"a", own)
    fill(pool, own, 8)
    resumed = pool.resume(b"a")
    assert content(pool, resumed) == [7, 7]
    fill(pool, resumed, 9)
    pool.release([resumed])
    assert content(pool, pool.resume(b"a")) == [7, 7]


def test_snapshots_give_way_least_recently_used_first(pool: StatePool) -> None:
    (own,) = pool.allocate(1) or []
    for digest in (b"a", b"b"):
        pool.publish(digest, own)
    pool.publish(b"a", own)  # known: used again
    assert pool.published() == [b"a", b"b"]
    assert pool.num_free == 2
    pool.publish(b"c", own)
    assert pool.published() == [b"c", b"a"]
    assert pool.allocate(2) is not None
    assert pool.num_snapshots == 0
    pool.publish(b"d", own)  # no row to be had
    assert b"d" not in pool


def test_one_long_prompt_does_not_drive_out_the_snapshots_of_others() -> None:
    pool = StatePool(KvCache(MixedLayout(), 3, num_states=4))
    (own,) = pool.allocate(1) or []
    pool.publish(b"others", own)
    for digest in (b"a", b"b", b"c", b"d"):
        pool.publish(digest, own, on_the_way=True)
    assert pool.published() == [b"others", b"d", b"c"]
    pool.publish(b"others", own, on_the_way=True)  # stays what it is
    (other,) = pool.allocate(1) or []
    assert pool.published() == [b"others", b"d"]
    resumed = pool.resume(b"d")
    assert pool.published() == [b"d"]  # used, and the one that was used before it had to go
    pool.release([other, resumed])
    pool.publish(b"e", own)
    pool.publish(b"f", own)
    pool.publish(b"g", own, on_the_way=True)  # no row but those of lasting ones
    assert pool.published() == [b"f", b"e", b"d"]


def test_a_prefix_without_a_snapshot_cannot_be_gone_on_from(pool: StatePool) -> None:
    with pytest.raises(ValueError, match="no snapshot"):
        pool.resume(b"a")


def test_the_last_row_is_the_snapshots_own(pool: StatePool) -> None:
    rows = pool.allocate(2) or []
    fill(pool, rows[0], 5)
    pool.publish(b"a", rows[0])
    own = pool.resume(b"a")
    assert content(pool, own) == [5, 5]
    assert b"a" not in pool
    assert own not in rows
    assert pool.num_free == 0
    pool.release([own, *rows])
    assert pool.num_free == 3


def test_a_model_without_such_rows_always_has_room() -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, kv_dtype="int8")
    pool = StatePool(KvCache(layout, 3))
    assert not pool.exists
    assert pool.has_room(100)
    assert pool.allocate(100) == []
    pool.publish(b"a", 0)
    assert b"a" not in pool


class PoolModel(RuleBasedStateMachine):
    """Random calls: no row has two owners, none gets lost, and a snapshot is what was published."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = StatePool(KvCache(MixedLayout(), 3, num_states=5))
        self.held: list[int] = []
        self.published: dict[bytes, int] = {}  # what is in the snapshot, if there is still one
        self.num_written = 0

    @rule()
    def start(self) -> None:
        rows = self.pool.allocate(1)
        assert (rows is None) == (len(self.held) == 5)
        self._take(rows or [])

    @rule(name=st.sampled_from([b"a", b"b", b"c"]))
    def resume(self, name: bytes) -> None:
        if name in self.pool:
            row = self.pool.resume(name)
            assert content(self.pool, row) == [self.published[name]] * 2
            self._take([row])

    @precondition(lambda self: self.held)
    @rule(name=st.sampled_from([b"a", b"b", b"c"]), on_the_way=st.booleans())
    def publish(self, name: bytes, on_the_way: bool) -> None:
        known, row = name in self.pool, self.held[0]
        self.pool.publish(name, row, on_the_way=on_the_way)
        if name in self.pool and not known:
            self.published[name] = content(self.pool, row)[0]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.release([self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))])

    def _take(self, rows: list[int]) -> None:
        for row in rows:
            assert row not in self.held
            self.held.append(row)
            self.num_written += 1
            fill(self.pool, row, self.num_written % 256)  # its first step

    @invariant()
    def rows_add_up(self) -> None:
        assert self.pool.num_free == 5 - len(self.held)
        assert len(self.pool.published()) == self.pool.num_snapshots <= self.pool.num_free


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
