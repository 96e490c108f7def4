"""Models with experts and with latents through both workers: the text is that of one engine alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.engine import Engine
from tests import tiny_models
from tests.decode.pair import alone, greedy, load_engine, open_pair
from tests.decode.test_split_pools import prompt_of, prompts

KINDS = ["qwen3-moe", "deepseek-v3"]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("families") / request.param, request.param)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Engine:
    return load_engine(model)


@pytest.mark.parametrize("kv_dtype", ["int8", "bf16", "fp32"])
def test_answers_through_both_workers_equal_one_engine(model: Path, kv_dtype: str) -> None:
    oracle, *engines = (load_engine(model, kv_dtype=kv_dtype) for _ in range(3))
    with open_pair(*engines) as pair:
        for length in (1, 2, 15, 16, 17, 33, 100):
            (call,) = pair.generate([prompt_of(length)], greedy(12))
            assert call.token_ids() == alone(oracle, prompt_of(length), greedy(12)), length


def test_prefill_in_the_plain_form_and_decode_in_the_absorbed_one_fit_together(tmp_path: Path) -> None:
    model = tiny_models.make(tmp_path, "deepseek-v3")
    oracle, plain, absorbed = (load_engine(model, latent_form=form) for form in ("absorbed", "plain", "absorbed"))
    with open_pair(plain, absorbed, token_budget=24) as pair:
        for length in (1, 16, 70):
            (call,) = pair.generate([prompt_of(length)], greedy(12))
            assert call.token_ids() == alone(oracle, prompt_of(length), greedy(12)), length


def test_batched_chunked_and_cached_prompts_give_the_same_text(model: Path, oracle: Engine) -> None:
    together = [*prompts(10, seed=5), prompt_of(150), prompt_of(70)]
    with open_pair(load_engine(model), load_engine(model), token_budget=24) as pair:
        calls = pair.generate(together, greedy(12))
        (again,) = pair.generate([prompt_of(150)], greedy(12))
        assert again.first is not None
        assert again.first.cached_tokens == 144
    for call in (*calls, again):
        assert call.token_ids() == alone(oracle, call.prompt, greedy(12))


@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 64), (64, 16)])
@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
def test_blocks_of_another_size_are_made_on_the_way(
    model: Path, kv_dtype: str, prefill_block: int, decode_block: int
) -> None:
    sizes = {"kv_dtype": kv_dtype, "rows": 128}
    oracle = load_engine(model, block_size=decode_block, **sizes)
    engines = (load_engine(model, block_size=size, **sizes) for size in (prefill_block, decode_block))
    with open_pair(*engines, token_budget=48) as pair:
        for length in (1, 16, 63, 65, 130):
            (call,) = pair.generate([prompt_of(length)], greedy(6))
            assert call.token_ids() == alone(oracle, prompt_of(length), greedy(6)), length


def test_preempted_and_resumed_answers_are_those_of_a_lone_run(model: Path, oracle: Engine) -> None:
    expected = [alone(oracle, prompt_of(40, seed), greedy(40)) for seed in range(4)]
    with open_pair(load_engine(model), load_engine(model, rows=14), swap_rows=64) as pair:
        calls = pair.generate([prompt_of(40, seed) for seed in range(4)], greedy(40))
        assert pair.sample("twinpool_decode_preemptions_total") > 0
        resumed = pair.call(prompt_of(40, 0) + expected[0][:9], greedy(40), attempt=2, num_prompt_tokens=40).wait()
    assert [call.token_ids() for call in calls] == expected
    assert resumed.token_ids() == expected[0][9:]
