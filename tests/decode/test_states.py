"""Models that remember something for every sequence beside its blocks, through both workers.

Run with a stand-in whose next token depends on every byte that it should have (tests/stateful.py).
"""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from decode.request import Ended, Reason, Reserved, Token
from engine.engine import Engine
from engine.state_pool import StatePool
from kvtransfer import transports
from prefill.request import Finished, FirstTokens, NextToken
from prefill.request import Request as PrefillRequest
from tests import stateful
from tests.decode.pair import TIMEOUT_S, Call, Pair, alone, cancel_at_random, greedy, open_pair
from tests.decode.test_split_pools import prompt_of, prompts
from tests.fakes import Faults
from twinpool.errors import ChecksumMismatch, ConfigError, Incompatible, InvalidRequest, PeerLost
from twinpool.sampling import SamplingParams

EngineFactory = Callable[..., Engine]
BLOCK = 16


def seeded(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=11, n=n, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture
def engine() -> EngineFactory:
    return stateful.load


@pytest.fixture(scope="module")
def oracle() -> Engine:
    return stateful.load()


@pytest.fixture
def pair(engine: EngineFactory) -> Iterator[Pair]:
    with open_pair(engine(), engine()) as pair:
        yield pair


def assert_right(pair: Pair, oracle: Engine, *lengths: int) -> None:
    for call in pair.generate([prompt_of(length, 99) for length in lengths or (40,)], greedy(12)):
        assert call.token_ids() == alone(oracle, call.prompt, greedy(12))


def cached(pair: Pair, prompt: list[int]) -> int:
    """Tokens of the prompt that prefill did not compute; the answer must be right all the same."""
    (call,) = pair.generate([prompt], greedy(6))
    assert call.token_ids() == stateful.answer(prompt, 6)
    assert call.first is not None
    return call.first.cached_tokens


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_answers_of_prompts_of_every_length_are_those_of_the_definition(engine: EngineFactory, transport: str) -> None:
    waiting = [prompt_of(length) for length in range(1, 70)]
    with open_pair(engine(rows=600, states=70), engine(rows=600), transport=transport) as pair:
        for call in pair.generate(waiting, greedy(12)):
            assert call.token_ids() == stateful.answer(call.prompt, 12), len(call.prompt)
            assert call.transferred is not None
            assert call.transferred.rows == 2 * -(-len(call.prompt) // BLOCK) + 2


@pytest.mark.parametrize("transport", ["collective", "mooncake+tcp", "nixl+tcp"])
def test_every_transport_carries_states_as_it_carries_blocks(engine: EngineFactory, transport: str) -> None:
    try:
        transports.create(transport).close()
    except ConfigError as error:
        pytest.skip(error.message)
    with open_pair(engine(), engine(), transport=transport) as pair:
        for call in pair.generate([prompt_of(length) for length in (1, 15, 16, 17, 33, 50)], greedy(8)):
            assert call.token_ids() == stateful.answer(call.prompt, 8)


@pytest.mark.parametrize("budget", [16, 24, 50])
def test_chunks_of_any_size_in_a_batch_give_the_same_answers(engine: EngineFactory, budget: int) -> None:
    together = [*prompts(12, seed=5), prompt_of(150), prompt_of(70), prompt_of(64)]
    with open_pair(engine(), engine(), token_budget=budget) as pair:
        for call in pair.generate(together, greedy(12)):
            assert call.token_ids() == stateful.answer(call.prompt, 12)


@pytest.mark.parametrize("length", [7, 32, 45])
def test_choices_begin_with_the_same_state_and_go_their_own_ways(
    engine: EngineFactory, oracle: Engine, length: int
) -> None:
    params = seeded(30, n=3)
    with open_pair(engine(), engine(states=3)) as pair:
        (call,) = pair.generate([prompt_of(length)], params)
        assert pair.sample("twinpool_decode_transfer_rows_total") == 2 * -(-length // BLOCK) + 2  # once for all
    answers = [call.token_ids(choice) for choice in range(3)]
    assert answers == [alone(oracle, prompt_of(length), params, choice) for choice in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3


def test_more_choices_than_states_are_refused_with_the_numbers(engine: EngineFactory) -> None:
    with open_pair(engine(), engine(states=2)) as pair:
        call = pair.call(prompt_of(20), seeded(5, n=3)).wait()
        assert call.ended is not None
        assert call.ended.reason is Reason.REJECTED
        assert isinstance(call.ended.error, InvalidRequest)
        assert call.ended.error.field == "sampling.n"
        assert "3 choices" in call.ended.error.message
        assert "holds 2" in call.ended.error.message


def test_preempted_answers_come_back_with_their_states(engine: EngineFactory, oracle: Engine) -> None:
    waiting = prompts(8, seed=2, low=20, high=60)
    with open_pair(engine(), engine(rows=14, states=8)) as pair:
        calls = pair.generate(waiting, greedy(60))
        assert pair.sample("twinpool_decode_preemptions_total") > 0
        assert pair.sample("twinpool_decode_restores_total") == pair.sample("twinpool_decode_preemptions_total")
    for call in calls:
        assert call.token_ids() == stateful.answer(call.prompt, 60)


@pytest.mark.parametrize("swap_rows", [0, 7])
def test_without_room_to_swap_an_answer_is_resumed_by_computing_it_again(engine: EngineFactory, swap_rows: int) -> None:
    waiting = prompts(5, seed=8, low=30, high=40)
    with open_pair(engine(), engine(rows=10), swap_rows=swap_rows) as pair:
        calls = pair.generate(waiting, greedy(50))
        preempted = [call for call in calls if call.ended is not None and call.ended.reason is Reason.PREEMPTED]
        assert preempted
        for call in calls:
            text = call.token_ids()
            if call in preempted:
                options = {"attempt": 2, "num_prompt_tokens": len(call.prompt), "request_id": call.request_id}
                text += pair.call(call.prompt + text, greedy(50), **options).wait().token_ids()
            assert text == stateful.answer(call.prompt, 50)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_who_finds_no_row_for_its_state_waits_for_one(engine: EngineFactory, side: str) -> None:
    sizes = {"prefill": 16, "decode": 16} | {side: 1}
    with open_pair(engine(states=sizes["prefill"]), engine(states=sizes["decode"])) as pair:
        for call in pair.generate(prompts(6, seed=3), greedy(12)):
            assert call.token_ids() == stateful.answer(call.prompt, 12)


def test_prompts_computed_by_the_decode_worker_begin_with_nothing(engine: EngineFactory) -> None:
    with open_pair(engine(), engine(states=3), prefill_chunk=20) as pair:
        waiting = [prompt_of(length, seed) for seed in range(2) for length in (1, 16, 70)]
        for call in pair.generate(waiting, greedy(12), local_prefill=True):
            assert call.token_ids() == stateful.answer(call.prompt, 12)
        (call,) = pair.generate([prompt_of(50)], seeded(12, n=3), local_prefill=True)
        assert len({tuple(call.token_ids(choice)) for choice in range(3)}) == 3
        assert_right(pair, stateful.load())


def whole_answers(pair: Pair, waiting: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Of the prefill worker alone, as while the decode pool is empty."""
    events: queue.Queue[tuple[int, Any]] = queue.Queue()
    for number, prompt in enumerate(waiting):
        request = PrefillRequest(
            request_id=f"whole-{number}",
            attempt=1,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=greedy(max_tokens),
            input_class="short",
            generate=True,
        )
        pair.prefill.submit(request, lambda event, number=number: events.put((number, event)))
    answers: list[list[int]] = [[] for _ in waiting]
    left = len(waiting)
    while left:
        number, event = events.get(timeout=TIMEOUT_S)
        if isinstance(event, FirstTokens):
            answers[number] += [token.token_id for token in event.tokens]
        elif isinstance(event, NextToken):
            answers[number].append(event.token.token_id)
        elif isinstance(event, Finished):
            assert event.error is None
            left -= 1
    return answers


@pytest.mark.parametrize("rows", [256, 14])
def test_whole_answers_of_the_prefill_worker_survive_the_loss_of_their_rows(engine: EngineFactory, rows: int) -> None:
    waiting = prompts(8, seed=2, low=20, high=60)
    with open_pair(engine(rows=rows, states=8), engine()) as pair:
        answers = whole_answers(pair, waiting, 60)
        assert bool(pair.sample("twinpool_prefill_preemptions_total")) == (rows == 14)
    assert answers == [stateful.answer(prompt, 60) for prompt in waiting]


# The prefix cache


def test_a_prefix_is_taken_up_where_a_snapshot_was_left(engine: EngineFactory) -> None:
    prompt = prompt_of(100)
    with open_pair(engine(), engine(), token_budget=48) as pair:
        assert cached(pair, prompt) == 0
        assert cached(pair, prompt) == 96
        assert cached(pair, prompt[:97] + prompt_of(30)) == 96
        assert cached(pair, prompt[:60] + prompt_of(30)) == 48  # where a chunk had ended
        assert cached(pair, prompt[:40] + prompt_of(30)) == 0
        whole = prompt_of(64, seed=1)
        assert cached(pair, whole) == 0
        assert cached(pair, whole) == 48  # its last token is left to compute
        assert cached(pair, [*whole, 5]) == 64
        assert pair.sample("twinpool_prefill_snapshots") > 0


def test_a_prefix_whose_snapshot_had_to_go_is_computed_again(engine: EngineFactory) -> None:
    prompt = prompt_of(100)
    with open_pair(engine(states=2), engine()) as pair:
        assert cached(pair, prompt) == 0
        assert cached(pair, prompt) == 96
        pair.generate([prompt_of(40, seed) for seed in range(4)], greedy(6))
        assert cached(pair, prompt) == 0


def test_a_snapshot_whose_blocks_had_to_go_is_of_no_use(engine: EngineFactory) -> None:
    prompt = prompt_of(100)
    with open_pair(engine(rows=8), engine()) as pair:
        assert cached(pair, prompt) == 0
        assert cached(pair, prompt_of(120, seed=1)) == 0
        assert cached(pair, prompt) == 0


def test_salts_keep_snapshots_apart(engine: EngineFactory) -> None:
    pool = StatePool(engine().cache)
    blocks = engine().blocks
    prompt, own = prompt_of(33), blocks.allocate(3) or []
    (state,) = pool.allocate(1) or []
    digest = blocks.publish(prompt, own, "tenant a")
    assert digest is not None
    pool.publish(digest, state)
    assert blocks.match_prefix(prompt, "tenant a", pool) == own[:2]
    assert blocks.match_prefix(prompt, "tenant b", pool) == []


def test_routers_hear_of_prefixes_that_can_be_taken_up_and_no_others(pair: Pair) -> None:
    prompt = prompt_of(100)
    cached(pair, prompt)
    end = time.monotonic() + 10
    blocks, states = pair.prefill_engine.blocks, pair.prefill_engine.states
    while not pair.prefill.load.prefixes and time.monotonic() < end:
        time.sleep(0.01)
    assert len(blocks.published(100)) == 6
    assert len(pair.prefill.load.prefixes) == 1
    assert blocks.whole(states.published()) == states.published()


# What goes wrong


def test_the_stand_in_notices_states_that_are_not_copied(
    engine: EngineFactory, oracle: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this and the next one the tests above would prove nothing."""
    params = seeded(20, n=2)
    expected = [alone(oracle, prompt_of(40), params, choice) for choice in range(2)]
    monkeypatch.setattr(StatePool, "copy", lambda self, row, to: None)
    with open_pair(engine(), engine()) as pair:
        (call,) = pair.generate([prompt_of(40)], params)
        (again,) = pair.generate([prompt_of(40)], params)  # from a snapshot
    assert [call.token_ids(choice) == expected[choice] for choice in range(2)] == [True, False]
    assert again.token_ids(0) != expected[0]


def test_the_stand_in_notices_states_that_do_not_come_back(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_pair(engine(), engine(rows=14)) as pair:
        restore = pair.decode._swap.restore
        own = pair.decode_engine.states.copy

        def without_state(slots: list[int], block_ids: list[int], states: list[int]) -> None:
            restore(slots, block_ids, states)
            own((states[0] + 1) % 16, to=states[0])

        monkeypatch.setattr(pair.decode._swap, "restore", without_state)
        calls = pair.generate(prompts(8, seed=2, low=20, high=60), greedy(60))
        assert pair.sample("twinpool_decode_restores_total") > 0
    assert any(call.token_ids() != stateful.answer(call.prompt, 60) for call in calls)


@pytest.mark.parametrize("moment", [Reserved, FirstTokens, Token])
def test_cancel_frees_both_sides(pair: Pair, oracle: Engine, moment: type) -> None:
    call = pair.call(prompt_of(200), seeded(1000, n=2)).wait_for(moment)
    call.cancel()
    call.wait()
    assert call.ended is not None
    assert call.ended.reason is Reason.CANCELLED
    pair.assert_baseline()
    assert_right(pair, oracle)


def test_cancel_of_one_choice_leaves_the_others(pair: Pair, oracle: Engine) -> None:
    params = seeded(30, n=3)
    call = pair.call(prompt_of(20), params).wait_for(Token)
    pair.decode.cancel(call.request_id, 1, 0)
    call.wait()
    for choice in (1, 2):
        assert call.token_ids(choice) == alone(oracle, prompt_of(20), params, choice)


def test_many_cancels_at_random_moments_leak_no_state(engine: EngineFactory, oracle: Engine) -> None:
    draw = random.Random(17)
    with open_pair(engine(rows=120, states=9), engine(rows=60, states=7), token_budget=64) as pair:
        calls = [pair.call(prompt, greedy(60)) for prompt in prompts(50, seed=9, low=1, high=150)]
        cancel_at_random(calls, draw)
        pair.assert_baseline()
        assert_right(pair, oracle, 5, 40, 90)


@pytest.mark.parametrize(
    ("faults", "error"),
    [(Faults(corrupt_every=2), ChecksumMismatch), (Faults(break_after_rows=9), PeerLost)],
)
def test_broken_transfer_is_never_decoded(engine: EngineFactory, faults: Faults, error: type) -> None:
    with open_pair(engine(), engine(), faults=faults) as pair:
        call = pair.call(prompt_of(60), greedy(20)).wait()
        assert call.ended is not None
        assert call.prefill_end is not None
        assert error in (type(call.ended.error), type(call.prefill_end.error))
        assert len(call.outputs.get(0, [])) <= 1


def test_blocks_of_another_size_are_refused_with_the_reason(engine: EngineFactory) -> None:
    with open_pair(engine(block_size=16), engine(block_size=32)) as pair:
        call = pair.call(prompt_of(40), greedy(5)).wait()
        assert call.prefill_end is not None
        assert isinstance(call.prefill_end.error, Incompatible)
        assert "the block size" in call.prefill_end.error.message


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_all_of_it_at_once(engine: EngineFactory, transport: str, count: int) -> None:
    """Prefixes, choices, local prefill, preemption, cancels, broken transfers: what comes is right, however little."""
    draw, bases = random.Random(count), [prompt_of(120, seed) for seed in range(3)]
    faults = Faults(corrupt_every=97)
    expected: dict[tuple[int, ...], list[int]] = {}
    small = {"prefill": engine(rows=60, states=6), "decode": engine(rows=26, states=7)}
    with open_pair(*small.values(), token_budget=48, swap_rows=20, transport=transport, faults=faults) as pair:
        live: dict[Call, int] = {}
        left = count
        while left or live:
            while left and len(live) < 14:
                left -= 1
                prompt = draw.choice(bases)[: draw.randrange(1, 110)] + prompt_of(draw.randrange(8), draw.randrange(4))
                options = {"local_prefill": draw.random() < 0.2, "priority": draw.choice([-1, 0, 0, 1])}
                call = pair.call(prompt, greedy(draw.randrange(1, 40), n=draw.choice([1, 1, 2, 3])), **options)
                live[call] = draw.randrange(60) if draw.random() < 0.2 else 1 << 30  # events until it is cancelled
            for call in [each for each in live if each.open and not each.events.empty()]:
                call.step()
                live[call] -= 1
                if not live[call]:
                    call.cancel()
            for call in [each for each in live if not each.open]:
                del live[call]
                key = tuple(call.prompt)
                right = expected[key] = expected.get(key) or stateful.answer(call.prompt, 40)
                for tokens in (call.token_ids(choice) for choice in call.outputs):
                    assert tokens == right[: len(tokens)]
                    if call.ended is not None and call.ended.reason is Reason.FINISHED:
                        assert len(tokens) == call.params.max_tokens
            time.sleep(0.0002)
        for name in ("restores", "local_prefill_tokens", "transfer_failures"):
            assert count < 1000 or pair.sample(f"twinpool_decode_{name}_total") > 0, name
        assert pair.sample("twinpool_prefill_cached_tokens_total") > 0


def test_an_ended_request_is_ended_once(pair: Pair) -> None:
    call = pair.call(prompt_of(30), greedy(3)).wait_for(Ended).wait()
    assert call.num_ended == 1
    assert pair.sample("twinpool_decode_states_total") == 16
    assert pair.sample("twinpool_prefill_states_total") == 16
