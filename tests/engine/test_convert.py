"""GGUF files written with the gguf library from small models, converted, and compared with the original directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine.convert import convert_gguf
from engine.engine import Engine
from tests import tiny_models
from tests.engine.running import logits_in_chunks
from twinpool.errors import ConfigError

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, block, rest = stem.split(".", 3)
        return f"blk.{block}.{GGUF_NAMES[rest]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def permute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """As llama.cpp's converter orders the rows of q and k (LlamaModel.permute)."""
    return (
        rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def write_gguf(
    path: Path,
    model_dir: Path,
    *,
    qtype: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    twice: bool = False,
    pre: str = "gpt-2",
    rope_freqs: np.ndarray | None = None,
    tokenizer: str = "gpt2",
    architecture: str | None = None,
) -> Path:
    config = json.loads((model_dir / "config.json").read_text())
    arch = architecture or config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 10000.0)))
    add_tokenizer(writer, model_dir, tokenizer, pre)
    weights = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        weights |= load_file(file)
    for name, tensor in weights.items():
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if arch == "llama" and part in name:
                tensor = permute(tensor, count)
        add_tensor(writer, gguf_name(name), tensor, qtype)
        if twice and name == "model.embed_tokens.weight":
            add_tensor(writer, "output.weight", tensor, gguf.GGMLQuantizationType.Q4_0)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, qtype: gguf.GGMLQuantizationType) -> None:
    values = tensor.float().numpy()
    if values.ndim == 1 or qtype == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, quantize(values, qtype), raw_dtype=qtype)


def add_tokenizer(writer: gguf.GGUFWriter, model_dir: Path, kind: str, pre: str) -> None:
    content = json.loads((model_dir / "tokenizer.json").read_text())
    vocab = sorted(content["model"]["vocab"].items(), key=lambda entry: entry[1])
    special = {token["content"] for token in content["added_tokens"]}
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocab])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tiny_models.CHAT_TEMPLATE)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
        ("llama-bias", {"mlp_bias": False}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": False}),
    ],
)
def test_converted_model_is_the_original(kind: str, overrides: dict[str, object], tmp_path: Path) -> None:
    original = tiny_models.make(tmp_path / "original", kind, torch_dtype="bfloat16", **overrides)
    converted = tmp_path / "converted"
    reports: list[tuple[int, int]] = []
    convert_gguf(
        write_gguf(tmp_path / "m.gguf", original), converted, lambda done, total: reports.append((done, total))
    )

    expected, actual = (load_file(path / "model.safetensors") for path in (original, converted))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    options = {"backend": "reference", "dtype": "fp32", "kv_dtype": "fp32", "block_size": 16, "memory_bytes": 8 << 20}
    token_ids = list(range(3, 60))
    logits = [logits_in_chunks(Engine.load(path, **options), token_ids, [57]) for path in (original, converted)]
    assert torch.equal(*logits)
    dones = [done for done, _ in reports]
    assert dones == sorted(dones)
    assert reports[0][0] == 0
    assert reports[-1] == (reports[0][1], reports[0][1])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_tokenizer_and_chat_template_are_the_original_ones(tmp_path: Path) -> None:
    original = tiny_models.make(tmp_path / "original")
    converted = tmp_path / "converted"
    convert_gguf(write_gguf(tmp_path / "m.gguf", original), converted)
    old, new = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (original, converted))
    for text in ("The capital of France is Paris.", "Grüße, 你好 🙂\n\n  x", "<|im_start|>user\nhi<|im_end|>", ""):
        assert new.encode(text).ids == old.encode(text).ids
        assert new.decode(new.encode(text).ids, skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "hi"}]
    rendered = [
        transformers.AutoTokenizer.from_pretrained(path).apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        for path in (original, converted)
    ]
    assert rendered[0] == rendered[1]
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["Ġin", "Ġ", "1", "2", "3", "Ġdays", "."]),
        ("qwen2", ["Ġin", "Ġ", "1", "2", "3", "Ġdays", "."]),
        ("llama-bpe", ["Ġin", "Ġ", "123", "Ġdays", "."]),
        ("gpt-2", ["Ġin", "Ġ123", "Ġdays", "."]),
    ],
)
def test_text_is_split_into_words_by_the_models_own_rule(pre: str, words: list[str], tmp_path: Path) -> None:
    original = tiny_models.make(tmp_path / "original")
    convert_gguf(write_gguf(tmp_path / "m.gguf", original, pre=pre), tmp_path / "converted")
    tokenizer = Tokenizer.from_file(str(tmp_path / "converted" / "tokenizer.json"))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(" in 123 days.")] == words


