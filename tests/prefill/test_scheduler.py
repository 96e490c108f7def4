from __future__ import annotations

import random
from typing import Any

import pytest

from engine.block_pool import BlockPool
from engine.kv_cache import KvCache, KvLayout
from engine.state_pool import StatePool
from prefill.request import Chunk, Request, Sequence
from prefill.scheduler import BatchLimits, Scheduler
from twinpool.errors import InvalidRequest
from twinpool.sampling import SamplingParams

BLOCK = 16


def scheduler(*, budget: int = 64, short: int = 32, long: int = 8, rows: int = 1000) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(rows, BLOCK)
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=BLOCK, kv_dtype="int8")
    limits = BatchLimits(token_budget=budget, prompts={"short": short, "long": long})
    return Scheduler(limits, pool, StatePool(KvCache(layout, 1))), pool


def sequence(length: int, input_class: str = "short", *, seed: int = 0, **options: Any) -> Sequence:
    draw = random.Random(f"{length} {seed}")
    options.setdefault("sampling", SamplingParams())
    request = Request(
        request_id=f"{input_class}-{length}-{seed}",
        attempt=1,
        token_ids=[draw.randrange(1000) for _ in range(length)],
        num_prompt_tokens=length,
        input_class=input_class,
        **options,
    )
    return Sequence(request, lambda event: None, received_at=0.0)


def run_step(scheduling: Scheduler) -> list[Chunk]:
    """One step as the worker does it; finished prompts give their rows back at once."""
    chunks = scheduling.next_batch(now=1.0)
    for chunk in chunks:
        scheduling.computed(chunk)
        if chunk.is_last:
            scheduling.free(chunk.sequence)
    return chunks


def sizes(chunks: list[Chunk]) -> dict[str, int]:
    return {chunk.sequence.request.request_id: chunk.end - chunk.start for chunk in chunks}


def test_short_prompts_share_a_step_up_to_the_budget() -> None:
    scheduling, pool = scheduler(budget=64)
    for seed in range(5):
        scheduling.add(sequence(20, seed=seed))
    assert sizes(run_step(scheduling)) == {"short-20-0": 20, "short-20-1": 20, "short-20-2": 20, "short-20-3": 4}
    assert sizes(run_step(scheduling)) == {"short-20-3": 16, "short-20-4": 20}
    assert run_step(scheduling) == []
    assert pool.num_free == pool.num_blocks


def test_each_class_has_its_own_number_of_places() -> None:
    scheduling, _ = scheduler(budget=1000, short=3, long=2)
    for seed in range(5):
        scheduling.add(sequence(10, "short", seed=seed))
        scheduling.add(sequence(600, "long", seed=seed))
    chunks = scheduling.next_batch(now=1.0)
    assert [chunk.sequence.request.input_class for chunk in chunks] == ["short"] * 3 + ["long"] * 2
    assert scheduling.num_running == 5
    assert scheduling.num_waiting == 5


def test_short_prompt_gets_in_between_the_chunks_of_a_long_one() -> None:
    scheduling, _ = scheduler(budget=64)
    long = sequence(1000, "long")
    scheduling.add(long)
    assert sizes(run_step(scheduling)) == {"long-1000-0": 64}  # nobody else: the whole budget
    scheduling.add(sequence(10))
    assert sizes(run_step(scheduling)) == {"short-10-0": 10, "long-1000-0": 54}


def test_stream_of_short_prompts_does_not_stop_a_long_one() -> None:
    scheduling, _ = scheduler(budget=64)
    scheduling.add(sequence(1000, "long"))
    steps = 0
    while scheduling.num_waiting or scheduling.num_running:
        for seed in range(10):
            if steps < 25:
                scheduling.add(sequence(30, seed=100 * steps + seed))
        done = sizes(run_step(scheduling))
        steps += 1
        if steps <= 25:
            assert done["long-1000-0"] >= 32
        assert sum(done.values()) <= 64
        assert steps < 500


