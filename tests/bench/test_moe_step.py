"""Both ways of the benchmark give the same tokens, on models small enough for a test."""

from __future__ import annotations

import pytest

from bench import moe_step, random_model
from engine import ops

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize("kind", moe_step.KINDS)
def test_a_step_is_timed_both_ways(kind: str) -> None:
    engine = random_model.load(kind, ops.load("cpu"), weights="bf16", memory_bytes=8 << 20, **SMALL)
    assert engine.decoder is not None
    assert all(figure > 0 for figure in moe_step.measure(engine, 2, 3))
    assert engine.blocks.num_free == engine.cache.num_rows
