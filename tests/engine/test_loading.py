"""Broken model directories and sizes that cannot work end in a ConfigError that says what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import memory, models
from engine.engine import Engine
from engine.loading import Checkpoint
from tests import tiny_models
from twinpool.errors import ConfigError


def load(path: Path, **options) -> Engine:
    return Engine.load(path, **({"backend": "reference", "block_size": 16, "memory_bytes": 1 << 20} | options))


def edit_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_models.make(tmp_path / "model", "llama", shards=2)


def refusal(path: Path, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, **options)
    return caught.value.message


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal(tmp_path)


def test_broken_json_is_named(path: Path) -> None:
    for text in ("{", "[" * 100_000):
        (path / "config.json").write_text(text)
        assert f"cannot read {path / 'config.json'}" in refusal(path)


def test_an_unsupported_architecture_names_the_supported_ones(path: Path) -> None:
    edit_config(path, model_type="gpt2")
    assert "'gpt2' is not supported; supported are llama, qwen2, qwen3" in refusal(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope type 'longrope': supported are default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "needs the number factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized checkpoints are not supported"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', it must be a number over 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, it must be a number over 0"),
        ({"rope_theta": 0}, "rope_theta is 0, it must be a number over 0"),
        ({"rope_scaling": [1]}, "rope_scaling is [1], it must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1, it must be a number over 0"),
        ({"bos_token_id": "<s>"}, "bos_token_id is '<s>', it must be a token id or a list"),
    ],
)
def test_a_config_that_cannot_run_is_refused(path: Path, changes: dict[str, object], message: str) -> None:
    edit_config(path, **changes)
    assert message in refusal(path)


def test_an_end_token_that_is_no_id_is_refused(path: Path) -> None:
    (path / "generation_config.json").write_text('{"eos_token_id": [2, "</s>"]}')
    assert "eos_token_id is [2, '</s>']" in refusal(path)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", '{"weight_map": 5}', '{"weight_map": {"a": 5}}'])
def test_a_broken_index_is_named(path: Path, text: str) -> None:
    (path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(path)


def test_a_shard_of_another_directory_is_not_read(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other/model.safetensors"}}')
    assert "no file of this directory" in refusal(path)


def test_a_missing_shard_is_named_with_what_it_holds(path: Path) -> None:
    shard = path / "model-00002-of-00002.safetensors"
    held = sorted(load_file(shard))
    shard.unlink()
    message = refusal(path)
    assert "lacks model-00002-of-00002.safetensors" in message
    assert f"({len(held)} tensors by model.safetensors.index.json, tensor {held[0]} among them)" in message


def test_missing_weights_point_to_the_converter(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    assert "twinpool convert" in refusal(path)


def test_a_truncated_file_is_named(path: Path) -> None:
    file = path / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert f"cannot read {file}" in refusal(path)


def test_a_missing_tensor_is_named(path: Path) -> None:
    edit_config(path, num_hidden_layers=4)
    assert "tensor model.layers.3.input_layernorm.weight is missing" in refusal(path)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is mapped")
def test_files_that_were_read_do_not_stay_in_the_workers_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loading.MAPPED_BYTES", 4 << 20)
    path, size = tmp_path / "model.safetensors", 2 << 20
    stored = {f"tensor.{i}": torch.full((size // 4,), float(i)) for i in range(16)}
    save_file(stored, path)
    checkpoint = Checkpoint(tmp_path)
    held = 0
    for name in stored:
        assert torch.equal(checkpoint.take(name, (size // 4,), torch.float32), stored[name])
        held = max(held, _resident(path))
    assert size <= held <= (4 << 20) + 2 * size  # of 32 MiB
    digest = checkpoint.digest()
    assert _resident(path) <= (4 << 20) + size
    assert Checkpoint(tmp_path).digest() == digest


def _resident(path: Path) -> int:
    """Bytes of the file's pages that this process has mapped and touched."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begins = [i for i, line in enumerate(lines) if line.endswith(f" {path}")]
    found = [next(line for line in lines[begin:] if line.startswith("Rss:")) for begin in begins]
    return sum(int(line.split()[1]) * 1024 for line in found)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(path: Path) -> None:
    edit_config(path, intermediate_size=256)
    message = refusal(path)
    assert "model.layers.0.mlp.gate_proj.weight has shape [128, 64], config.json implies [256, 64]" in message


