"""DeepSeek-V4's attention over a window and compressed entries, and its residual streams, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config_json import number, size
from engine.rope import RopeParams, parse_rope
from twinpool.errors import ConfigError

WINDOW, SPARSE, HEAVY = "sliding window", "compressed, indexed", "compressed"
_BY_RATIO = {0: WINDOW, 4: SPARSE, 128: HEAVY}
_BY_TYPE = {
    "sliding_attention": WINDOW,
    "compressed_sparse_attention": SPARSE,
    "heavily_compressed_attention": HEAVY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedConfig:
    """Sizes are elements. A head's keys are its values; rope turns the last `rope_dim` of them."""

    kinds: tuple[str, ...]  # of each layer: WINDOW, SPARSE or HEAVY
    sparse_rate: int  # tokens that become one entry
    heavy_rate: int
    window: int  # tokens, the newest included
    head_dim: int
    rope_dim: int
    q_rank: int
    output_groups: int
    output_rank: int  # of each group
    index_heads: int
    index_dim: int
    index_top_k: int  # entries that a token of a SPARSE layer attends to
    streams: int
    sinkhorn_iterations: int
    streams_eps: float
    plain_rope: RopeParams  # of WINDOW layers; the others have ModelConfig.rope

    def rate(self, kind: str) -> int:
        """Tokens an entry in layers of that kind; 0: they have no entries."""
        return {WINDOW: 0, SPARSE: self.sparse_rate, HEAVY: self.heavy_rate}[kind]

    def num_parameters(self, hidden: int, num_heads: int) -> int:
        """Of the matrices of all layers but their experts, and of what mixes the streams."""
        queries, outputs = num_heads * self.head_dim, self.output_groups * self.output_rank
        attention = self.q_rank * (hidden + queries) + self.head_dim * hidden
        attention += self.output_rank * queries + outputs * hidden
        mixing = 2 * self.streams * (2 + self.streams) * self.streams * hidden
        index = hidden * (4 * self.index_dim + self.index_heads) + self.index_heads * self.index_dim * self.q_rank
        compressors = {WINDOW: 0, SPARSE: 4 * self.head_dim * hidden + index, HEAVY: 2 * self.head_dim * hidden}
        return sum(attention + mixing + compressors[kind] for kind in self.kinds)


def parse_compressed(config: Mapping[str, Any], num_layers: int) -> CompressedConfig:
    """Raises ConfigError for what cannot be."""
    heads, head_dim = size(config, "num_attention_heads"), size(config, "head_dim", 512)
    rates = config.get("compress_rates") or {}
    if not isinstance(rates, Mapping):
        raise ConfigError(f"config.json: compress_rates is {rates!r}, it must be an object")
    compressed = CompressedConfig(
        kinds=_kinds(config, num_layers),
        sparse_rate=size(rates, "compressed_sparse_attention", size(config, "compress_rate_csa", 4)),
        heavy_rate=size(rates, "heavily_compressed_attention", size(config, "compress_rate_hca", 128)),
        window=size(config, "sliding_window", 128),
        head_dim=head_dim,
        rope_dim=_rope_dim(config, head_dim),
        q_rank=size(config, "q_lora_rank", 1024),
        output_groups=size(config, "o_groups", 8),
        output_rank=size(config, "o_lora_rank", 1024),
        index_heads=size(config, "index_n_heads", 64),
        index_dim=size(config, "index_head_dim", 128),
        index_top_k=size(config, "index_topk", 512),
        streams=size(config, "hc_mult", 4),
        sinkhorn_iterations=size(config, "hc_sinkhorn_iters", 20),
        streams_eps=number(config, "hc_eps", 1e-6),
        plain_rope=parse_rope(_rope_section(config, "main"), 10000.0, size(config, "max_position_embeddings", 1 << 20)),
    )
    if size(config, "num_key_value_heads", 1) != 1:
        raise ConfigError(
            f"config.json: num_key_value_heads is {config['num_key_value_heads']}, deepseek_v4 has 1, shared by all"
        )
    if heads % compressed.output_groups:
        raise ConfigError(
            f"config.json: {heads} attention heads are no multiple of {compressed.output_groups} output groups "
            "(o_groups)"
        )
    for name, value in (("head_dim", head_dim), ("index_head_dim", compressed.index_dim)):
        if value % 4 or value < compressed.rope_dim:
            raise ConfigError(
                f"config.json: {name} is {value}, it must be a multiple of 4 and hold the {compressed.rope_dim} "
                "elements that rope turns"
            )
    return compressed


def compress_rope(config: Mapping[str, Any], max_positions: int) -> RopeParams:
    """Of layers with entries. Their yarn leaves cosines and sines as they are, whatever its factor."""
    rope = parse_rope(_rope_section(config, "compress"), 160000.0, max_positions)
    if rope.kind != "yarn":
        return rope
    scaling = {"attention_factor": 1.0} | dict(rope.scaling)
    return RopeParams(kind=rope.kind, theta=rope.theta, original_max_context=rope.original_max_context, scaling=scaling)


def _rope_section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`main` or `compress`, spelled one of three ways, as a config that parse_rope reads."""
    given = config.get("rope_parameters")
    if isinstance(given, Mapping) and isinstance(given.get(name), Mapping):
        return {"rope_parameters": {k: v for k, v in given[name].items() if k != "partial_rotary_factor"}}
    if name == "main":
        return {"rope_theta": config.get("rope_theta")}
    source = given or config.get("rope_scaling") or {}
    if not isinstance(source, Mapping):
        raise ConfigError(f"config.json: rope_parameters or rope_scaling is {source!r}, it must be an object")
    entries = {k: v for k, v in source.items() if k not in ("partial_rotary_factor", "rope_theta", "main", "compress")}
    return {"rope_parameters": entries | {"rope_theta": config.get("compress_rope_theta")}}


def _rope_dim(config: Mapping[str, Any], head_dim: int) -> int:
    if config.get("qk_rope_head_dim") is not None:
        rope_dim = size(config, "qk_rope_head_dim")
    else:
        rope_dim = int(head_dim * number(config, "partial_rotary_factor", 0.125))
    if rope_dim < 1 or rope_dim % 4:
        raise ConfigError(f"config.json: rope turns {rope_dim} elements (qk_rope_head_dim), it must be a multiple of 4")
    return rope_dim


def _kinds(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Entries behind the last layer are those of layers that predict further tokens."""
    by: Mapping[Any, str] = _BY_RATIO
    given = config.get("compress_ratios")
    if given is None and isinstance(config.get("layer_types"), list):
        by, given = _BY_TYPE, config["layer_types"]
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) < num_layers:
        raise ConfigError(f"config.json: compress_ratios or layer_types must name the kinds of all {num_layers} layers")
    unknown = [each for each in given[:num_layers] if not isinstance(each, int | str) or each not in by]
    if unknown:
        known = ", ".join(str(each) for each in by)
        raise ConfigError(f"config.json: a layer compresses by {unknown[0]!r}; known are {known}")
    kinds = tuple(by[each] for each in given[:num_layers])
    if set(kinds) == {WINDOW}:  # no published model; its cache would have no blocks
        raise ConfigError(
            "config.json: compress_ratios or layer_types name windows alone; supported are models of which at least "
            "one layer compresses what lies behind its window"
        )
    return kinds