def test_a_tied_matrix_held_twice_is_taken_from_its_finer_copy(tmp_path: Path) -> None:
    original = tiny_models.make(tmp_path / "original")
    file = write_gguf(tmp_path / "m.gguf", original, qtype=gguf.GGMLQuantizationType.Q8_0, twice=True)
    convert_gguf(file, tmp_path / "converted")
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["tie_word_embeddings"] is True
    expected, actual = (load_file(tmp_path / name / "model.safetensors") for name in ("original", "converted"))
    assert "lm_head.weight" not in actual
    error = (actual["model.embed_tokens.weight"].float() - expected["model.embed_tokens.weight"].float()).abs().max()
    assert error < 0.02  # Q8_0 steps are 1/127 of a block's largest value, those of Q4_0 1/8


def test_llama3_rope_is_recovered_from_its_frequency_divisors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = tiny_models.make(tmp_path / "original", "llama3-rope", rope_parameters=scaling)
    config = transformers.AutoConfig.from_pretrained(original)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 1.0 / (500000.0 ** (torch.arange(0, 32, 2).float() / 32))
    file = write_gguf(tmp_path / "m.gguf", original, rope_freqs=(plain / scaled).numpy())
    convert_gguf(file, tmp_path / "converted")
    written = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert {**written["rope_scaling"], "rope_theta": written["rope_theta"]} == scaling

    odd = write_gguf(tmp_path / "odd.gguf", original, rope_freqs=np.linspace(1, 32, 16, dtype=np.float32))
    with pytest.raises(ConfigError, match="rope_freqs"):
        convert_gguf(odd, tmp_path / "other")


def test_big_models_are_written_as_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.convert.SHARD_BYTES", 100_000)
    original = tiny_models.make(tmp_path / "original")
    convert_gguf(write_gguf(tmp_path / "m.gguf", original), tmp_path / "converted")
    assert len(list((tmp_path / "converted").glob("model-*-of-*.safetensors"))) > 1
    options = {"backend": "reference", "block_size": 16, "memory_bytes": 8 << 20}
    assert Engine.load(tmp_path / "converted", **options).fingerprint == Engine.load(original, **options).fingerprint


def test_what_cannot_be_converted_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    original = tiny_models.make(tmp_path / "original")
    good = write_gguf(tmp_path / "good.gguf", original)
    cases = {
        "no readable GGUF file": (tmp_path / "text.gguf", b"not a model"),
        "fetch it again": (tmp_path / "short.gguf", good.read_bytes()[:-5000]),
    }
    for message, (path, content) in cases.items():
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            convert_gguf(path, tmp_path / "out")
    with pytest.raises(ConfigError, match="byte-level BPE"):
        convert_gguf(write_gguf(tmp_path / "spm.gguf", original, tokenizer="llama"), tmp_path / "out")
    with pytest.raises(ConfigError, match="splits words by the rules of 'deepseek-llm'"):
        convert_gguf(write_gguf(tmp_path / "pre.gguf", original, pre="deepseek-llm"), tmp_path / "out")
    with pytest.raises(ConfigError, match="architecture 'gpt2'"):
        convert_gguf(write_gguf(tmp_path / "arch.gguf", original, architecture="gpt2"), tmp_path / "out")
    with pytest.raises(ConfigError, match="exists already"):
        convert_gguf(good, original)
    with pytest.raises(ConfigError, match=r"nowhere\.gguf"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path / "out")
    names = [path.name for path in tmp_path.iterdir()]
    assert "out" not in names
    assert [name for name in names if name.startswith(".")] == []


def test_the_command_converts_and_reports_errors_in_one_line(tmp_path: Path) -> None:
    good = write_gguf(tmp_path / "good.gguf", tiny_models.make(tmp_path / "original"))
    command = [sys.executable, "-m", "engine.convert"]
    done = subprocess.run([*command, good, tmp_path / "out"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
    again = subprocess.run([*command, good, tmp_path / "out"], capture_output=True, text=True, timeout=100, check=False)
    assert again.returncode == 2
    assert (
        again.stderr.strip()
        == f"twinpool convert: {tmp_path / 'out'} exists already: remove it or name another directory"
    )
