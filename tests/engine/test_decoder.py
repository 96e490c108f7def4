"""All layers in one native call give what the single operators give, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.engine import Engine
from engine.ops import cpu, native
from engine.quantization import WEIGHT_FORMATS
from tests import tiny_models
from tests.engine.isas import ISAS
from tests.engine.running import Running

MEMORY_BYTES = 8 << 20
KINDS = ["llama", "qwen2", "qwen3", "qwen3-moe", "mixtral", "deepseek-v3", "deepseek-v3-halves"]


def load(path: Path, **kinds: str) -> Engine:
    return Engine.load(path, memory_bytes=MEMORY_BYTES, block_size=16, **kinds)


def batches(engine: Engine) -> list[Batch]:
    """A prefill of three prompts, one of them in two chunks, then two decode steps of all."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (40, 7, 65)]
    sequences = [Running(engine, 80) for _ in prompts]
    steps = [
        [sequences[0].item(prompts[0][:21]), sequences[1].item(prompts[1])],
        [sequences[2].item(prompts[2]), sequences[0].item(prompts[0][21:])],
        [each.item([i + 5]) for i, each in enumerate(sequences)],
        [each.item([i + 9]) for i, each in enumerate(sequences[:2])],
    ]
    return [Batch.build(items, engine.cache.layout.block_size) for items in steps]


def by_operator(engine: Engine, batch: Batch) -> torch.Tensor:
    model = engine._model
    cos, sin = model.rotary.cos_sin(batch.positions)
    residual = torch.nn.functional.embedding(batch.token_ids, model.embedding)
    with torch.inference_mode():
        return model.forward_by_operator(residual, cos, sin, batch, engine.cache.views, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("kv_dtype", "weights"), [("bf16", "bf16"), *(("int8", name) for name in WEIGHT_FORMATS)])
def test_one_call_equals_the_single_operators_bit_for_bit(
    tmp_path: Path, kind: str, dtype: str, kv_dtype: str, weights: str
) -> None:
    path = tiny_models.make(tmp_path, kind)
    whole, single = (load(path, dtype=dtype, kv_dtype=kv_dtype, weights=weights) for _ in range(2))
    for batch, other in zip(batches(whole), batches(single), strict=True):
        got = whole.forward(batch)
        assert whole._model.decoder(whole.cache.views) is not None
        assert torch.equal(got, by_operator(single, other))
    for mine, theirs in zip(whole.cache.buffers, single.cache.buffers, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek-v3"])
def test_so_it_does_on_every_instruction_set_and_number_of_threads(
    tmp_path: Path, kind: str, weights: str, threads: int, isa: str
) -> None:
    best, path = native.isa(), tiny_models.make(tmp_path, kind)
    try:
        native.select_isa(isa)
        whole, single = (load(path, weights=weights, threads=threads) for _ in range(2))
        for batch, other in zip(batches(whole), batches(single), strict=True):
            assert torch.equal(whole.forward(batch), by_operator(single, other))
    finally:
        native.select_isa(best)
    for mine, theirs in zip(whole.cache.buffers, single.cache.buffers, strict=True):
        assert torch.equal(mine, theirs)


def test_latents_in_the_plain_form_go_operator_by_operator(tmp_path: Path) -> None:
    engine = load(tiny_models.make(tmp_path, "deepseek-v3"), latent_form="plain")
    assert engine.decoder is None


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "deepseek-v3"])
def test_stopping_after_every_layer_changes_nothing(tmp_path: Path, kind: str) -> None:
    path = tiny_models.make(tmp_path, kind)
    whole, staged = load(path), load(path)
    for batch, other in zip(batches(whole), batches(staged), strict=True):
        seen: list[int] = []
        assert torch.equal(whole.forward(batch), staged.forward(other, seen.append))
        assert seen == list(range(whole.config.num_layers))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "deepseek-v3"])
def test_a_recorded_step_names_every_operator_in_the_order_it_ran(tmp_path: Path, kind: str) -> None:
    engine = load(tiny_models.make(tmp_path, kind))
    decoder = engine._model.decoder(engine.cache.views)
    batch = batches(engine)[0]
    engine.forward(batch)
    assert decoder.events == []
    decoder.record(True)
    engine.forward(batch)
    events = decoder.events
    named = {"linear", "attention", "kv_access", "other"}
    assert {name for name, *_ in events} == (named if kind == "qwen3" else named | {"moe"})
    assert sum(name == "attention" for name, *_ in events) == engine.config.num_layers
    assert all(begin <= end for _, _, begin, end in events)
    assert all(a[3] <= b[2] for a, b in itertools.pairwise(events))
    decoder.record(False)
    engine.forward(batch)
    assert decoder.events == []


@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral", "deepseek-v3"])
def test_a_recorded_step_names_the_experts_that_single_operators_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tiny_models.make(tmp_path, kind)
    whole, single = load(path), load(path)
    gating, chosen = cpu.moe_gating_top_k, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        weights, experts = gating(*args, **kwargs)
        chosen.append(sorted(set(experts.flatten().tolist())))
        return weights, experts

    monkeypatch.setattr(cpu, "moe_gating_top_k", noted)
    assert whole.decoder.chosen_experts == []
    whole.decoder.record(True)
    for batch, other in zip(batches(whole), batches(single), strict=True):
        chosen.clear()
        whole.forward(batch)
        by_operator(single, other)
        assert whole.decoder.chosen_experts == chosen
    whole.decoder.record(False)
    assert whole.decoder.chosen_experts == []


def test_what_passes_through_beside_experts_is_recorded_as_a_part_of_them(tmp_path: Path) -> None:
    engine = load(tiny_models.make(tmp_path, "deepseek-v3"))
    assert engine.config.moe is not None
    sparse = engine.config.moe.sparse_layers.index(True)
    engine.decoder.record(True)
    engine.forward(batches(engine)[0])
    kinds = [kind for kind, layer, _, _ in engine.decoder.events if layer == sparse]
    assert kinds[-6:] == ["moe"] * 5 + ["other"]  # gate and up, their product, down; gating; experts; the next norm
    assert "moe" not in kinds[:-6]
