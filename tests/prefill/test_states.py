"""The prefill scheduler with models that remember something for every sequence beside its blocks."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool
from engine.kv_cache import KvCache
from engine.state_pool import StatePool
from prefill.request import Chunk
from prefill.scheduler import BatchLimits, Scheduler
from tests.prefill.test_scheduler import BLOCK, run_step, sequence, sizes
from tests.stateful import StatefulLayout
from twinpool.sampling import SamplingParams


class Desk:
    """A scheduler with its pools. Whoever has rows at the end of a test has leaked them."""

    def __init__(self, *, budget: int = 1000, rows: int = 1000, states: int = 8) -> None:
        self.cache = KvCache(StatefulLayout(block_size=BLOCK), rows, num_states=states)
        self.blocks, self.states = BlockPool(rows, BLOCK), StatePool(self.cache)
        limits = BatchLimits(token_budget=budget, prompts={"short": 32, "long": 8})
        self.scheduler = Scheduler(limits, self.blocks, self.states)

    def steps(self) -> list[tuple[int, int]]:
        """Runs until nothing is left: start and end of every chunk."""
        found = []
        while chunks := run_step(self.scheduler):
            found += [(chunk.start, chunk.end) for chunk in chunks]
        assert self.states.num_free == self.states.num_rows
        return found

    def hold(self) -> list[Chunk]:
        """One step whose prompts keep their rows."""
        chunks = self.scheduler.next_batch(now=1.0)
        for chunk in chunks:
            self.scheduler.computed(chunk)
        return chunks


@pytest.mark.parametrize(
    ("length", "budget", "chunks"),
    [
        (10, 1000, [(0, 10)]),
        (16, 1000, [(0, 16)]),
        (17, 1000, [(0, 16), (16, 17)]),
        (100, 1000, [(0, 96), (96, 100)]),
        (96, 1000, [(0, 80), (80, 96)]),  # the last token is never taken from a cache
        (100, 40, [(0, 32), (32, 64), (64, 96), (96, 100)]),
        (40, 20, [(0, 16), (16, 32), (32, 40)]),
        (40, 10, [(0, 10), (10, 16), (16, 26), (26, 32), (32, 40)]),  # a step that is smaller than a block
        (70, 14, [(0, 14), (14, 28), (28, 42), (42, 56), (56, 64), (64, 70)]),  # two tokens are no chunk
    ],
)
def test_chunks_end_where_a_later_prompt_could_begin(length: int, budget: int, chunks: list[tuple[int, int]]) -> None:
    desk = Desk(budget=budget)
    desk.scheduler.add(sequence(length))
    assert desk.steps() == chunks
    assert desk.states.num_snapshots == sum(end % BLOCK == 0 for _, end in chunks)


def test_what_classes_leave_of_a_step_is_filled_up_to_a_boundary() -> None:
    desk = Desk(budget=64)
    desk.scheduler.add(sequence(20, "short"))
    desk.scheduler.add(sequence(600, "long"))
    assert sizes(run_step(desk.scheduler)) == {"short-20-0": 16, "long-600-0": 48}
    assert sizes(run_step(desk.scheduler)) == {"short-20-0": 4, "long-600-0": 48}


def test_a_prompt_waits_for_a_state_and_is_not_overtaken() -> None:
    desk = Desk(states=2)
    first, second = sequence(20, seed=1), sequence(20, seed=2)
    desk.scheduler.add(first)
    desk.scheduler.add(second)
    desk.hold()
    desk.hold()  # both are computed; a transfer may still be reading their rows
    assert (first.num_left, second.num_left) == (0, 0)
    desk.scheduler.add(sequence(500, "long"))
    desk.scheduler.add(sequence(10))
    assert desk.hold() == []
    desk.scheduler.free(first)
    assert sizes(desk.hold()) == {"long-500-0": 496}
    desk.scheduler.free(second)
    assert "short-10-0" in sizes(desk.hold())


def test_a_state_begins_as_the_snapshot_or_empty() -> None:
    desk = Desk()
    buffers = desk.cache.buffers_of("sequence")
    one = sequence(40)
    desk.scheduler.add(one)
    (chunk,) = desk.scheduler.next_batch(now=1.0)
    assert all(not buffer[one.state].any() for buffer in buffers)
    for buffer in buffers:
        buffer[one.state] = 7  # the step
    desk.scheduler.computed(chunk)
    for buffer in buffers:
        buffer[one.state] = 9  # the next
    run_step(desk.scheduler)
    again = sequence(40)
    desk.scheduler.add(again)
    (chunk,) = desk.scheduler.next_batch(now=1.0)
    assert (chunk.start, again.num_cached) == (32, 32)
    assert all(bool((buffer[again.state] == 7).all()) for buffer in buffers)


def test_the_last_state_may_be_that_of_the_snapshot_itself() -> None:
    desk = Desk(states=2)
    desk.scheduler.add(sequence(40))
    assert desk.steps() == [(0, 32), (32, 40)]
    desk.scheduler.add(sequence(10, seed=5))
    desk.hold()
    again = sequence(40)
    desk.scheduler.add(again)
    (chunk,) = desk.hold()
    assert (chunk.start, chunk.end) == (32, 40)
    assert desk.states.num_free == 0
    assert desk.states.num_snapshots == 0


def test_prompt_logprobs_need_every_token_computed() -> None:
    desk = Desk()
    desk.scheduler.add(sequence(50))
    desk.steps()
    desk.scheduler.add(sequence(50, sampling=SamplingParams(echo=True, logprobs=0)))
    assert desk.steps() == [(0, 48), (48, 50)]


def test_an_answer_that_loses_its_rows_loses_its_state() -> None:
    desk = Desk(rows=4, states=2)
    first, last = sequence(BLOCK, seed=1), sequence(2 * BLOCK, seed=2)
    for each in (first, last):
        desk.scheduler.add(each)
    while any(each.num_left for each in (first, last)):
        desk.hold()
    for each in (first, last):
        each.output.append(7)
        desk.scheduler.generate(each)
    desk.hold()
    assert (last.state, last.block_ids) == (None, [])
    assert first.state is not None
    desk.scheduler.remove(first)
    desk.scheduler.free(first)
    (chunk,) = desk.hold()
    assert chunk.sequence is last
    assert chunk.is_last
    assert last.state is not None
    desk.scheduler.free(last)
    assert desk.states.num_free == 2
