"""A decode worker computes prompts itself: the answers of the pools, in chunks between the steps of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from decode.prompts import LEAST_CHUNK, ChunkPace, Prompts
from decode.request import Ended, FirstTokens, Generation, Reason, Request, Reserved, Token
from engine.engine import Engine
from engine.sampling import Sampled
from tests.decode.pair import Pair, alone, greedy, open_pair
from tests.decode.test_scheduler import Desk
from tests.decode.test_split_pools import prompt_of
from twinpool.sampling import SamplingParams


@pytest.fixture
def pair(engine: Callable[..., Engine]) -> Iterator[Pair]:
    with open_pair(engine(), engine(), prefill_chunk=32) as pair:
        yield pair


def seeded(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "top_p": 0.9, "seed": 7, "max_tokens": max_tokens, **options})


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 200])
@pytest.mark.parametrize("params", [greedy(12), seeded(12, repetition_penalty=1.3)], ids=["greedy", "seeded"])
def test_answer_is_that_of_a_lone_engine(pair: Pair, oracle: Engine, length: int, params: SamplingParams) -> None:
    prompt = prompt_of(length, seed=length)
    call = pair.call(prompt, params, local_prefill=True).wait()
    assert call.token_ids() == alone(oracle, prompt, params)
    assert call.prefill is None
    assert pair.sample("twinpool_decode_local_prefill_tokens_total") == length
    assert pair.sample("twinpool_decode_transfer_rows_total") == 0


def test_choices_share_one_prompt(pair: Pair, oracle: Engine) -> None:
    prompt, params = prompt_of(70, seed=1), seeded(10, n=3)
    call = pair.call(prompt, params, local_prefill=True).wait()
    assert [call.token_ids(choice) for choice in range(3)] == [alone(oracle, prompt, params, i) for i in range(3)]
    assert pair.sample("twinpool_decode_local_prefill_tokens_total") == 70


def test_resumption_goes_on_where_the_answer_was_left(pair: Pair, oracle: Engine) -> None:
    prompt, params = prompt_of(40, seed=2), seeded(20, n=2)
    whole = alone(oracle, prompt, params, 1)
    one = seeded(20)
    call = pair.call(
        [*prompt, *whole[:7]], one, local_prefill=True, first_choice=1, num_prompt_tokens=40, attempt=2
    ).wait()
    assert call.token_ids(1) == whole[7:]


def test_logprobs_of_prompt_and_answer_are_those_of_the_split_path(pair: Pair) -> None:
    prompt, params = prompt_of(150, seed=3), greedy(8, logprobs=3, echo=True)
    local = pair.call(prompt, params, local_prefill=True).wait()
    split = pair.call(prompt, params).wait()
    assert local.first is not None
    assert split.first is not None
    assert len(local.first.prompt_logprobs) == 150
    assert local.first.prompt_logprobs == split.first.prompt_logprobs
    assert local.outputs == split.outputs


def test_first_token_may_be_the_whole_answer(pair: Pair, oracle: Engine) -> None:
    prompt = prompt_of(20, seed=4)
    call = pair.call(prompt, greedy(1), local_prefill=True).wait()
    assert call.token_ids() == alone(oracle, prompt, greedy(1))
    assert call.ended is not None
    assert call.ended.reason is Reason.FINISHED


def test_many_at_once_beside_split_ones(pair: Pair, oracle: Engine) -> None:
    prompts = [prompt_of(10 + 7 * i, seed=i) for i in range(12)]
    split = [pair.call(prompt, greedy(12)) for prompt in prompts]
    local = pair.generate(prompts, greedy(12), local_prefill=True)
    expected = [alone(oracle, prompt, greedy(12)) for prompt in prompts]
    assert [call.token_ids() for call in local] == expected
    assert [call.wait().token_ids() for call in split] == expected


def test_cancel_between_two_chunks_frees_the_rows(pair: Pair) -> None:
    call = pair.call(prompt_of(1500, seed=5), greedy(5), local_prefill=True).wait_for(Reserved)
    call.cancel()
    call.wait()
    assert call.ended is not None
    assert call.ended.reason is Reason.CANCELLED
    assert call.first is None


def test_a_failed_chunk_ends_its_request_only(pair: Pair, oracle: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(30, seed=6)
    running = pair.call(prompt, greedy(200)).wait_for(Token)
    forward = pair.decode_engine.forward

    def broken(batch: Any, *args: Any) -> Any:
        if not batch.is_decode:
            raise RuntimeError("no such luck")
        return forward(batch, *args)

    monkeypatch.setattr(pair.decode_engine, "forward", broken)
    failed = pair.call(prompt, greedy(5), local_prefill=True).wait()
    assert failed.ended is not None
    assert failed.ended.reason is Reason.FAILED
    assert running.wait().token_ids() == alone(oracle, prompt, greedy(200))


# What a chunk may hold.


def test_chunk_fills_the_time_that_is_left_and_no_more() -> None:
    pace = ChunkPace()
    assert pace.limit(1.0, 256) == LEAST_CHUNK  # nothing is known
    pace.observe(16, 0.016)
    assert pace.limit(0.1, 256) == 100
    assert pace.limit(1.0, 256) == 256
    assert pace.limit(0.0, 256) == LEAST_CHUNK  # or the prompt would never be done
    assert pace.limit(1.0, 8) == 8


def test_chunk_size_settles_where_overhead_and_tokens_fit() -> None:
    pace, size = ChunkPace(), LEAST_CHUNK
    for _ in range(50):
        pace.observe(size, 0.010 + 0.001 * size)
        size = pace.limit(0.050, 256)
    assert 0.045 <= 0.010 + 0.001 * size <= 0.051


def test_running_sequences_bound_the_chunks_by_their_strictest_target() -> None:
    desk = Desk()
    desk.start("relaxed")
    desk.start("strict", tpot_target_s=0.05)
    for _ in range(5):
        desk.step(seconds=0.01)
        desk.scheduler.pace.observe(2, 0.01)
    desk.submit("prompt", length=60, local_prefill=True)
    (chunk,) = desk.scheduler.next_chunks()
    assert (chunk.start, chunk.end) == (0, LEAST_CHUNK)
    desk.scheduler.computed([chunk], 0.016)  # 1 ms a token; 40 ms are left beside a step
    (chunk,) = desk.scheduler.next_chunks()
    assert (chunk.start, chunk.end) == (LEAST_CHUNK, LEAST_CHUNK + 40)
    desk.scheduler.end_all(Reason.CANCELLED)
    assert desk.blocks.num_free == desk.rows


def test_with_nobody_waiting_a_chunk_is_as_large_as_it_may_be() -> None:
    desk = Desk(rows=200)
    desk.submit("long", length=500, local_prefill=True)
    desk.submit("behind", length=20, local_prefill=True)
    (chunk,) = desk.scheduler.next_chunks()
    assert chunk.end - chunk.start == 256
    desk.scheduler.computed([chunk], 0.1)
    last, behind = desk.scheduler.next_chunks()
    assert (last.end, last.is_last) == (500, True)
    assert behind.generation.request.request_id == "behind"
    assert behind.end == 256 - (500 - 256)
    assert desk.of("long", Reserved) == [Reserved(b"")]
    desk.scheduler.computed([last, behind], 0.1)
    desk.scheduler.first_tokens(last.generation, [Sampled(7)], desk.now)
    (first,) = desk.of("long", FirstTokens)
    assert first.compute_ms == pytest.approx(100 + 100 * 244 / 256)
    assert desk.step() == ["long.0"]
    desk.scheduler.end_all(Reason.CANCELLED)
    assert desk.blocks.num_free == desk.rows
    assert len(desk.of("behind", Ended)) == 1


def test_higher_priority_is_computed_first() -> None:
    prompts = Prompts()
    for number, priority in enumerate((0, 5)):
        request = Request(
            request_id=str(number),
            attempt=1,
            token_ids=[1] * 10,
            num_prompt_tokens=10,
            sampling=SamplingParams(),
            priority=priority,
        )
        prompts.add(Generation(request, session=None, received_at=0.0, number=number))  # type: ignore[arg-type]
    assert [(each.generation.number, each.end) for each in prompts.next_chunks(15)] == [(1, 10), (0, 5)]
    assert prompts.num_tokens == 20
