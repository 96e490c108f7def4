"""Logits of every model family against transformers, on small random models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engine.batch import Batch
from engine.engine import Engine
from engine.quantization import WEIGHT_FORMATS
from tests import tiny_models
from tests.engine.running import Running, greedy, logits_in_chunks, step
from twinpool.errors import ConfigError

MEMORY_BYTES = 16 << 20
TOLERANCE = 1e-4  # of logits with a standard deviation of about 3


def load(path: Path, *, kv_dtype: str = "fp32", dtype: str = "fp32", block_size: int = 16, **kinds: str) -> Engine:
    return Engine.load(path, dtype=dtype, kv_dtype=kv_dtype, block_size=block_size, memory_bytes=MEMORY_BYTES, **kinds)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=tiny_models.KINDS)
def tiny_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shards = 3 if request.param in ("qwen2-yarn", "llama3-rope") else 1
    return tiny_models.make(tmp_path_factory.mktemp("models") / request.param, request.param, shards=shards)


def oracle_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), f"transformers reads other tensors from {path}: {info}"
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def test_logits_equal_transformers_whole_chunked_token_by_token_and_in_unequal_batches(tiny_dir: Path) -> None:
    engine = load(tiny_dir)
    token_ids = prompt(150)
    expected = oracle_logits(tiny_dir, token_ids)

    whole = logits_in_chunks(engine, token_ids, [150])
    chunked = logits_in_chunks(engine, token_ids, [7, 16, 1, 33])
    one_by_one = logits_in_chunks(engine, token_ids, [1])
    others = [prompt(3, seed=1), prompt(40, seed=2)]
    sequences = [Running(engine, 200) for _ in range(3)]
    first = step(
        engine, [sequences[0].item(others[0]), sequences[1].item(token_ids[:90]), sequences[2].item(others[1])]
    )
    second = step(engine, [sequences[1].item(token_ids[90:]), sequences[0].item([5])])
    batched = torch.cat((first[1], second[0]))

    for logits in (whole, chunked, one_by_one, batched):
        assert (logits - expected).abs().max() < TOLERANCE
    for sequence in sequences:
        sequence.end()
    assert engine.blocks.num_free == engine.cache.num_rows


@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "deepseek-v3", "deepseek-v4"])
def test_a_prompts_logits_have_the_same_bits_however_it_is_cut_and_batched(
    tmp_path: Path, kind: str, dtype: str, kv_dtype: str, weights: str
) -> None:
    engine = load(tiny_models.make(tmp_path, kind), dtype=dtype, kv_dtype=kv_dtype, weights=weights)
    token_ids = prompt(100)
    whole = logits_in_chunks(engine, token_ids, [100])
    assert torch.equal(logits_in_chunks(engine, token_ids, [1]), whole)
    assert torch.equal(logits_in_chunks(engine, token_ids, [13, 40]), whole)
    sequences = [Running(engine, 100) for _ in range(2)]
    together = step(engine, [sequences[0].item(prompt(31, seed=3)), sequences[1].item(token_ids)])
    assert torch.equal(together[1], whole)


def test_both_spellings_of_rope_give_the_same_model(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "original_max_position_embeddings": 64}
    old = tiny_models.make(tmp_path / "old", "qwen2-yarn")
    new = tiny_models.make(
        tmp_path / "new",
        "qwen2-yarn",
        rope_scaling=None,
        rope_theta=None,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1000000.0, **scaling},
    )
    token_ids = prompt(80)
    assert torch.equal(logits_in_chunks(load(old), token_ids, [80]), logits_in_chunks(load(new), token_ids, [80]))
    assert load(old).config.max_context == 512  # 8 times the 64 of config.json


def test_layers_are_announced_in_order_with_their_rows_already_stored(tmp_path: Path) -> None:
    engine = load(tiny_models.make(tmp_path, "llama"))
    sequence = Running(engine, 20)
    seen = []

    def on_layer(index: int) -> None:
        row = engine.cache.buffers[index][sequence.block_ids[0]]
        seen.append((index, row.clone()))

    engine.forward(Batch.build([sequence.item(prompt(20))], 16), on_layer)
    assert [index for index, _ in seen] == [0, 1, 2]
    for index, row in seen:
        assert row.any()
        assert torch.equal(row, engine.cache.buffers[index][sequence.block_ids[0]])


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_int8_cache_stays_close_to_the_lossless_one(tmp_path: Path, kind: str) -> None:
    path = tiny_models.make(tmp_path, kind)
    token_ids = prompt(120)
    lossless = logits_in_chunks(load(path), token_ids, [120]).log_softmax(-1)
    int8 = logits_in_chunks(load(path, kv_dtype="int8"), token_ids, [120]).log_softmax(-1)
    assert (lossless.exp() * (lossless - int8)).sum(-1).mean() < 1e-3


@pytest.mark.parametrize(("weights", "limit"), [("w8a16", 2e-3), ("w8a8", 2e-2)])
def test_int8_weights_stay_close_to_the_checkpoints(tmp_path: Path, weights: str, limit: float) -> None:
    path = tiny_models.make(tmp_path, "llama")
    token_ids = prompt(120)
    as_loaded = logits_in_chunks(load(path), token_ids, [120]).log_softmax(-1)
    int8 = logits_in_chunks(load(path, weights=weights), token_ids, [120]).log_softmax(-1)
    assert 0 < (as_loaded.exp() * (as_loaded - int8)).sum(-1).mean() < limit


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe", "deepseek-v3", "deepseek-v4"])
@pytest.mark.parametrize("weights", ["w8a16", "w8a8"])
def test_int8_weights_give_the_same_model_on_every_backend(tmp_path: Path, kind: str, weights: str) -> None:
    path = tiny_models.make(tmp_path, kind)
    token_ids = prompt(60)
    native = logits_in_chunks(load(path, weights=weights), token_ids, [60])
    plain = logits_in_chunks(load(path, weights=weights, backend="reference"), token_ids, [60])
    # A code that rounds the other way, after sums in another order, is a difference of a step of w8a8.
    assert (native - plain).abs().max() < (1e-3 if weights == "w8a16" else 0.2)


def test_fingerprint_tells_weights_and_layouts_apart(tmp_path: Path) -> None:
    path = tiny_models.make(tmp_path / "a")
    same = load(path, kv_dtype="int8").fingerprint
    sharded = tiny_models.make(tmp_path / "b", shards=2)
    assert load(path, kv_dtype="int8").fingerprint == same
    assert load(sharded, kv_dtype="int8").fingerprint == same
    assert load(path, kv_dtype="int8", block_size=32).fingerprint == same  # rows of other block sizes are mapped
    others = {
        load(tiny_models.make(tmp_path / "c", seed=1), kv_dtype="int8").fingerprint,
        load(path, kv_dtype="bf16").fingerprint,
        load(path, kv_dtype="int8", dtype="bf16").fingerprint,
        load(path, kv_dtype="int8", weights="w8a16").fingerprint,
    }
    assert len(others | {same}) == 5


def test_workers_of_either_int8_format_fit_together(tmp_path: Path) -> None:
    """They hold the same codes and scales: prefill may multiply int8 by int8 and decode may not."""
    path = tiny_models.make(tmp_path)
    assert load(path, weights="w8a8").fingerprint == load(path, weights="w8a16").fingerprint


def test_an_unknown_weight_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="w8a16"):
        load(tiny_models.make(tmp_path), weights="int4")


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "deepseek-v3", "deepseek-v4-pro"])
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_greedy_batch_equals_solo_runs(tmp_path: Path, kind: str, weights: str) -> None:
    engine = load(tiny_models.make(tmp_path, kind), kv_dtype="int8", dtype="bf16", weights=weights)
    prompts = [prompt(length, seed=length) for length in (1, 15, 16, 17, 60)]
    together = greedy(engine, prompts, 20)
    assert together == [greedy(engine, [p], 20)[0] for p in prompts]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("qwen3-moe", {"moe_intermediate_size": 128, "num_experts": 64, "head_dim": 64}),
        ("mixtral", {"intermediate_size": 128, "num_local_experts": 16, "head_dim": 64}),
        ("deepseek-v3", {"moe_intermediate_size": 128, "n_routed_experts": 64}),
        # Routers, compressors and connections of streams are fp32: 3% of what V4-Flash reads, and as here where experts
        # are as large beside them.
        ("deepseek-v4", {"moe_intermediate_size": 2048, "n_routed_experts": 8}),
    ],
)
def test_a_step_of_one_token_reads_little_more_than_its_active_parameters(
    tmp_path: Path, kind: str, sizes: dict[str, int]
) -> None:
    engine = load(tiny_models.make(tmp_path, kind, hidden_size=256, **sizes), dtype="bf16")
    embedding = engine.config.vocab_size * engine.config.hidden_size  # of which one row is read
    active = 2 * (engine.config.num_active_parameters - embedding)
    assert active < engine.config.num_parameters
    assert active <= engine.weight_bytes <= 1.1 * active
