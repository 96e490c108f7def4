"""A prefill worker generates whole answers, as it does while the decode pool is empty."""

from __future__ import annotations

import asyncio

import pytest

from prefill.request import Sequence
from prefill.scheduler import Scheduler
from tests.decode.pair import alone, greedy
from tests.prefill.test_scheduler import BLOCK, scheduler, sequence, sizes
from tests.prefill.test_server import Served, events_of, request, served
from twinpool.errors import InvalidRequest
from twinpool.sampling import SamplingParams
from twinpool.v1 import worker_pb2 as pb

assert served  # the fixture


def answer(events: list[pb.PrefillEvent]) -> list[int]:
    first, *others = events
    tokens = [*first.first_tokens.tokens]
    for event in others:
        assert event.WhichOneof("event") == "tokens"
        tokens += event.tokens.tokens
    assert [bool(token.finish_reason) for token in tokens] == [False] * (len(tokens) - 1) + [True]
    return [token.token_id for token in tokens]


@pytest.mark.parametrize(
    "params",
    [greedy(40), SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True, presence_penalty=0.5)],
    ids=["greedy", "seeded"],
)
async def test_answer_is_that_of_a_lone_engine(served: Served, params: SamplingParams) -> None:
    prompts = [[10 + (7 * i + j) % 200 for j in range(5 + 30 * i)] for i in range(6)]
    calls = [
        events_of(served.stub.Run(request(prompt, params, request_id=f"r{i}", generate=True)))
        for i, prompt in enumerate(prompts)
    ]
    for prompt, events in zip(prompts, await asyncio.gather(*calls), strict=True):
        assert answer(events) == alone(served.oracle, prompt, params)


async def test_resumption_goes_on_where_the_answer_was_left(served: Served) -> None:
    prompt, params = list(range(10, 60)), SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True)
    whole = alone(served.oracle, prompt, params, 2)
    resumed = request([*prompt, *whole[:9]], params, num_prompt_tokens=50, first_choice=2, generate=True, attempt=2)
    assert answer(await events_of(served.stub.Run(resumed))) == whole[9:]


async def test_logprobs_come_with_every_token(served: Served) -> None:
    events = await events_of(served.stub.Run(request([11, 12, 13], greedy(5, logprobs=2, echo=True), generate=True)))
    assert len(events[0].first_tokens.prompt_logprobs) == 3
    assert all(event.tokens.tokens[0].top[0].logprob < 0 for event in events[1:])


async def test_cancel_in_the_answer_frees_its_rows(served: Served) -> None:
    call = served.stub.Run(request(list(range(10, 60)), greedy(400), generate=True))
    for _ in range(5):
        await call.read()
    call.cancel()
    await served.baseline()
    assert served.registry.get_sample_value("twinpool_prefill_ended_total", {"outcome": "cancelled"}) == 1


@pytest.mark.parametrize("fields", [{"transfer_target": b"t"}, {"n": 2}])
async def test_what_it_cannot_generate_is_refused(served: Served, fields: dict) -> None:
    params = greedy(5, n=fields.pop("n", 1))
    with pytest.raises(InvalidRequest, match="generate is set"):
        await events_of(served.stub.Run(request([11, 12], params, generate=True, **fields)))


# The scheduler's part.


def generating(scheduling: Scheduler, *prompts: Sequence) -> None:
    """Computes the prompts, and takes each back with its first token."""
    for each in prompts:
        scheduling.add(each)
    while any(each.num_left for each in prompts):
        for chunk in scheduling.next_batch(now=1.0):
            scheduling.computed(chunk)
    for each in prompts:
        token(scheduling, each)


def token(scheduling: Scheduler, each: Sequence) -> None:
    each.output.append(7)
    scheduling.generate(each)


def test_answers_come_before_prompts_in_a_step() -> None:
    scheduling, pool = scheduler(budget=64)
    one, two = sequence(20, seed=1), sequence(20, seed=2)
    generating(scheduling, one, two)
    scheduling.add(sequence(1000, "long"))
    assert sizes(scheduling.next_batch(now=1.0)) == {"short-20-1": 1, "short-20-2": 1, "long-1000-0": 62}
    for each in (one, two):
        scheduling.remove(each)
        scheduling.free(each)
    assert scheduling.num_generating == 0
    assert pool.num_free == pool.num_blocks - 63  # the long prompt's


def test_more_answers_than_a_step_holds_take_turns() -> None:
    scheduling, _ = scheduler(budget=16)
    answers = [sequence(4, seed=seed) for seed in range(24)]
    generating(scheduling, *answers)
    turns: dict[str, int] = {}
    for _ in range(3):
        for chunk in scheduling.next_batch(now=1.0):
            scheduling.computed(chunk)
            token(scheduling, chunk.sequence)
            name = chunk.sequence.request.request_id
            turns[name] = turns.get(name, 0) + 1
    assert set(turns.values()) == {2}
    assert len(turns) == 24


def test_the_last_in_order_gives_its_rows_and_comes_back_with_its_answer() -> None:
    scheduling, pool = scheduler(budget=64, rows=4)
    first, last = sequence(BLOCK, seed=1), sequence(2 * BLOCK, seed=2)
    generating(scheduling, first, last)  # 3 of 4 rows; each needs another now
    for _ in range(BLOCK):
        for chunk in scheduling.next_batch(now=1.0):
            assert chunk.sequence is first
            scheduling.computed(chunk)
            token(scheduling, first)
    assert (last.num_computed, last.block_ids, len(last.output)) == (0, [], 1)
    scheduling.remove(first)
    scheduling.free(first)
    chunks = scheduling.next_batch(now=2.0)
    assert [(chunk.sequence, chunk.end) for chunk in chunks] == [(last, 2 * BLOCK + 1)]
    assert chunks[0].token_ids[-1] == 7
    assert chunks[0].is_last
    scheduling.computed(chunks[0])
    scheduling.remove(last)
    scheduling.free(last)
    assert pool.num_free == pool.num_blocks
