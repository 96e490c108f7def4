"""Parameters and cache sizes of published models, from their config.json alone, against published figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.describe import describe, main
from engine.model_config import ModelConfig
from engine.models import cache_layout
from tests import tiny_models
from twinpool.errors import ConfigError

QWEN2 = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False}
V4 = {"model_type": "deepseek_v4", "vocab_size": 129280, "head_dim": 512, "sliding_window": 128, "hc_mult": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": QWEN2
    | {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
    },
    "qwen2.5-72b": QWEN2
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 29568,
    },
    "qwen3-235b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 163840,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "deepseek-v4-flash": V4
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    },
    "deepseek-v4-pro": V4
    | {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    },
}
# Billions of parameters, all and of one token, as published; bytes a token over all layers, bf16; MiB of a sequence of
# 131,072 tokens in bf16 and in int8 without scales, where known.
PUBLISHED = {
    "qwen2.5-7b": (7.6, 7.6, 57_344, 7_168),
    "qwen2.5-72b": (72.7, 72.7, 327_680, 40_960),
    "qwen3-235b": (235, 22, 192_512, 24_064),
    "deepseek-v3": (671, 37, 70_272, 8_784),
    "deepseek-v4-flash": (285, 13, 21 * 320 + 20 * 8, 865),
    "deepseek-v4-pro": (1600, 49, 30 * 320 + 31 * 8, 1239),
}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", CONFIGS)
def test_published_models_are_described_from_config_json_alone(published: Path, name: str) -> None:
    parameters, active, token_bytes, mebibytes = PUBLISHED[name]
    found = describe(published / name)
    assert found.parameters / 1e9 == pytest.approx(parameters, rel=0.02)
    # What counts as active differs between publishers: with or without embeddings and the output layer.
    assert found.active_parameters / 1e9 == pytest.approx(active, rel=0.12)
    assert found.token_bytes("bf16") == token_bytes
    assert found.sequence_bytes("bf16", 131_072) / (1 << 20) == pytest.approx(mebibytes, abs=0.6)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_module_that_transformers_makes(published: Path, name: str) -> None:
    config = transformers.AutoConfig.from_pretrained(published / name)
    config.quantization_config = None
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    # Norms and biases are not counted, which are less than a ten-thousandth.
    assert describe(published / name).parameters == pytest.approx(parameters, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "token_bytes", "windows_mib", "states_mib", "mebibytes"),
    [("deepseek-v4-flash", 6218.5, 5.375, 10.9, 783), ("deepseek-v4-pro", 8903, 7.625, 16.8, 1121)],
)
def test_deepseek_v4_by_layer_type(
    published: Path, name: str, token_bytes: float, windows_mib: float, states_mib: float, mebibytes: int
) -> None:
    found = describe(published / name)
    kinds = {each.kind: each for each in found.caches}
    sparse, heavy = kinds["compressed 4, indexed"], kinds["compressed 128"]
    # As int8 an entry is 448 codes, 64 elements in bf16 and a scale; an entry of the indexer 128 codes and a scale.
    assert sparse.token_bytes == {"bf16": 320, "int8 index": 288.5, "int8": (448 + 128 + 2 + 130) / 4}
    assert heavy.token_bytes == {"bf16": 8, "int8 index": 8, "int8": (448 + 128 + 2) / 128}
    for each in found.caches:
        assert each.window_bytes == {"bf16": 131_072, "int8 index": 131_072, "int8": 128 * (448 + 128 + 2)}
    assert heavy.state_bytes == 508 * 1024
    assert sparse.state_bytes == 3 * 10_240 + 20_480
    assert found.token_bytes("int8 index") == token_bytes
    assert found.sequence_bytes("int8 index", 0) / (1 << 20) == windows_mib
    states = found.sequence_bytes("int8 index", 0, states=True) - found.sequence_bytes("int8 index", 0)
    assert states / (1 << 20) == pytest.approx(states_mib, abs=0.06)
    assert found.sequence_bytes("int8 index", 131_072) / (1 << 20) == pytest.approx(mebibytes, abs=0.6)


def test_a_sequence_takes_of_the_cache_what_is_described(published: Path) -> None:
    config = ModelConfig.read(published / "deepseek-v4-flash")
    layout, found = cache_layout(config, 128, "int8"), describe(published / "deepseek-v4-flash")
    assert layout.block_bytes == 128 * found.token_bytes("int8")
    assert layout.state_bytes == found.sequence_bytes("int8", 0, states=True)


def test_int8_latents_keep_rope_in_bf16(published: Path) -> None:
    found = describe(published / "deepseek-v3")
    assert found.token_bytes("int8") == 61 * (512 + 128 + 2)  # and a scale
    assert found.sequences_in(64 << 30, "bf16", 131_072) == 7


def test_what_is_printed(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(published / "deepseek-v3" / "config.json"), "--memory", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("deepseek_v3: 61 layers, 671.")
    assert lines[2].split() == ["61", "x", "latents,", "bytes", "a", "token", "1,152", "642"]
    assert lines[3].split()[-2:] == ["70,272", "39,162"]
    assert lines[4].split()[-4:] == ["8,784.0", "MiB", "4,895.2", "MiB"]
    assert lines[5].split()[-5:] == ["in", "100", "GiB", "11", "20"]


def test_an_own_directory_is_described_as_the_engine_loads_it(tmp_path: Path) -> None:
    found = describe(tiny_models.make(tmp_path, "llama"))
    assert found.token_bytes("int8") == 3 * 2 * 2 * (16 + 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"compress_ratios": [0]}, "must name the kinds of all 43 layers"),
        ({"compress_ratios": [7] * 43}, "a layer compresses by 7"),
        ({"hidden_size": None}, "hidden_size is None"),
    ],
)
def test_what_is_not_known_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["deepseek-v4-flash"] | changes))
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        describe(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
