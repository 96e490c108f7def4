"""Latent attention: both forms against transformers, its cache against theirs, checkpoints in fp8, layers left out."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.latent_cache import LatentLayout
from engine.ops import cpu, native, reference
from tests import tiny_models
from tests.engine.running import Running, greedy, logits_in_chunks, step
from tests.engine.test_models import TOLERANCE, load, oracle_logits, prompt

KINDS = ["deepseek-v3", "deepseek-v3-halves"]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("form", ["plain", "absorbed"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_give_transformers_logits(tmp_path: Path, kind: str, form: str, backend: str) -> None:
    length = 110 if backend == "cpu" else 57  # token by token the reference is slow
    path, token_ids = tiny_models.make(tmp_path, kind), prompt(length)
    engine = load(path, latent_form=form, backend=backend)
    expected = oracle_logits(path, token_ids)
    for sizes in ([length], [7, 16, 1, 33], [1]):
        assert (logits_in_chunks(engine, token_ids, sizes) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("form", ["plain", "absorbed"])
@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_form_gives_the_same_bits_however_a_prompt_is_cut_and_batched(
    tmp_path: Path, dtype: str, kv_dtype: str, form: str
) -> None:
    path, token_ids = tiny_models.make(tmp_path, "deepseek-v3-halves"), prompt(90)
    engine = load(path, dtype=dtype, kv_dtype=kv_dtype, latent_form=form)
    whole = logits_in_chunks(engine, token_ids, [90])
    assert torch.equal(logits_in_chunks(engine, token_ids, [1]), whole)
    assert torch.equal(logits_in_chunks(engine, token_ids, [13, 40]), whole)
    sequences = [Running(engine, 100) for _ in range(2)]
    together = step(engine, [sequences[0].item(prompt(31, seed=3)), sequences[1].item(token_ids)])
    assert torch.equal(together[1], whole)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cached_is_what_transformers_caches(tmp_path: Path, kind: str) -> None:
    path, token_ids = tiny_models.make(tmp_path, kind), prompt(40)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([token_ids]), cache=cache)
    engine = load(path)
    sequence = Running(engine, 40)
    step(engine, [sequence.item(token_ids)])
    blocks = torch.tensor(sequence.block_ids)
    for layer, view in zip(cache.layers, engine.cache.views, strict=True):
        got = reference.gather_latents(view, blocks, torch.float32).flatten(0, 1)[:40]
        torch.testing.assert_close(got, torch.cat((layer.keys, layer.values), -1)[0, 0], rtol=1e-4, atol=1e-5)


def test_rows_take_the_bytes_that_the_model_needs() -> None:
    """Of DeepSeek-V3 with 512 + 64 elements a token: 1,152 bytes in bf16, 640 and a scale of 2 in int8."""
    sizes = {"num_layers": 61, "rank": 512, "rope_dim": 64, "block_size": 64}
    assert LatentLayout(kv_dtype="bf16", **sizes).block_bytes == 64 * 70_272
    assert LatentLayout(kv_dtype="int8", **sizes).block_bytes == 64 * (39_040 + 61 * 2)


@pytest.mark.parametrize("kv_dtype", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_operator_gives_the_reference(dtype: torch.dtype, kv_dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = LatentLayout(num_layers=1, rank=64, rope_dim=16, block_size=16, kv_dtype=kv_dtype)
    views = []
    for ops in (cpu, reference):
        view = layout.view(0, [torch.full((20, layout.row_bytes), 0xFF, dtype=torch.uint8)])
        latents, rope = (torch.randn(90, n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (64, 16))
        slots = torch.randperm(18, generator=torch.Generator().manual_seed(1))[:6].repeat_interleave(16)[:90] * 16
        slots = slots + torch.arange(90) % 16
        ops.store_latents(latents, rope, view, slots)
        views.append(view)
    assert torch.equal(views[0].latents.view(torch.uint8), views[1].latents.view(torch.uint8))
    table = torch.full((2, 6), 2**30, dtype=torch.int32)
    table[0, :6] = (slots[::16] // 16).int()
    table[1, :3] = table[0, [3, 0, 2]]
    q = torch.randn(12, 5, 80, generator=generator).to(dtype)
    case = (table, [0, 9, 12], [90, 40], 80**-0.5)
    got, want = cpu.latent_attention(q, views[0], *case), reference.latent_attention(q, views[1], *case)
    assert got.shape == (12, 5, 64)
    assert (got.float() - want.float()).abs().max() < (2e-5 if dtype is torch.float32 else 0.03)
    assert native.isa()


def test_int8_latents_stay_close_to_bf16_ones(tmp_path: Path) -> None:
    """Without experts; with them: test_int8_state.py."""
    path, token_ids = tiny_models.make(tmp_path, "deepseek-v3", first_k_dense_replace=9), prompt(120)
    bf16, int8 = (
        logits_in_chunks(load(path, kv_dtype=kv_dtype), token_ids, [120]).log_softmax(-1)
        for kv_dtype in ("bf16", "int8")
    )
    divergence = (bf16.exp() * (bf16 - int8)).sum(-1)
    assert 0 < divergence.mean() < 2e-3


def as_fp8(path: Path) -> dict[str, torch.Tensor]:
    """Writes the directory's linear weights as fp8 in blocks; what they then stand for, in fp32."""
    tensors, meant = load_file(path / "model.safetensors"), {}
    for name in list(tensors):
        weight = tensors[name].float()
        if name.endswith("_proj.weight") or "kv_a_proj_with_mqa" in name:
            rows, columns = (math.ceil(size / 128) for size in weight.shape)
            scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(len(name))) * 0.01 + 0.002
            wide = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
            tensors[name] = (weight / wide).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            weight = tensors[name].float() * wide
        meant[name] = weight
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (path / "config.json").write_text(json.dumps(config))
    return meant


