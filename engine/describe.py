"""What a model needs, from its config.json alone: parameters, and bytes of cache by layer type.

    python -m engine.describe MODEL [--context 131072] [--memory GIB]      (what `twinpool convert --describe` runs)

Also for DeepSeek-V4, which the engine does not run yet: its window, its compressed entries and those of its indexer, in
bf16 or with int8 indexer entries; sums of windows that are not full yet are in fp32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config_json import read_json, size
from engine.model_config import ModelConfig
from engine.models import cache_layout
from twinpool.errors import ConfigError

FORMATS = ("bf16", "int8")
CONTEXT = 131072
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """What layers of one type cache: bytes for each token by format, and for a sequence however long it is."""

    kind: str
    layers: int
    token_bytes: Mapping[str, float]
    window_bytes: int = 0
    state_bytes: int = 0  # at most, of what is not whole yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    model_type: str
    num_layers: int
    parameters: int
    active_parameters: int  # of one token
    caches: Sequence[LayerCache]

    def token_bytes(self, kind: str) -> float:
        """Of all layers; kind: one of FORMATS."""
        return sum(each.layers * each.token_bytes[kind] for each in self.caches)

    def sequence_bytes(self, kind: str, context: int, *, states: bool = False) -> float:
        """Of a sequence of `context` tokens over all layers, windows full; `states`: with the most of what is not
        whole."""
        fixed = sum(each.layers * (each.window_bytes + states * each.state_bytes) for each in self.caches)
        return context * self.token_bytes(kind) + fixed

    def sequences_in(self, memory_bytes: float, kind: str, context: int) -> int:
        return int(memory_bytes // self.sequence_bytes(kind, context, states=True))


def describe(model: Path) -> Description:
    """model: a directory with config.json, or that file. Raises ConfigError for a model that is not known."""
    directory = model.parent if model.name == "config.json" else model
    config = read_json(directory / "config.json")
    if config.get("model_type") == "deepseek_v4":
        return _deepseek_v4(config)
    parsed = ModelConfig.read(directory)
    layouts = {kind: cache_layout(parsed, 1, kind) for kind in FORMATS}
    return Description(
        model_type=parsed.model_type,
        num_layers=parsed.num_layers,
        parameters=parsed.num_parameters,
        active_parameters=parsed.num_active_parameters,
        caches=[
            LayerCache(
                kind="keys and values" if parsed.latent is None else "latents",
                layers=parsed.num_layers,
                token_bytes={kind: layout.block_bytes // layout.num_layers for kind, layout in layouts.items()},
            )
        ],
    )


_V4_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _deepseek_v4(config: Mapping[str, Any]) -> Description:
    layers, hidden = size(config, "num_hidden_layers"), size(config, "hidden_size")
    heads, head_dim = size(config, "num_attention_heads"), size(config, "head_dim", 512)
    q_rank, inner = size(config, "q_lora_rank", 1024), size(config, "moe_intermediate_size", 2048)
    index_heads, index_dim = size(config, "index_n_heads", 64), size(config, "index_head_dim", 128)
    o_groups, o_rank = size(config, "o_groups", 8), size(config, "o_lora_rank", 1024)
    experts, chosen = size(config, "n_routed_experts", 256), size(config, "num_experts_per_tok", 6)
    streams, ratios = size(config, "hc_mult", 4), _v4_ratios(config, layers)
    window = size(config, "sliding_window", 128) * head_dim * 2

    attention = (
        q_rank * (hidden + heads * head_dim) + head_dim * hidden + o_rank * (heads * head_dim + o_groups * hidden)
    )
    indexer = hidden * (4 * index_dim + index_heads) + index_heads * index_dim * q_rank
    compressor = {0: 0, 4: 4 * head_dim * hidden + indexer, 128: 2 * head_dim * hidden}
    hyper_connections = 2 * (2 * streams + streams**2) * streams * hidden
    every = 2 * size(config, "vocab_size", 129280) * hidden + sum(
        attention + compressor[ratio] + hyper_connections + hidden * experts for ratio in ratios
    )
    expert = 3 * inner * hidden
    shared = size(config, "n_shared_experts", 1) * expert

    entry, index_entry = 2 * head_dim, {"bf16": 2 * index_dim, "int8": index_dim + 2}
    kinds = {
        0: LayerCache(
            kind="sliding window", layers=ratios.count(0), token_bytes=dict.fromkeys(FORMATS, 0.0), window_bytes=window
        ),
        4: LayerCache(
            kind="compressed 4, indexed",
            layers=ratios.count(4),
            token_bytes={kind: (entry + index_entry[kind]) / 4 for kind in FORMATS},
            window_bytes=window,
            # Keys and gates in fp32: three tokens of both halves, and one half of the four before.
            state_bytes=2 * 4 * (3 * 2 + 4) * (head_dim + index_dim),
        ),
        128: LayerCache(
            kind="compressed 128",
            layers=ratios.count(128),
            token_bytes=dict.fromkeys(FORMATS, entry / 128),
            window_bytes=window,
            state_bytes=2 * 4 * 127 * head_dim,
        ),
    }
    return Description(
        model_type="deepseek_v4",
        num_layers=layers,
        parameters=every + layers * (experts * expert + shared),
        active_parameters=every + layers * (chosen * expert + shared),
        caches=[each for each in kinds.values() if each.layers],
    )


def _v4_ratios(config: Mapping[str, Any], layers: int) -> list[int]:
    """Of each layer: 0, 4 or 128. Entries behind the last layer are those of layers for further tokens."""
    given = config.get("compress_ratios")
    if given is None and isinstance(config.get("layer_types"), list):
        given = [_V4_RATIOS.get(kind, kind) for kind in config["layer_types"]]
    if not isinstance(given, list) or len(given) < layers:
        raise ConfigError(f"config.json: compress_ratios or layer_types must name the kinds of all {layers} layers")
    if unknown := [ratio for ratio in given[:layers] if ratio not in _V4_RATIOS.values()]:
        raise ConfigError(f"config.json: a layer compresses by {unknown[0]!r}; known are 0, 4 and 128")
    return given[:layers]


def table(found: Description, context: int, memory_gib: float) -> list[str]:
    """The lines that are printed."""
    lines = [
        f"{found.model_type}: {found.num_layers} layers, {found.parameters / 1e9:.1f} billion parameters, "
        f"{found.active_parameters / 1e9:.1f} billion a token",
        f"{'cache':34}" + "".join(f"{kind:>16}" for kind in FORMATS),
    ]

    def line(title: str, values: Sequence[str]) -> None:
        lines.append(f"{title:34}" + "".join(f"{value:>16}" for value in values))

    for each in found.caches:
        line(f"{each.layers} x {each.kind}, bytes a token", [f"{each.token_bytes[kind]:,.6g}" for kind in FORMATS])
        if each.window_bytes:
            line("   window, bytes", [f"{each.window_bytes:,}"] * 2)
        if each.state_bytes:
            line("   unfinished entries, at most", [f"{each.state_bytes:,}"] * 2)
    line("all layers, bytes a token", [f"{found.token_bytes(kind):,.9g}" for kind in FORMATS])
    line(
        f"a sequence of {context:,} tokens",
        [f"{found.sequence_bytes(kind, context) / (1 << 20):,.1f} MiB" for kind in FORMATS],
    )
    fitting = [f"{found.sequences_in(memory_gib * GIB, kind, context):,}" for kind in FORMATS]
    line(f"such sequences in {memory_gib:g} GiB", fitting)
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="twinpool convert --describe", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a Hugging Face directory, or its config.json")
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"tokens of a sequence (default {CONTEXT})")
    parser.add_argument("--memory", type=float, default=64.0, help="GiB of cache (default 64)")
    args = parser.parse_args(argv)
    if args.context < 1 or args.memory <= 0:
        print("twinpool convert: --context and --memory must be over 0", file=sys.stderr)
        return 2
    try:
        found = describe(args.model)
    except ConfigError as exc:
        print(f"twinpool convert: {exc.message}", file=sys.stderr)
        return 2
    print("\n".join(table(found, args.context, args.memory)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
