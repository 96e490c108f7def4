"""What one process without any of our workers would answer: the engine alone, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.batch import Batch, BatchItem
from engine.engine import Engine
from engine.sampling import SampleRow
from twinpool.sampling import SamplingParams


class Oracle:
    """Whole prompt in one forward pass, then one token a step, greedy or sampled."""

    def __init__(self, model: Path, *, kv_dtype: str = "int8", weights: str = "bf16", block_size: int = 16) -> None:
        self.engine = Engine.load(
            model,
            dtype="fp32",
            kv_dtype=kv_dtype,
            weights=weights,
            block_size=block_size,
            memory_bytes=8 << 20,
            threads=1,
        )

    def answer(self, prompt: Sequence[int], max_tokens: int, **sampling: object) -> list[int]:
        """Output token ids of one choice, the end-of-sequence token included when it came."""
        params = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": max_tokens, **sampling})  # type: ignore[arg-type]
        engine, output = self.engine, []
        blocks = engine.blocks.allocate(-(-(len(prompt) + max_tokens) // engine.cache.layout.block_size))
        assert blocks is not None
        states = engine.states.allocate(1) or []  # none for most models
        try:
            tokens, start = list(prompt), 0
            while True:
                batch = Batch.build([BatchItem(tokens, start, blocks, *states)], engine.cache.layout.block_size)
                logits = engine.logits(engine.forward(batch)[-1:])
                row = SampleRow(params, list(prompt), output, 0)
                (sampled,) = engine.sample(logits, [row])
                output = [*output, sampled.token_id]
                if sampled.finish_reason:
                    return output
                start += len(tokens)
                tokens = [sampled.token_id]
        finally:
            engine.blocks.release(blocks)
            engine.states.release(states)