@pytest.mark.parametrize(
    ("option", "value"), [("backend", "gpu"), ("dtype", "fp16"), ("kv_dtype", "int4"), ("block_size", -1)]
)
def test_a_wrong_option_is_named(path: Path, option: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load(path, **{option: value})
    assert caught.value.field == option
    assert str(value) in caught.value.message


def test_blocks_are_as_large_as_the_model_needs_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(path, block_size=0).cache.layout.block_size == 64
    monkeypatch.setattr(models, "block_granularity", lambda config: 48)
    assert load(path, block_size=0).cache.layout.block_size == 96
    assert load(path, block_size=48).cache.layout.block_size == 48
    message = refusal(path, block_size=64)
    assert "block_size is 64: allowed are multiples of 48" in message


def test_a_cache_without_room_for_a_block_is_refused(path: Path) -> None:
    assert "raise --memory" in refusal(path, memory_bytes=100)


def test_a_cache_over_the_machines_memory_is_refused_before_it_is_touched(path: Path) -> None:
    message = refusal(path, memory_bytes=1 << 50)
    assert "too little memory" in message
    assert "1,073,741,824.0 MiB" in message


def test_memory_is_the_lesser_of_machine_and_container(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert memory.available_bytes(cgroup, meminfo) == 5000 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("3000000\n")
    (cgroup / "memory.current").write_text("2500000\n")
    (cgroup / "memory.stat").write_text("anon 100\ninactive_file 400000\n")
    assert memory.available_bytes(cgroup, meminfo) == 900_000
    (cgroup / "memory.max").write_text("max\n")
    assert memory.available_bytes(cgroup, meminfo) == 5000 * 1024
    meminfo.unlink()
    shutil.rmtree(cgroup)
    assert memory.available_bytes(cgroup, meminfo) is None


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    return tiny_models.make(tmp_path / "sparse", "qwen3-moe", shards=2)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes the tensors of the directory, which become one file."""
    tensors = {}
    for file in path.glob("model*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_a_missing_expert_is_named_with_the_shape_it_should_have(sparse: Path) -> None:
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    rewrite(sparse, lambda tensors: tensors.pop(name))
    message = refusal(sparse)
    assert name in message
    assert "[48, 64]" in message


def test_an_expert_of_another_shape_is_named_with_its_file(sparse: Path) -> None:
    edit_config(sparse, moe_intermediate_size=32)
    message = refusal(sparse)
    assert "model.layers.0.mlp.experts.0.gate_proj.weight has shape [48, 64], config.json implies [32, 64]" in message
    assert "-of-00002.safetensors" in message


def test_a_config_of_other_experts_than_the_weights_is_refused(sparse: Path) -> None:
    edit_config(sparse, num_experts=12)
    assert "model.layers.0.mlp.gate.weight has shape [16, 64], config.json implies [12, 64]" in refusal(sparse)
    edit_config(sparse, num_experts=2)
    assert "4 experts a token, but there are 2 experts" in refusal(sparse)


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "deepseek-v3", "deepseek-v4"])
def test_more_layers_than_the_config_has_are_refused_with_file_tensor_and_shape(tmp_path: Path, kind: str) -> None:
    path = tiny_models.make(tmp_path / "model", kind)
    count = json.loads((path / "config.json").read_text())["num_hidden_layers"] - 1
    edit_config(path, num_hidden_layers=count)
    message = refusal(path, block_size=0)
    assert re.search(
        rf"model.safetensors: tensor (model\.)?layers\.{count}\.\S+ \[[\d, ]+\] is of a layer more", message
    )
    assert f"the {count} that config.json implies" in message


@pytest.mark.parametrize(
    ("kind", "changes", "tensor"),
    [
        ("deepseek-v4", {"compress_ratios": [0, 0, 0, 128, 4]}, r"layers\.2\.attn\.(compressor|indexer)\.\S+"),
        ("deepseek-v4", {"num_hash_layers": 0}, None),  # the bias that is implied is missing
        ("llama-bias", {"attention_bias": False}, r"model\.layers\.0\.self_attn\.\w_proj\.bias"),
        ("qwen2", {"model_type": "llama"}, r"model\.layers\.0\.self_attn\.\w_proj\.bias"),
        ("qwen3", {"model_type": "llama"}, r"model\.layers\.0\.self_attn\.[qk]_norm\.weight"),
    ],
)
def test_tensors_that_the_config_knows_nothing_of_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, object], tensor: str | None
) -> None:
    """Unread they would leave another model that answers as if nothing were wrong."""
    path = tiny_models.make(tmp_path / "model", kind)
    edit_config(path, **changes)
    message = refusal(path, block_size=0)
    if tensor is None:
        assert "gate.bias is missing" in message
    else:
        assert re.search(rf"model.safetensors: tensor {tensor} \[[\d, ]+\] has no place in layer [02] ", message)


def test_an_output_layer_that_is_not_the_embedding_is_not_tied_to_it(path: Path) -> None:
    """Files of tied models may hold the matrix twice, but not two matrices."""
    table = {}
    for file in path.glob("model*.safetensors"):
        table |= {name: each for name, each in load_file(file).items() if "embed_tokens" in name}
    (embedding,) = table.values()
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    load(path)
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    message = refusal(path)
    assert f"{path / 'model.safetensors'}: tensor lm_head.weight [384, 64] is not the embedding" in message
    assert "tie_word_embeddings" in message


def test_frequencies_that_old_files_hold_are_not_needed(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(path)


def test_codes_without_scales_are_refused_with_file_tensor_and_shape(sparse: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"

    def as_fp8(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    rewrite(sparse, as_fp8)
    message = refusal(sparse)
    assert f"{sparse / 'model.safetensors'}: tensor {name} [128, 64] is F8_E4M3" in message
    rewrite(sparse, lambda tensors: tensors.update({f"{name}_scale_inv": torch.ones(1, 2)}))
    assert f"tensor {name}_scale_inv has shape [1, 2], config.json implies [1, 1]" in refusal(sparse)
    edit_config(sparse, quantization_config={"quant_method": "fp8", "weight_block_size": [1, 32]})
    assert "quantized checkpoints are not supported but for fp8" in refusal(sparse)
