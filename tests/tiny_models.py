"""Writes small Hugging Face model directories with fixed random weights and a real byte-level tokenizer.

    tiny_models.make(path, "llama")

Every kind exercises something that real checkpoints differ in. Weights are scaled so that logits spread as those of a
trained model do: answers vary with the prompt and greedy choices are not near ties.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests import tiny_deepseek_v4

Weights = Callable[[dict[str, Any], int], dict[str, torch.Tensor]]  # of a config and a seed

VOCAB_SIZE = 384
MAX_CONTEXT = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": True},
    "llama-bias": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
        "torch_dtype": "float32",
    },
    "llama3-rope": {"model_type": "llama", "head_dim": 32, "rope_parameters": _LLAMA3_ROPE},
    "llama-linear": {
        "model_type": "llama",
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "torch_dtype": "float16",
    },
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000000.0, "tie_word_embeddings": True},
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_theta": 1000000.0,
        "max_position_embeddings": 64,
        "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rope_theta": 1000000.0, "tie_word_embeddings": True},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "rope_theta": 1000000.0,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {
        "model_type": "mixtral",
        "rope_theta": 1000000.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "num_nextn_predict_layers": 0,
    },
    "deepseek-v3-halves": {
        "model_type": "deepseek_v3",
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 0,
        "rope_interleave": False,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
    },
    "deepseek-v4": tiny_deepseek_v4.SIZES,
    "deepseek-v4-pro": tiny_deepseek_v4.PRO,
    "qwen3-bias": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "num_key_value_heads": 1},
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
}


def make(
    path: Path, kind: str = "llama", *, seed: int = 0, shards: int = 1, weights: Weights | None = None, **overrides: Any
) -> Path:
    """Writes the model directory `path` and returns it. `overrides` go into config.json; weights: in random_weights'
    place."""
    path.mkdir(parents=True, exist_ok=True)
    config = _SIZES | KINDS[kind] | overrides
    config = {key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}
    config = {"torch_dtype": "bfloat16", "architectures": [_ARCHITECTURES[config["model_type"]]]} | config
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0], "do_sample": False})
    _write_weights(path, (weights or random_weights)(config, seed), shards)
    _write_tokenizer(path)
    return path


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Tensors under the names of published checkpoints, on a fixed seed, in the config's torch_dtype."""
    if config["model_type"] == "deepseek_v4":
        return tiny_deepseek_v4.random_weights(config, seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    qkv_bias = config["model_type"] == "qwen2" or config.get("attention_bias", False)
    weights: dict[str, torch.Tensor] = {}

    def normal(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        weights[name] = (torch.randn(shape, generator=generator) * std + mean).to(dtype)

    def linear(name: str, in_size: int, out_size: int, bias: bool) -> None:
        normal(f"{name}.weight", out_size, in_size, std=in_size**-0.5)
        if bias:
            normal(f"{name}.bias", out_size, std=0.2)

    def norm(name: str, size: int) -> None:
        normal(f"{name}.weight", size, std=0.1, mean=1.0)

    def gated(
        name: str, width: int, bias: bool = False, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    ) -> None:
        gate, up, down = names
        linear(f"{name}.{gate}", hidden, width, bias)
        linear(f"{name}.{up}", hidden, width, bias)
        linear(f"{name}.{down}", width, hidden, bias)

    def latent_attention(name: str) -> None:
        has_bias, q_rank, kv_rank = config.get("attention_bias", False), config["q_lora_rank"], config["kv_lora_rank"]
        nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        if q_rank is None:
            linear(f"{name}.q_proj", hidden, heads * (nope + rope), False)
        else:
            linear(f"{name}.q_a_proj", hidden, q_rank, has_bias)
            norm(f"{name}.q_a_layernorm", q_rank)
            linear(f"{name}.q_b_proj", q_rank, heads * (nope + rope), False)
        linear(f"{name}.kv_a_proj_with_mqa", hidden, kv_rank + rope, has_bias)
        norm(f"{name}.kv_a_layernorm", kv_rank)
        linear(f"{name}.kv_b_proj", kv_rank, heads * (nope + value), False)
        linear(f"{name}.o_proj", heads * value, hidden, has_bias)

    normal("model.embed_tokens.weight", config["vocab_size"], hidden, std=0.4)
    for index in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        norm(f"model.layers.{index}.input_layernorm", hidden)
        if config["model_type"] == "deepseek_v3":
            latent_attention(attention)
        else:
            linear(f"{attention}.q_proj", hidden, heads * head_dim, qkv_bias)
            linear(f"{attention}.k_proj", hidden, kv_heads * head_dim, qkv_bias)
            linear(f"{attention}.v_proj", hidden, kv_heads * head_dim, qkv_bias)
            linear(f"{attention}.o_proj", heads * head_dim, hidden, config.get("attention_bias", False))
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            norm(f"{attention}.q_norm", head_dim)
            norm(f"{attention}.k_norm", head_dim)
        norm(f"model.layers.{index}.post_attention_layernorm", hidden)
        if config["model_type"] == "qwen3_moe" and index not in config["mlp_only_layers"]:
            linear(f"{mlp}.gate", hidden, config["num_experts"], False)
            for expert in range(config["num_experts"]):
                gated(f"{mlp}.experts.{expert}", config["moe_intermediate_size"])
        elif config["model_type"] == "deepseek_v3" and index >= config["first_k_dense_replace"]:
            linear(f"{mlp}.gate", hidden, config["n_routed_experts"], False)
            normal(f"{mlp}.gate.e_score_correction_bias", config["n_routed_experts"], std=0.1)
            for name in ("gate.weight", "gate.e_score_correction_bias"):
                weights[f"{mlp}.{name}"] = weights[f"{mlp}.{name}"].float()
            for expert in range(config["n_routed_experts"]):
                gated(f"{mlp}.experts.{expert}", config["moe_intermediate_size"])
            gated(f"{mlp}.shared_experts", config["moe_intermediate_size"] * config.get("n_shared_experts", 1))
        elif config["model_type"] == "mixtral":
            sparse = f"model.layers.{index}.block_sparse_moe"
            linear(f"{sparse}.gate", hidden, config["num_local_experts"], False)
            for expert in range(config["num_local_experts"]):
                gated(f"{sparse}.experts.{expert}", inner, names=("w1", "w3", "w2"))
        else:
            gated(mlp, inner, bias=config.get("mlp_bias", False))
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        normal("lm_head.weight", config["vocab_size"], hidden, std=0.4)
    return weights


def _write_weights(path: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, path / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    _write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris, and the capital of Italy is Rome. "
    "A request is computed in one pool and its answer is streamed from another; what travels between them are blocks. "
    "What is the meaning of the words that we use when we speak of the weather, the sea and the stars? "
    "In the beginning there was a question, and the question was long; then there was an answer, and it was short."
)


def _write_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": MAX_CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(path / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
