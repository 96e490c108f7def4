"""Both workers, the real engine and the real transfer, in one process: the text is that of one engine alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode.request import Reason
from engine.engine import Engine
from tests.decode.pair import Pair, alone, greedy, open_pair
from twinpool.sampling import FinishReason, SamplingParams

EngineFactory = Callable[..., Engine]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(10, 250) for _ in range(length)]


def prompts(count: int, seed: int, low: int = 1, high: int = 90) -> list[list[int]]:
    draw = random.Random(seed)
    return [prompt_of(draw.randrange(low, high), number) for number in range(count)]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp32"])
def test_answers_through_both_workers_equal_one_engine(engine: EngineFactory, kv_dtype: str) -> None:  # C6
    oracle = engine(kv_dtype=kv_dtype)
    with open_pair(engine(kv_dtype=kv_dtype), engine(kv_dtype=kv_dtype)) as pair:
        for length in (1, 2, 15, 16, 17, 31, 32, 33, 100):
            (call,) = pair.generate([prompt_of(length)], greedy(20))
            assert call.token_ids() == alone(oracle, prompt_of(length), greedy(20)), length
            assert call.finish_reason() is FinishReason.LENGTH
            assert call.ended is not None
            assert call.ended.reason is Reason.FINISHED
            assert call.num_ended == 1


def test_who_shares_the_batch_does_not_change_the_text(engine: EngineFactory, oracle: Engine) -> None:  # C2, C7
    together = prompts(24, seed=5)
    together[8] = together[16] = together[0]
    with open_pair(engine(), engine()) as pair:
        calls = pair.generate(together, greedy(24))
        assert pair.sample("twinpool_decode_batch_sequences_sum") > pair.sample("twinpool_decode_batch_sequences_count")
    for prompt, call in zip(together, calls, strict=True):
        assert call.token_ids() == alone(oracle, prompt, greedy(24))


def test_chunked_prefill_equals_whole(engine: EngineFactory, oracle: Engine) -> None:
    with open_pair(engine(), engine(), token_budget=24) as pair:
        calls = pair.generate([prompt_of(300), prompt_of(70), prompt_of(16)], greedy(16))
        assert pair.sample("twinpool_prefill_batch_tokens_count") >= 386 / 24
    for call in calls:
        assert call.token_ids() == alone(oracle, call.prompt, greedy(16))


def test_prefix_cache_hit_equals_miss_and_still_ships_every_row(engine: EngineFactory, oracle: Engine) -> None:
    prompt = prompt_of(100)
    with open_pair(engine(), engine()) as pair:
        (miss,) = pair.generate([prompt], greedy(16))
        (hit,) = pair.generate([prompt], greedy(16))
        (longer,) = pair.generate([prompt[:64] + prompt_of(30)], greedy(16))
        assert pair.sample("twinpool_prefill_computed_tokens_total") == 100 + (100 - 96) + 30
    for call, cached in ((miss, 0), (hit, 96), (longer, 64)):
        assert call.first is not None
        assert call.first.cached_tokens == cached
        assert call.token_ids() == alone(oracle, call.prompt, greedy(16))
        assert call.transferred is not None
        assert call.transferred.rows == 3 * -(-len(call.prompt) // 16)  # 3 layers


@pytest.mark.parametrize("length", [7, 32, 45])
def test_three_choices_share_one_prompt(engine: EngineFactory, oracle: Engine, length: int) -> None:  # P3, P5
    params = SamplingParams(temperature=0.8, seed=11, n=3, max_tokens=40, ignore_eos=True)
    with open_pair(engine(), engine()) as pair:
        (call,) = pair.generate([prompt_of(length)], params)
        assert pair.sample("twinpool_prefill_computed_tokens_total") == length
        assert pair.sample("twinpool_decode_transfer_rows_total") == 3 * -(-length // 16)
    answers = [call.token_ids(choice) for choice in range(3)]
    assert answers == [alone(oracle, prompt_of(length), params, choice) for choice in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3


@pytest.mark.parametrize("delivered", [1, 9])
def test_resumed_choice_goes_on_as_if_nothing_had_happened(
    engine: EngineFactory, oracle: Engine, delivered: int
) -> None:
    whole = SamplingParams(
        temperature=0.9, seed=3, n=3, max_tokens=30, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4
    )
    one = SamplingParams(
        temperature=0.9, seed=3, n=1, max_tokens=30, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4
    )
    prompt = prompt_of(37)
    expected = alone(oracle, prompt, whole, choice=2)
    with open_pair(engine(), engine()) as pair:
        call = pair.call(
            prompt + expected[:delivered], one, attempt=2, first_choice=2, num_prompt_tokens=len(prompt)
        ).wait()
    assert expected[:delivered] + call.token_ids(2) == expected


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_exactly_max_tokens_come_out(engine: EngineFactory, oracle: Engine, max_tokens: int) -> None:  # P1
    with open_pair(engine(), engine()) as pair:
        (call,) = pair.generate([prompt_of(20)], greedy(max_tokens))
    assert call.token_ids() == alone(oracle, prompt_of(20), greedy(max_tokens))
    assert len(call.token_ids()) == max_tokens
    assert call.finish_reason() is FinishReason.LENGTH


def test_stop_token_ends_a_choice_where_it_occurs(engine: EngineFactory, oracle: Engine) -> None:
    free = alone(oracle, prompt_of(20), greedy(30))
    for position in (0, 1, 12):
        stopping = greedy(30, stop_token_ids=(free[position],))
        with open_pair(engine(), engine()) as pair:
            (call,) = pair.generate([prompt_of(20)], stopping)
        assert call.token_ids() == free[: free.index(free[position]) + 1]
        assert call.finish_reason() is FinishReason.STOP


def test_echoed_prompt_has_the_logprobs_of_transformers(engine: EngineFactory, model: Path) -> None:
    prompt = prompt_of(60)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    with open_pair(engine(kv_dtype="fp32"), engine(kv_dtype="fp32"), token_budget=25) as pair:
        pair.generate([prompt], greedy(2))  # a prefix cache hit would leave nothing to take logprobs from
        (call,) = pair.generate([prompt], greedy(2, echo=True, logprobs=3))
    assert call.first is not None
    got = call.first.prompt_logprobs
    assert [token.token_id for token in got] == prompt
    assert got[0].logprob is None
    for position, token in enumerate(got[1:]):
        assert token.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-4)
        assert token.top is not None
        assert [token_id for token_id, _ in token.top] == expected[position].topk(3).indices.tolist()
    assert call.first.tokens[0].logprob == pytest.approx(float(expected[-1].max()), abs=1e-4)


def test_context_ends_where_the_cache_does(engine: EngineFactory, oracle: Engine) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)  # as many tokens as fit
    with open_pair(engine(), engine(rows=4)) as pair:
        (call,) = pair.generate([prompt_of(33)], params)
    assert call.finish_reason() is FinishReason.LENGTH
    assert len(call.token_ids()) == 4 * 16 - 33 + 1  # the last token needs no room
    assert call.token_ids() == alone(oracle, prompt_of(33), greedy(len(call.token_ids())))


def test_preemption_does_not_change_the_text(engine: EngineFactory, oracle: Engine) -> None:  # C5
    waiting = prompts(8, seed=2, low=20, high=60)
    with open_pair(engine(), engine(rows=14)) as pair:
        calls = pair.generate(waiting, greedy(60))
        assert pair.sample("twinpool_decode_preemptions_total") > 0
        assert pair.sample("twinpool_decode_restores_total") == pair.sample("twinpool_decode_preemptions_total")
    for call in calls:
        assert call.token_ids() == alone(oracle, call.prompt, greedy(60))
        assert call.ended is not None
        assert call.ended.reason is Reason.FINISHED


def test_preemption_of_choices_that_share_rows(engine: EngineFactory, oracle: Engine) -> None:
    params = SamplingParams(temperature=0.8, seed=4, n=4, max_tokens=50, ignore_eos=True)
    with open_pair(engine(), engine(rows=11)) as pair:
        (call,) = pair.generate([prompt_of(41)], params)
        assert pair.sample("twinpool_decode_preemptions_total") > 0
    for choice in range(4):
        assert call.token_ids(choice) == alone(oracle, prompt_of(41), params, choice)


def test_without_swap_the_preempted_request_can_be_resumed_elsewhere(engine: EngineFactory, oracle: Engine) -> None:
    waiting = prompts(4, seed=8, low=30, high=40)
    with open_pair(engine(), engine(rows=10), swap_rows=0) as pair:
        calls = pair.generate(waiting, greedy(50))
        preempted = [call for call in calls if call.ended is not None and call.ended.reason is Reason.PREEMPTED]
        assert preempted
        for call in calls:
            text = call.token_ids()
            if call in preempted:
                again = pair.call(
                    call.prompt + text,
                    greedy(50),
                    request_id=call.request_id,
                    attempt=2,
                    num_prompt_tokens=len(call.prompt),
                ).wait()
                text += again.token_ids()
            assert text == alone(oracle, call.prompt, greedy(50))


def test_every_metric_counts_and_both_sides_agree(engine: EngineFactory) -> None:  # S2
    def assert_observed(pair: Pair, *names: str) -> None:
        for name in names:
            assert pair.sample(f"twinpool_{name}_count") > 0, name
            assert pair.sample(f"twinpool_{name}_sum") > 0, name

    prefill_engine = engine()
    with open_pair(prefill_engine, engine()) as pair:
        (call,) = pair.generate([prompt_of(50)], greedy(10))
        assert_observed(pair, "prefill_queue_seconds", "prefill_prefill_seconds", "prefill_step_seconds")
        assert_observed(pair, "prefill_batch_tokens", "prefill_transfer_seconds", "prefill_batch_prompts")
        assert_observed(pair, "decode_queue_seconds", "decode_transfer_seconds", "decode_reserved_seconds")
        assert_observed(pair, "decode_request_seconds", "decode_step_seconds", "decode_itl_seconds")
        num_bytes = 4 * prefill_engine.cache.layout.block_bytes
        assert pair.sample("twinpool_prefill_transfer_bytes_total") == num_bytes
        assert pair.sample("twinpool_decode_transfer_bytes_total") == num_bytes
        assert pair.sample("twinpool_decode_tokens_total") == 9
        assert pair.sample("twinpool_decode_itl_seconds_count") == 9
        assert pair.sample("twinpool_prefill_ended_total", outcome="ok") == 1
        assert pair.sample("twinpool_decode_ended_total", reason="finished") == 1
        assert pair.sample("twinpool_decode_itl_seconds_sum") == pytest.approx(
            pair.sample("twinpool_decode_request_seconds_sum")
        )
    assert call.first is not None
    assert call.transferred is not None
    assert call.ended is not None
    assert call.first.prefill_ms > 0
    assert call.transferred.bytes == num_bytes
    assert 0 <= call.transferred.transfer_wait_ms <= call.transferred.transfer_ms
    assert call.ended.decode_ms > 0
