"""What a model is, read from config.json and generation_config.json of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.compressed_config import CompressedConfig, compress_rope, parse_compressed
from engine.config_json import number, read_json, size
from engine.dequantize import FP8_BLOCK
from engine.latent_config import LatentConfig, parse_latent
from engine.moe_config import MoeConfig, parse_moe
from engine.rope import RopeParams, parse_rope
from twinpool.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a `model_type` implies and config.json does not say."""

    qkv_bias: bool = False  # where config.json has no attention_bias
    qk_norm: bool = False  # RMSNorm over each query and key head, before rope
    theta: float = 10000.0
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True, max_positions=32768),
    "qwen3": Family(qk_norm=True, head_dim=128, max_positions=32768),
    "qwen3_moe": Family(qk_norm=True, max_positions=32768),
    "deepseek_v3": Family(max_positions=4096),
    "deepseek_v4": Family(head_dim=512, max_positions=1 << 20),
    "mixtral": Family(theta=1e6, rms_norm_eps=1e-5, max_positions=131072),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder. Sizes are elements; `max_context` is the most tokens of prompt and answer together."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context: int
    rope: RopeParams
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    moe: MoeConfig | None = None  # None: dense
    latent: LatentConfig | None = None  # None: K and V of every KV head are cached, or what `compressed` says
    compressed: CompressedConfig | None = None

    @property
    def num_parameters(self) -> int:
        """Of the matrices; norms and biases are small beside them."""
        return self._parameters(None if self.moe is None else self.moe.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Of the matrices that one token passes through."""
        return self._parameters(None if self.moe is None else self.moe.experts_per_token)

    def _parameters(self, num_experts: int | None) -> int:
        sparse = sum(self.moe.sparse_layers) if self.moe is not None else 0
        per_channel = (self.num_layers - sparse) * 3 * self.intermediate_size
        if self.moe is not None and num_experts is not None:
            experts = num_experts * self.moe.expert_elements + 3 * self.moe.shared_size + self.moe.num_experts
            per_channel += sparse * experts
        per_channel += self.vocab_size * (1 if self.tie_word_embeddings else 2)
        return self._attention_parameters + self.hidden_size * per_channel

    @property
    def _attention_parameters(self) -> int:
        """Of all layers' attention."""
        if self.compressed is not None:
            return self.compressed.num_parameters(self.hidden_size, self.num_heads)
        if self.latent is not None:
            return self.num_layers * self.latent.num_parameters(self.hidden_size, self.num_heads)
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # q and o, k and v
        return self.num_layers * self.hidden_size * heads * self.head_dim

    @classmethod
    def read(cls, model_dir: Path) -> ModelConfig:
        """Raises ConfigError for a missing or broken file and for a model that the engine cannot run."""
        if not model_dir.is_dir():
            raise ConfigError(f"no model directory at {model_dir}: give one with config.json and *.safetensors")
        config = read_json(model_dir / "config.json")
        generation_path = model_dir / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        try:
            return cls._parse(config, generation)
        except ConfigError as exc:
            raise ConfigError(f"{model_dir}: {exc.message}") from exc

    @classmethod
    def _parse(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise ConfigError(
                f"config.json: model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}"
            )
        _refuse_unsupported(config)
        family = FAMILIES[model_type]
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        num_layers = size(config, "num_hidden_layers")
        is_compressed = model_type == "deepseek_v4"
        kv_heads = size(config, "num_key_value_heads", 1 if is_compressed else heads)
        max_positions = size(config, "max_position_embeddings", family.max_positions)
        compressed = parse_compressed(config, num_layers) if is_compressed else None
        if is_compressed:
            rope = compress_rope(config, max_positions)
        else:
            rope = parse_rope(config, family.theta, max_positions)
        latent = parse_latent(config, rope) if model_type == "deepseek_v3" else None
        head_dim = size(config, "head_dim", family.head_dim or hidden // heads) if latent is None else latent.qk_dim
        if heads % kv_heads:
            raise ConfigError(f"config.json: {heads} attention heads are no multiple of {kv_heads} key-value heads")
        if head_dim % 2:
            raise ConfigError(f"config.json: head_dim {head_dim} is odd, rotary embeddings need pairs")
        moe = parse_moe(config, num_layers)
        attention_bias = bool(config.get("attention_bias", False))
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        return cls(
            model_type=model_type,
            vocab_size=size(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=size(config, "intermediate_size", moe.inner_size if moe and is_compressed else None),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=number(config, "rms_norm_eps", family.rms_norm_eps),
            max_context=_max_context(rope, max_positions),
            rope=rope,
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias and not family.qkv_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=next(iter(_token_ids("bos_token_id", config.get("bos_token_id"))), None),
            eos_token_ids=_token_ids("eos_token_id", eos),
            moe=moe,
            latent=latent,
            compressed=compressed,
        )


def _max_context(rope: RopeParams, max_positions: int) -> int:
    """yarn and linear files often keep the length from before the scaling in max_position_embeddings."""
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_max_context * rope.scaling["factor"]))
    return max_positions


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window is not supported, only full attention")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
    quantization = config.get("quantization_config")
    if quantization and not _is_block_fp8(quantization):
        raise ConfigError(
            f"config.json: quantization_config {quantization!r}: quantized checkpoints are not supported but for fp8 "
            f"with weight_block_size [{FP8_BLOCK}, {FP8_BLOCK}], use one in bf16, fp16 or fp32"
        )


def _is_block_fp8(quantization: Any) -> bool:
    """As DeepSeek-V3 is published: e4m3 codes with one scale a square block, dequantized at load."""
    return isinstance(quantization, Mapping) and (
        quantization.get("quant_method") == "fp8"
        and quantization.get("fmt", "e4m3") == "e4m3"
        and quantization.get("weight_block_size") == [FP8_BLOCK, FP8_BLOCK]
    )


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    """None, one id or a list of ids, as both files spell them."""
    token_ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in token_ids):
        raise ConfigError(f"config.json or generation_config.json: {key} is {value!r}, it must be a token id or a list")
    return token_ids