def test_an_fp8_checkpoint_is_the_model_that_its_codes_and_scales_stand_for(tmp_path: Path) -> None:
    sizes = {"hidden_size": 160, "intermediate_size": 200}  # blocks that are not full
    path = tiny_models.make(tmp_path / "fp8", "deepseek-v3", **sizes)
    plain = tiny_models.make(tmp_path / "plain", "deepseek-v3", **sizes)
    save_file(as_fp8(path), plain / "model.safetensors")
    token_ids = prompt(40)
    assert torch.equal(logits_in_chunks(load(path), token_ids, [40]), logits_in_chunks(load(plain), token_ids, [40]))
    assert (logits_in_chunks(load(path), token_ids, [40]) - oracle_logits(plain, token_ids)).abs().max() < TOLERANCE


def test_layers_for_multi_token_prediction_are_ignored_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_models.make(tmp_path, "deepseek-v3")
    expected = logits_in_chunks(load(path), prompt(20), [20])
    tensors = load_file(path / "model.safetensors")
    extra = {name.replace("layers.2.", "layers.3."): value for name, value in tensors.items() if "layers.2." in name}
    hidden = len(extra["model.layers.3.input_layernorm.weight"])
    extra |= {f"model.layers.3.{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    extra["model.layers.3.eh_proj.weight"] = torch.ones(hidden, 2 * hidden)
    save_file(tensors | {name: value.clone() for name, value in extra.items()}, path / "model.safetensors")
    with caplog.at_level(logging.INFO):
        engine = load(path)
    assert "layer 3 of the checkpoint predicts further tokens: it is ignored" in caplog.text
    assert torch.equal(logits_in_chunks(engine, prompt(20), [20]), expected)


def test_greedy_answers_of_a_batch_are_transformers(tmp_path: Path) -> None:
    path = tiny_models.make(tmp_path, "deepseek-v3")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [prompt(length, seed=length) for length in (1, 16, 45)]
    got = greedy(load(path, kv_dtype="fp32"), prompts, 16)
    for token_ids, answer in zip(prompts, got, strict=True):
        for _ in range(16):
            with torch.inference_mode():
                token_ids = [*token_ids, int(model(torch.tensor([token_ids])).logits[0, -1].argmax())]
        assert token_ids[-16:] == answer


def test_the_forms_share_a_fingerprint(tmp_path: Path) -> None:
    path = tiny_models.make(tmp_path, "deepseek-v3")
    engines: list[Engine] = [load(path, latent_form=form) for form in ("plain", "absorbed")]
    assert engines[0].fingerprint == engines[1].fingerprint
