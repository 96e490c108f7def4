"""T1: block sizes 16, 32 and 64 on either side; the text is that of one engine with the decode worker's block size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.engine import Engine
from tests.decode.pair import alone, greedy, open_pair
from tests.decode.test_split_pools import prompt_of

LENGTHS = (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 130)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("decode_block", [16, 32, 64])
@pytest.mark.parametrize("prefill_block", [16, 32, 64])
def test_any_two_block_sizes_give_the_text_of_one_engine(
    engine: Callable[..., Engine], prefill_block: int, decode_block: int, transport: str
) -> None:
    options: dict[str, Any] = {"transport": transport, "token_budget": 48}  # prompts go in chunks
    prefill_engine, decode_engine = engine(block_size=prefill_block, rows=128), engine(block_size=decode_block, rows=64)
    with open_pair(prefill_engine, decode_engine, **options) as pair:
        oracle = engine(block_size=decode_block, rows=64)
        for length in LENGTHS:
            (call,) = pair.generate([prompt_of(length)], greedy(6))
            assert call.token_ids() == alone(oracle, prompt_of(length), greedy(6)), length
        assert [link.one_sided for link in pair.receiver._links] == [transport == "shm"]
