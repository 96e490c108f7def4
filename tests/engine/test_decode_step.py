"""A step of decoding as workers run it: the same tokens as its parts one by one, and nothing allocated when steady."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.batch import Batch, BatchItem, DecodeBatches
from engine.engine import Engine
from engine.ops import cpu, cpu_attention, cpu_compressed, cpu_latent, cpu_moe
from engine.sampling import SampleRow
from tests import tiny_models
from tests.engine.running import Running
from twinpool.errors import Internal
from twinpool.sampling import SamplingParams

BLOCK_SIZE = 16
KINDS = ["llama", "qwen2", "qwen3", "qwen3-moe", "mixtral", "deepseek-v3", "deepseek-v3-halves"]
ROWS = [
    SampleRow(SamplingParams(temperature=0), [1], []),
    SampleRow(SamplingParams(seed=3), [1], []),
    SampleRow(SamplingParams(seed=4, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01), [1], []),
    SampleRow(SamplingParams(seed=5, logprobs=2), [1], []),
    SampleRow(SamplingParams(seed=6, repetition_penalty=1.3, min_tokens=4), [1], [9, 9]),
]


class Operators(TorchDispatchMode):
    """Names of torch's operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def load(path: Path, **kinds: str) -> Engine:
    return Engine.load(path, memory_bytes=8 << 20, block_size=BLOCK_SIZE, **kinds)


def items_after_prompts(engine: Engine, lengths: list[int]) -> list[BatchItem]:
    """Sequences of so many computed tokens, and the next token of each."""
    sequences = [Running(engine, 90) for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        token_ids = [(7 * i + length) % 300 + 3 for i in range(length)]
        engine.forward(Batch.build([sequence.item(token_ids)], BLOCK_SIZE))
    return [sequence.item([11 + i]) for i, sequence in enumerate(sequences)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "weights"), [("fp32", "bf16"), ("bf16", "bf16"), ("bf16", "w8a16"), ("bf16", "w8a8")]
)
def test_a_step_gives_what_its_parts_give(tmp_path: Path, kind: str, dtype: str, weights: str) -> None:
    path = tiny_models.make(tmp_path, kind)
    whole, parts = load(path, dtype=dtype, weights=weights), load(path, dtype=dtype, weights=weights)
    lengths = [40, 16, 1, 33, 70]
    items, same = items_after_prompts(whole, lengths), items_after_prompts(parts, lengths)
    for count in (5, 2, 5):
        got = whole.decode(items[:count], ROWS[:count])
        hidden = parts.forward(Batch.build(same[:count], BLOCK_SIZE))
        assert got == parts.sample(parts.logits(hidden), ROWS[:count])
        assert parts.next_tokens(hidden, ROWS[:count]) == got
        items, same = (
            [
                BatchItem([token.token_id], item.start + 1, item.block_ids)
                for item, token in zip(each[:count], got, strict=True)
            ]
            + each[count:]
            for each in (items, same)
        )
    for mine, theirs in zip(whole.cache.buffers, parts.cache.buffers, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe", "mixtral", "deepseek-v3"])
@pytest.mark.parametrize("weights", ["bf16", "w8a16", "w8a8"])
@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
def test_a_steady_step_allocates_no_tensor_and_runs_no_operator_of_torch(
    tmp_path: Path, kind: str, weights: str, kv_dtype: str
) -> None:
    """Rows 0 to 2: greedy, and drawn with every filter. The step crosses no block boundary."""
    engine = load(tiny_models.make(tmp_path, kind), weights=weights, kv_dtype=kv_dtype)
    items = items_after_prompts(engine, [40, 17, 2])
    engine.decode(items, ROWS[:3])
    items = [BatchItem([5], item.start + 1, item.block_ids) for item in items]
    with Operators() as operators:
        engine.decode(items, ROWS[:3])
    assert operators.names == []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.decode(items, ROWS[:3])
    assert [e.name for e in profiler.events() if e.cpu_memory_usage] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", ["bf16", "w8a16", "w8a8"])
def test_a_step_is_two_native_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, weights: str) -> None:
    engine = load(tiny_models.make(tmp_path, kind), weights=weights)
    items = items_after_prompts(engine, [20, 3])
    calls: list[str] = []

    def count(owner: Any, name: str) -> None:
        run = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (calls.append(run.__name__), run(*args))[1])

    for module in (cpu, cpu_attention, cpu_compressed, cpu_latent, cpu_moe):
        for name in [name for name, value in vars(module).items() if isinstance(value, type(engine.decoder._run))]:
            count(module, name)
    for owner in (engine.decoder, engine._model._output):
        count(owner, "_run")
    engine.decoder.record(True)
    engine.decode(items, ROWS[:2])
    assert calls == ["twinpool_decoder", "twinpool_logits_and_tokens"]
    layers = [layer for _, layer, _, _ in engine.decoder.events]
    most = 12 if engine.config.latent is None else 17  # latents have two projections before and two after attention
    assert all(layers.count(layer) <= most for layer in range(engine.config.num_layers))


def test_what_counts_operators_and_memory_sees_a_step_that_is_not_steady(tmp_path: Path) -> None:
    engine = load(tiny_models.make(tmp_path, "qwen2"))
    items = items_after_prompts(engine, [40, 17])
    with Operators() as operators:
        engine.decode(items, ROWS[:2])
    assert operators.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.decode(items, ROWS[3:])
    assert [e.name for e in profiler.events() if e.cpu_memory_usage]


def test_a_token_that_is_none_of_the_vocabulary_fails_the_step(tmp_path: Path) -> None:
    engine = load(tiny_models.make(tmp_path, "llama"))
    (item,) = items_after_prompts(engine, [5])
    with pytest.raises(Internal, match="not finite"):
        engine.decode([BatchItem([10**6], item.start, item.block_ids)], ROWS[:1])


def test_kept_batches_are_what_new_ones_are() -> None:
    kept = DecodeBatches(4)
    steps = [
        [([5], 0, [3])],
        [([5], 3, [3]), ([6], 9, [1, 2, 7])],
        [([8], 4, [3, 5]), ([9], 10, [1, 2, 7])],
        [([8], 2, [4]), ([9], 4, [6, 3, 8]), ([1], 21, [9, 10, 11, 12, 13, 14])],
        [([8], 3, [4])],
    ]
    for step in steps:
        items = [BatchItem(*each) for each in step]
        got, want = kept.build(items), Batch.build(items, 4)
        assert (got.query_start, got.context_lens) == (want.query_start, want.context_lens)
        for name in ("token_ids", "positions", "slots", "last_token_rows"):
            assert torch.equal(getattr(got, name), getattr(want, name))
        for row, length in enumerate(want.context_lens):
            used = -(-length // 4)
            assert torch.equal(got.block_tables[row, :used], want.block_tables[row, :used])


def test_kept_batches_refuse_what_is_no_decode_step() -> None:
    kept = DecodeBatches(4)
    for item in (BatchItem([1, 2], 0, [0]), BatchItem([1], 0, [0], state=1)):
        with pytest.raises(ValueError, match="one token"):
            kept.build([item])
    with pytest.raises(ValueError, match="not fit"):
        kept.build([BatchItem([1], 4, [0])])
