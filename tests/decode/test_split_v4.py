"""DeepSeek-V4 through both workers: windows, sums and overlaps arrive with the entries, whatever the prompt's length.

What is right comes from one engine that samples a text token by token, with nothing else to do. The draws of a token
depend on its position alone, so that any beginning of that text, sent as a prompt, must go on as the text does: by a
hand-off at that length, which is also how an answer goes on elsewhere after its worker was lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from decode.request import Generation, Reason, Token
from engine.engine import Engine
from tests import tiny_models
from tests.decode.pair import Call, Pair, alone, load_engine, open_pair
from twinpool.sampling import SamplingParams

LENGTH = 150
# Every remainder of both rates (4 and 16), of the window (8) and of the block (16), and a few longer prompts.
LENGTHS = [*range(1, 41), *range(60, 68), 97, 98, 99, 126, 127, 128, 129]


def sampled(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=5, max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("v4") / "tiny", "deepseek-v4")


def load(model: Path, **options: Any) -> Engine:
    return load_engine(model, **{"kv_dtype": "int8", **options})


@pytest.fixture(scope="module")
def oracle(model: Path) -> Engine:
    return load(model)


@pytest.fixture(scope="module")
def text(oracle: Engine) -> list[int]:
    return text_of(oracle, LENGTH)


def text_of(oracle: Engine, length: int) -> list[int]:
    return [11, *alone(oracle, [11], sampled(length - 1))]


def going_on(pair: Pair, text: list[int], length: int, count: int, **options: Any) -> Call:
    """The text up to `length` is the prompt's one token and an answer so far; `count` tokens more are asked for."""
    return pair.call(text[:length], sampled(length - 1 + count), num_prompt_tokens=1, **options)


def assert_goes_on(
    pair: Pair, text: list[int], lengths: Iterable[int], count: int, *, shared: bool = True, **options: Any
) -> None:
    """shared: whether one prompt may begin with what another left in the prefix cache."""
    salts = {length: "" if shared else f"salt {length}" for length in lengths}
    calls = [going_on(pair, text, length, count, cache_salt=salt, **options) for length, salt in salts.items()]
    for call in pair.wait_for_all(calls):
        assert call.token_ids() == text[len(call.prompt) :][:count], len(call.prompt)


def test_the_text_is_no_repetition(text: list[int]) -> None:
    assert len(set(text)) > LENGTH / 3


def test_a_prompt_of_any_length_is_handed_over(model: Path, text: list[int]) -> None:
    with open_pair(load(model), load(model)) as pair:
        assert_goes_on(pair, text, LENGTHS, 6, shared=False)
        assert pair.sample("twinpool_prefill_computed_tokens_total") == sum(LENGTHS)


@pytest.mark.parametrize(
    "part",
    [
        *("window.latents", "window.rope", "unfinished.sums", "unfinished.overlap"),
        *("index_unfinished.sums", "index_unfinished.overlap"),
    ],
)
def test_no_part_of_a_state_could_be_left_out(model: Path, text: list[int], part: str) -> None:
    """Without this the test above would prove less than it says."""
    prefill_engine, decode_engine = load(model), load(model)
    with open_pair(prefill_engine, decode_engine) as pair:
        rows = pair.decode._scheduler._rows
        deal = rows.deal

        def deal_without(generation: Generation) -> None:
            for view in decode_engine.cache.views:
                found = view
                for name in part.split("."):
                    found = getattr(found, name, None)
                if found is not None:
                    found[generation.state] = 0
            deal(generation)

        rows.deal = deal_without
        calls = pair.wait_for_all([going_on(pair, text, length, 6) for length in (3, 15, 21, 22, 23, 31, 35)])
    assert any(call.token_ids() != text[len(call.prompt) :][:6] for call in calls)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp32"])
def test_other_formats_are_handed_over_in_shared_memory(model: Path, kv_dtype: str) -> None:
    oracle, *engines = (load(model, kv_dtype=kv_dtype) for _ in range(3))
    text = text_of(oracle, 52)
    with open_pair(*engines, transport="shm") as pair:
        assert_goes_on(pair, text, (1, 4, 7, 8, 15, 16, 18, 33, 50), 2)


@pytest.mark.parametrize(
    ("kv_dtype", "shared"),
    [
        ("int8", True),
        pytest.param("int8", False, marks=pytest.mark.slow),
        pytest.param("bf16", False, marks=pytest.mark.slow),
        pytest.param("fp32", False, marks=pytest.mark.slow),
    ],
)
def test_a_prompt_of_every_length_up_to_300_is_handed_over(tmp_path: Path, kv_dtype: str, shared: bool) -> None:
    """With the published rates, 4 and 128, and window: every remainder of them, twice."""
    changes = {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}}
    model = tiny_models.make(tmp_path / "tiny", "deepseek-v4", **changes, sliding_window=128)
    oracle, *engines = (load_engine(model, kv_dtype=kv_dtype, block_size=128, states=320) for _ in range(3))
    text = text_of(oracle, 304)
    with open_pair(*engines, max_waiting=300) as pair:
        assert_goes_on(pair, text, range(1, 301), 3, shared=shared)


@pytest.mark.parametrize("budget", [16, 24, 50])
def test_chunks_of_any_size_in_a_batch_give_the_same_text(model: Path, text: list[int], budget: int) -> None:
    with open_pair(load(model), load(model), token_budget=budget) as pair:
        assert_goes_on(pair, text, (140, 5, 70, 16), 4)


def test_prompts_computed_by_the_decode_worker_give_the_same_text(model: Path, text: list[int]) -> None:
    with open_pair(load(model), load(model), prefill_chunk=20) as pair:
        assert_goes_on(pair, text, (1, 16, 67), 4, local_prefill=True)


def test_choices_go_their_own_ways(model: Path, oracle: Engine, text: list[int]) -> None:
    params = sampled(6, n=3)
    with open_pair(load(model), load(model)) as pair:
        (call,) = pair.generate([text[:37]], params)
    answers = [call.token_ids(choice) for choice in range(3)]
    assert answers == [alone(oracle, text[:37], params, choice) for choice in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3


def test_prefixes_are_taken_up_at_their_snapshots_as_long_as_these_last(model: Path, text: list[int]) -> None:
    def cached(length: int) -> float:
        before = pair.sample("twinpool_prefill_cached_tokens_total")
        assert_goes_on(pair, text, [length], 2)
        return pair.sample("twinpool_prefill_cached_tokens_total") - before

    with open_pair(load(model, states=2), load(model), token_budget=64) as pair:
        assert [cached(length) for length in (100, 100, 111)] == [0, 96, 96]
        assert cached(70) == 0  # there is room for one snapshot, of the prompt before
        assert cached(100) == 64


def test_preempted_answers_come_back_with_windows_sums_and_overlaps(model: Path, text: list[int]) -> None:
    with open_pair(load(model), load(model, rows=10)) as pair:
        assert_goes_on(pair, text, (29, 30, 35, 38), 24)
        assert pair.sample("twinpool_decode_preemptions_total") > 0
        assert pair.sample("twinpool_decode_restores_total") == pair.sample("twinpool_decode_preemptions_total")


def test_an_answer_cut_off_in_the_middle_frees_its_rows(model: Path, text: list[int]) -> None:
    with open_pair(load(model), load(model)) as pair:
        call = going_on(pair, text, 50, 90).wait_for(Token)
        call.cancel()
        call.wait()
        assert call.ended is not None
        assert call.ended.reason is Reason.CANCELLED
        pair.assert_baseline()
        assert_goes_on(pair, text, [50], 3)
