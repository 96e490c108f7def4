"""Checkpoints of DeepSeek-V4: either set of names, quantized as published, layers left out; and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny_deepseek_v4, tiny_models
from tests.engine.running import logits_in_chunks
from tests.engine.test_models import TOLERANCE, load, oracle_logits, prompt
from twinpool.errors import ConfigError

Tensors = dict[str, torch.Tensor]


def rewrite(path: Path, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """Changes the directory's tensors, and its config.json."""
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors")
    values = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(values))
    return path


def logits(path: Path) -> torch.Tensor:
    return logits_in_chunks(load(path), prompt(40), [40])


@pytest.mark.parametrize("kind", ["deepseek-v4", "deepseek-v4-pro"])
def test_names_of_transformers_are_read_as_those_that_deepseek_publishes(tmp_path: Path, kind: str) -> None:
    path = tiny_models.make(tmp_path, kind, shards=2)
    expected = logits(path)
    path = rewrite(tiny_models.make(tmp_path / "renamed", kind), tiny_deepseek_v4.transformers_names)
    assert torch.equal(logits(path), expected)
    assert (expected - oracle_logits(path, prompt(40))).abs().max() < TOLERANCE


def test_rope_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    path = tiny_models.make(tmp_path, "deepseek-v4")
    expected = logits(path)
    yarn = tiny_deepseek_v4.SIZES["rope_scaling"] | {"rope_type": "yarn", "attention_factor": 1.0}
    rope = {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "compress": yarn | {"rope_theta": 160000.0, "partial_rotary_factor": 0.25},
    }
    changes = {"rope_parameters": rope, "rope_scaling": None, "rope_theta": None, "compress_rope_theta": None}
    changes |= {"qk_rope_head_dim": None, "partial_rotary_factor": 0.25}
    assert torch.equal(logits(rewrite(path, dict, **changes)), expected)


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Powers of two as bytes: e stands for 2 ** (e - 127)."""
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def as_published(tensors: Tensors, meant: Tensors) -> Tensors:
    """Routed experts as MXFP4, other projections as fp8 in blocks, both with powers of two as scales; `meant` gets what
    they then stand for, in fp32."""
    quantized = {}
    for name, weight in tensors.items():
        quantized[name] = meant[name] = weight.float() if weight.is_floating_point() else weight
        scale_name = name.removesuffix(".weight") + ".scale"
        rows, columns = weight.shape if weight.dim() == 2 else (0, 0)
        if ".ffn.experts." in name:
            groups = weight.float().view(rows, -1, 32)
            exponents = groups.abs().amax(-1).log2().floor().long() - 2
            scaled = groups / torch.exp2(exponents.float()).unsqueeze(-1)
            codes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
            meant[name] = (E2M1[codes] * scaled.sign() * torch.exp2(exponents.float()).unsqueeze(-1)).flatten(1)
            nibbles = (codes + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
            quantized[name] = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).view(torch.int8)
            quantized[scale_name] = e8m0(exponents)
        elif ".attn.wq" in name or ".attn.wo" in name or "shared_experts" in name:
            exponents = torch.arange(-(-rows // 128) * -(-columns // 128)).view(-(-rows // 128), -1) % 3 - 5
            wide = torch.exp2(exponents.float()).repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            quantized[name] = (weight.float() / wide).to(torch.float8_e4m3fn)
            quantized[scale_name] = e8m0(exponents)
            meant[name] = quantized[name].float() * wide
    return quantized


PUBLISHED = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
SIZES = {"hidden_size": 160, "moe_intermediate_size": 64, "head_dim": 64, "q_lora_rank": 132}  # blocks not full


def test_fp4_experts_and_fp8_blocks_are_the_model_that_their_codes_and_scales_stand_for(tmp_path: Path) -> None:
    meant: Tensors = {}
    path = tiny_models.make(tmp_path / "published", "deepseek-v4", **SIZES)
    rewrite(path, lambda tensors: as_published(tensors, meant), **PUBLISHED)
    plain = rewrite(tiny_models.make(tmp_path / "plain", "deepseek-v4", **SIZES), lambda tensors: meant)
    assert torch.equal(logits(path), logits(plain))
    assert (logits(path) - oracle_logits(plain, prompt(40))).abs().max() < TOLERANCE


def test_layers_for_multi_token_prediction_are_ignored_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_models.make(tmp_path, "deepseek-v4")
    expected = logits(path)

    def with_further_layer(tensors: Tensors) -> Tensors:
        last = {name: value for name, value in tensors.items() if name.startswith("layers.4.")}
        return tensors | {name.replace("layers.4.", "mtp.0."): value.clone() for name, value in last.items()}

    with caplog.at_level(logging.INFO):
        assert torch.equal(logits(rewrite(path, with_further_layer)), expected)
    assert "mtp.0 of the checkpoint predicts further tokens: it is ignored" in caplog.text


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {each: value for each, value in tensors.items() if each != name}


def replaced(name: str, value: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: value}


EXPERT, TABLE, SINK = "layers.3.ffn.experts.5.w2.weight", "layers.0.ffn.gate.tid2eid", "layers.1.attn.attn_sink"
QUERIES = "layers.2.attn.wq_b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(EXPERT), rf"tensor {EXPERT} is missing .* shape \[64, 48\]"),
        (without(TABLE), rf"tensor {TABLE} is missing .* shape \[384, 2\]"),
        (
            replaced(SINK, torch.ones(5)),
            rf"model.safetensors: tensor {SINK} has shape \[5\], config.json implies \[4\]",
        ),
        (replaced(TABLE, torch.full((384, 2), 8)), rf"tensor {TABLE} \[384, 2\] holds 8 to 8, .* 0 to 7"),
        (replaced(TABLE, torch.ones(384, 2)), rf"tensor {TABLE} \[384, 2\] is F32, it must hold integers"),
        (
            replaced(EXPERT, torch.zeros(64, 24, dtype=torch.int8)),
            rf"tensor {EXPERT} has shape \[64, 24\], config.json implies \[64, 48\]",  # fp4, without scales
        ),
        (
            lambda tensors: (
                tensors
                | {
                    f"{QUERIES}.weight": torch.zeros(128, 24).to(torch.float8_e4m3fn),
                    f"{QUERIES}.scale": torch.ones(2, 1),
                }
            ),
            rf"tensor {QUERIES}.scale has shape \[2, 1\], config.json implies \[1, 1\]",
        ),
        (
            lambda tensors: (
                tensors
                | {
                    f"{QUERIES}.weight": torch.zeros(128, 24).to(torch.float8_e4m3fn),
                    f"{QUERIES}.scale": torch.ones(1, 1).int(),
                }
            ),
            rf"tensor {QUERIES}.scale \[1, 1\] is I32; scales must be",
        ),
        (
            replaced(f"{QUERIES}.weight", torch.zeros(128, 24).to(torch.float8_e5m2)),
            rf"tensor {QUERIES}.weight \[128, 24\] is F8_E5M2; supported are",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named_with_file_and_shape(
    tmp_path: Path, change: Callable[[Tensors], Tensors], message: str
) -> None:
    path = rewrite(tiny_models.make(tmp_path, "deepseek-v4"), change)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_routed_experts": 6}, r"gate.weight has shape \[8, 64\], config.json implies \[6, 64\]"),
        ({"compress_ratios": [0, 0, 4, 128, 128]}, r"compressor.wkv.weight has shape \[64, 64\], .* \[32, 64\]"),
        ({"compress_ratios": [0, 0, 4, 8, 4]}, "a layer compresses by 8; known are 0, 4, 128"),
        ({"compress_ratios": [0] * 5}, "name windows alone"),
        ({"compress_ratios": [0]}, "must name the kinds of all 5 layers"),
        ({"o_groups": 3}, "4 attention heads are no multiple of 3 output groups"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, deepseek_v4 has 1"),
        ({"scoring_func": "relu"}, "scoring_func 'relu' is not supported"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"expert_dtype": "int4"}, "expert_dtype 'int4' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized checkpoints are not supported but for fp8"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types must say hash_moe or moe"),
        ({"num_hash_layers": -1}, "num_hash_layers is -1"),
        ({"qk_rope_head_dim": 6}, "rope turns 6 elements"),
        ({"index_head_dim": 4}, "index_head_dim is 4"),
        ({"compress_rates": [4]}, "compress_rates is"),
    ],
)
def test_configurations_that_cannot_be_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = rewrite(tiny_models.make(tmp_path, "deepseek-v4"), dict, **changes)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_blocks_hold_whole_entries(tmp_path: Path) -> None:
    path = tiny_models.make(tmp_path, "deepseek-v4")
    with pytest.raises(ConfigError, match="block_size is 24: allowed are multiples of 16"):
        load(path, block_size=24)
    assert load(path, block_size=0).cache.layout.block_size == 64
