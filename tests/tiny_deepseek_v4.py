"""Random weights of small DeepSeek-V4 models, under the names that DeepSeek publishes or those of transformers.

What a fresh transformers model leaves at zero or one (sinks, biases, tables, position biases, hyper-connections) is
random here, or an error in it would stay hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

# Sliding-window, sparse and heavy layers, as DeepSeek-V4-Flash orders them; compress_rates make them small.
SIZES: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 64,
    "intermediate_size": None,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 1,
    "swiglu_limit": 0.8,
    "sliding_window": 8,
    "max_position_embeddings": 4096,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
# Two heavy layers first, as in DeepSeek-V4-Pro, and the spelling of transformers.
PRO: dict[str, Any] = SIZES | {
    "compress_ratios": None,
    "layer_types": [
        f"{kind}_attention"
        for kind in (*["heavily_compressed"] * 2, "compressed_sparse", "heavily_compressed", "compressed_sparse")
    ],
    "o_groups": 4,
    "n_routed_experts": 12,
    "routed_scaling_factor": 2.5,
}
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_FP32 = ("hc_", "attn_sink", ".ape", "gate.bias", "norm.weight")


def random_weights(
    config: Mapping[str, Any], seed: int, draw: Callable[[tuple[int, ...]], torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Tensors under DeepSeek's names, on a fixed seed, in the config's torch_dtype; what is published in fp32 is.

    draw: fp32 of a shape, about normal, where fresh numbers for all would take too long.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = draw or partial(torch.randn, generator=generator)
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    q_rank, groups, o_rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    streams, inner, experts = config["hc_mult"], config["moe_intermediate_size"], config["n_routed_experts"]
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    rates = config.get("compress_rates") or {}
    sparse, heavy = rates.get("compressed_sparse_attention", 4), rates.get("heavily_compressed_attention", 128)
    ratios = config.get("compress_ratios") or [_RATIOS[kind] for kind in config["layer_types"]]
    weights: dict[str, torch.Tensor] = {}

    def normal(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        fp32 = any(part in name for part in _FP32)
        dtype = torch.float32 if fp32 else getattr(torch, config["torch_dtype"])
        weights[name] = (draw(shape) * std + mean).to(dtype)

    def linear(name: str, in_size: int, out_size: int, gain: float = 1.0) -> None:
        normal(f"{name}.weight", out_size, in_size, std=gain * in_size**-0.5)

    def norm(name: str, size: int) -> None:
        normal(f"{name}.weight", size, std=0.1, mean=1.0)

    def hyper(name: str, outputs: int, scales: int) -> None:
        normal(f"{name}_fn", outputs, streams * hidden, std=(streams * hidden) ** -0.5)
        normal(f"{name}_base", outputs, std=0.5)
        normal(f"{name}_scale", scales, std=0.1, mean=1.0)

    def compressor(name: str, width: int, size: int, ratio: int) -> None:
        linear(f"{name}.wkv", hidden, width)
        linear(f"{name}.wgate", hidden, width)
        normal(f"{name}.ape", ratio, width, std=0.5)
        norm(f"{name}.norm", size)

    normal("embed.weight", config["vocab_size"], hidden, std=0.4)
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        attention, block = f"{layer}.attn", f"{layer}.ffn"
        norm(f"{layer}.attn_norm", hidden)
        norm(f"{layer}.ffn_norm", hidden)
        hyper(f"{layer}.hc_attn", streams * (2 + streams), 3)
        hyper(f"{layer}.hc_ffn", streams * (2 + streams), 3)
        linear(f"{attention}.wq_a", hidden, q_rank)
        norm(f"{attention}.q_norm", q_rank)
        linear(f"{attention}.wq_b", q_rank, heads * dim)
        linear(f"{attention}.wkv", hidden, dim)
        norm(f"{attention}.kv_norm", dim)
        linear(f"{attention}.wo_a", heads * dim // groups, groups * o_rank)
        linear(f"{attention}.wo_b", groups * o_rank, hidden)
        normal(f"{attention}.attn_sink", heads, std=0.5)
        if ratios[index] == 128:
            compressor(f"{attention}.compressor", dim, dim, heavy)
        if ratios[index] == 4:
            compressor(f"{attention}.compressor", 2 * dim, dim, sparse)
            compressor(f"{attention}.indexer.compressor", 2 * index_dim, index_dim, sparse)
            linear(f"{attention}.indexer.wq_b", q_rank, index_heads * index_dim)
            linear(f"{attention}.indexer.weights_proj", hidden, index_heads)
        linear(f"{block}.gate", hidden, experts)
        if index < config["num_hash_layers"]:
            order = torch.rand(config["vocab_size"], experts, generator=generator).argsort(-1)
            weights[f"{block}.gate.tid2eid"] = order[:, : config["num_experts_per_tok"]].contiguous()
        else:
            normal(f"{block}.gate.bias", experts, std=0.1)
        for expert in range(experts):
            _expert(linear, f"{block}.experts.{expert}", hidden, inner)
        _expert(linear, f"{block}.shared_experts", hidden, inner)
    hyper("hc_head", streams, 1)
    norm("norm", hidden)
    normal("head.weight", config["vocab_size"], hidden, std=0.4)
    return weights


def _expert(linear: Any, name: str, hidden: int, inner: int) -> None:
    linear(f"{name}.w1", hidden, inner)
    linear(f"{name}.w3", hidden, inner)
    linear(f"{name}.w2", inner, hidden)


_RENAMES = [
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"^layers\.", "model.layers."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn\.attn_sink", ".self_attn.sinks"),
    (r"\.attn\.q_norm\.", ".self_attn.q_a_norm."),
    (r"\.attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.", ".self_attn."),
    (r"\.w(q_a|q_b|kv|gate|o_a|o_b)\.", r".\1_proj."),
    (r"\.ape$", ".position_bias"),
    (r"(compressor|indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.ffn\.", ".mlp."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
]


def transformers_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights as transformers calls and stacks them."""
    renamed = {}
    for name, value in weights.items():
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    for block in sorted({name.split(".experts.")[0] for name in renamed if ".experts." in name}):
        count = sum(1 for name in renamed if name.startswith(f"{block}.experts.") and "down_proj" in name)
        parts = [
            [renamed.pop(f"{block}.experts.{e}.{part}_proj.weight") for e in range(count)]
            for part in ("gate", "up", "down")
        ]
        gate_up = [torch.cat(pair) for pair in zip(parts[0], parts[1], strict=True)]
        renamed[f"{block}.experts.gate_up_proj"] = torch.stack(gate_up)
        renamed[f"{block}.experts.down_proj"] = torch.stack(parts[2])
    return renamed
