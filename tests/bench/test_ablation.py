"""The ablation on a small random model, and its naive side against torch's own attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench import ablation
from bench.ablation import Shapes
from tests import tiny_models

SMALL = Shapes(prompts=(70,), batch=2, context=70, decodes=((1, 20), (3, 20)), prefill=40, memory_bytes=8 << 20)


def test_every_step_is_one_ratio_of_the_times_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = tiny_models.make(tmp_path / "tiny", hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    ablation.main(["--model", str(model_dir), "--quick"], SMALL)
    printed = capsys.readouterr().out.splitlines()
    result = json.loads(printed[-1])
    assert {"commit", "cpu", "cores", "isa", "model"} <= set(result)
    steps = result["steps"]
    assert len(printed) == len(steps) + 1
    assert {step["step"] for step in steps} == {
        "naive attention -> flash",
        "growing tensors -> paged, preallocated",
        "paged, preallocated -> INT8 KV",
        "bf16 KV -> INT8 KV",
        "bf16 weights -> W8A16",
        "W8A16 -> W8A8",
        "unfused -> fused",
    }
    assert sum(step["step"] == "W8A16 -> W8A8" for step in steps) == 3  # two decodes and a prefill
    for step in steps:
        assert step["before_ms"] > 0
        assert step["ratio"] == pytest.approx(step["before_ms"] / step["after_ms"], rel=0.05, abs=0.02)


def test_naive_attention_is_causal_attention_of_grouped_heads() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(6, 37, 16), torch.randn(2, 37, 16), torch.randn(2, 37, 16)
    expected = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    torch.testing.assert_close(ablation.naive_attention(q, k, v), expected)


def test_a_filled_cache_holds_the_same_tokens_in_both_formats(tmp_path: Path) -> None:
    config = ablation.ModelConfig.read(tiny_models.make(tmp_path))
    torch.manual_seed(1)
    plain, tables = ablation.filled(config, ablation.BF16, 2, 70)
    torch.manual_seed(1)
    quantized, _ = ablation.filled(config, ablation.INT8, 2, 70)
    assert tables.tolist() == [[0, 1], [2, 3]]
    view = quantized.views[-1]
    assert view.k_scale is not None
    restored = view.k.float() * view.k_scale.float().unsqueeze(-1)
    torch.testing.assert_close(restored, plain.views[-1].k.float(), rtol=0, atol=0.03)
