"""What another request left in the prefill worker's cache does not travel: a row goes as a whole, but holds its own
request's bytes and zeros."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny_models
from tests.decode.pair import Pair, alone, greedy, load_engine, open_pair
from tests.decode.test_split_pools import prompt_of

SECRET, OTHER = 0xA5, 0x5A
LENGTHS = (1, 15, 16, 17, 100)  # of blocks of 16


def fill(pair: Pair) -> None:
    """As if every row had been somebody's."""
    for engine, byte in ((pair.prefill_engine, SECRET), (pair.decode_engine, OTHER)):
        for buffer in engine.cache.buffers:
            buffer.fill_(byte)


@pytest.mark.parametrize("token_budget", [512, 8])  # whole, or in chunks that end within a block
@pytest.mark.parametrize(
    ("kind", "kv_dtype", "transport"),
    [
        ("llama", "int8", "tcp"),
        ("llama", "bf16", "shm"),
        ("deepseek-v3", "int8", "tcp"),
        ("deepseek-v4", "int8", "shm"),
    ],
)
def test_no_byte_of_an_earlier_request_reaches_the_decode_worker(
    tmp_path: Path, kind: str, kv_dtype: str, transport: str, token_budget: int
) -> None:
    model = tiny_models.make(tmp_path, kind)
    oracle, *engines = (load_engine(model, kv_dtype=kv_dtype) for _ in range(3))
    with open_pair(*engines, transport=transport, token_budget=token_budget) as pair:
        fill(pair)
        calls = pair.generate([prompt_of(length) for length in LENGTHS], greedy(4))
        for call in calls:
            assert call.token_ids() == alone(oracle, call.prompt, greedy(4))
        for buffer in pair.decode_engine.cache.buffers:
            assert bytes([SECRET]) * 8 not in buffer.numpy().tobytes()
        assert any(bytes([SECRET]) * 8 in buffer.numpy().tobytes() for buffer in pair.prefill_engine.cache.buffers)