def test_higher_priority_goes_first_then_order_of_arrival() -> None:
    scheduling, _ = scheduler(budget=16)
    for seed, priority in enumerate((0, 0, 5, 1)):
        scheduling.add(sequence(16, seed=seed, priority=priority))
    order = [next(iter(sizes(run_step(scheduling)))) for _ in range(4)]
    assert order == ["short-16-2", "short-16-3", "short-16-0", "short-16-1"]


def test_cancelled_prompts_in_the_queue_cost_nothing() -> None:  # L10
    scheduling, pool = scheduler(budget=64)
    long = [sequence(5000, "long", seed=seed) for seed in range(10)]
    for each in long:
        scheduling.add(each)
    run_step(scheduling)
    for each in long:
        scheduling.remove(each)
        scheduling.free(each)
    assert pool.num_free == pool.num_blocks
    scheduling.add(sequence(40))
    assert sizes(run_step(scheduling)) == {"short-40-0": 40}
    scheduling.remove(long[0])  # again: nothing happens
    scheduling.free(long[0])


def test_who_waits_for_rows_is_not_overtaken_by_later_ones() -> None:
    scheduling, _pool = scheduler(budget=1000, rows=10)
    first = sequence(100, seed=1)
    scheduling.add(first)
    scheduling.next_batch(now=1.0)  # holds 7 of 10 rows
    scheduling.add(sequence(150, "long", seed=2))
    scheduling.next_batch(now=1.0)
    scheduling.add(sequence(10, seed=3))
    assert sizes(scheduling.next_batch(now=1.0)) == {"short-100-1": 100}
    scheduling.add(sequence(10, seed=4, priority=1))  # but a higher priority may
    assert "short-10-4" in sizes(scheduling.next_batch(now=1.0))
    for chunk in scheduling.next_batch(now=1.0):
        scheduling.computed(chunk)
        scheduling.free(chunk.sequence)
    assert sizes(run_step(scheduling)) == {"long-150-2": 150}
    assert sizes(run_step(scheduling)) == {"short-10-3": 10}


def test_cancel_of_who_waits_for_rows_lets_the_others_go_on() -> None:
    scheduling, _ = scheduler(budget=1000, rows=10)
    scheduling.add(sequence(100, seed=1))
    scheduling.next_batch(now=1.0)
    big = sequence(150, "long", seed=2)
    scheduling.add(big)
    scheduling.next_batch(now=1.0)
    scheduling.add(sequence(10, seed=3))
    assert sizes(scheduling.next_batch(now=1.0)) == {"short-100-1": 100}
    scheduling.remove(big)
    assert "short-10-3" in sizes(scheduling.next_batch(now=1.0))


def test_full_blocks_of_an_earlier_prompt_are_not_computed_again() -> None:
    scheduling, pool = scheduler(budget=1000)
    first = sequence(50)
    scheduling.add(first)
    run_step(scheduling)
    again = sequence(50)
    scheduling.add(again)
    assert sizes(run_step(scheduling)) == {"short-50-0": 2}
    assert again.num_cached == 48
    assert pool.num_free == pool.num_blocks


def test_prompt_logprobs_need_every_token_computed() -> None:
    scheduling, _ = scheduler(budget=1000)
    scheduling.add(sequence(50))
    run_step(scheduling)
    scheduling.add(sequence(50, sampling=SamplingParams(echo=True, logprobs=0)))
    assert sizes(run_step(scheduling)) == {"short-50-0": 50}


def test_what_can_never_run_is_refused_with_the_numbers() -> None:
    scheduling, _ = scheduler(rows=4)
    with pytest.raises(InvalidRequest, match=r"5 blocks of 16.* holds 4") as caught:
        scheduling.check(sequence(65).request)
    assert caught.value.field == "prompt"
    scheduling.check(sequence(64).request)
    with pytest.raises(InvalidRequest, match="short, long") as caught:
        scheduling.check(sequence(3, "huge").request)
    assert caught.value.field == "input_class"


def test_waiting_tokens_are_those_not_computed() -> None:
    scheduling, _ = scheduler(budget=64)
    scheduling.add(sequence(100, "long"))
    scheduling.add(sequence(30, "long"))
    assert scheduling.num_waiting_tokens == 130
    run_step(scheduling)
    assert scheduling.num_waiting_tokens == 66
