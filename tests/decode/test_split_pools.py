from __future__ import annotations

import random
from pathlib import Path

import pytest

from decode.request import Reason
from engine.engine import Engine
from tests import tiny_models
from tests.decode.pair import alone, greedy, load_engine, open_pair
from twinpool.sampling import FinishReason


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Engine:
    return load_engine(model)


def prompts(count: int, seed: int, low: int = 1, high: int = 90) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(10, 250) for _ in range(draw.randrange(low, high))] for _ in range(count)]


def test_int8_kv_through_both_workers_is_token_identical_to_one_engine(model: Path, oracle: Engine) -> None:  # C6
    with open_pair(load_engine(model), load_engine(model)) as pair:
        lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 100]
        for prompt in [prompts(1, length, length, length + 1)[0] for length in lengths]:
            (call,) = pair.generate([prompt], greedy(24))
            assert call.token_ids() == alone(oracle, prompt, greedy(24)), len(prompt)
            assert call.finish_reason() is FinishReason.LENGTH
            assert call.ended is not None
            assert call.ended.reason is Reason.FINISHED
            assert call.num_ended == 1
