"""What a model needs, from its config.json alone: parameters, and bytes of cache by layer type.

    python -m engine.describe MODEL [--context 131072] [--memory GIB]      (what `twinpool convert --describe` runs)

All sizes are those of the cache's own layouts. For DeepSeek-V4 there is one format more, with int8 for the entries of
indexers alone: what its publishers count with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.compressed_cache import CompressedLayout
from engine.compressed_config import WINDOW, CompressedConfig
from engine.model_config import ModelConfig
from engine.models import block_granularity, cache_layout
from twinpool.errors import ConfigError

FORMATS = ("bf16", "int8")
INT8_INDEX = "int8 index"
CONTEXT = 131072
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """What layers of one type cache, in bytes by format: for each token, and for a sequence however long it is."""

    kind: str
    layers: int
    token_bytes: Mapping[str, float]
    window_bytes: Mapping[str, int]
    state_bytes: int = 0  # at most, of what is not whole yet, in every format


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    model_type: str
    num_layers: int
    parameters: int
    active_parameters: int  # of one token
    caches: Sequence[LayerCache]

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(self.caches[0].token_bytes)

    def token_bytes(self, kind: str) -> float:
        """Of all layers; kind: one of `formats`."""
        return sum(each.layers * each.token_bytes[kind] for each in self.caches)

    def sequence_bytes(self, kind: str, context: int, *, states: bool = False) -> float:
        """Of a sequence of `context` tokens over all layers, windows full; `states`: with the most of what is not
        whole."""
        fixed = sum(each.layers * (each.window_bytes[kind] + states * each.state_bytes) for each in self.caches)
        return context * self.token_bytes(kind) + fixed

    def sequences_in(self, memory_bytes: float, kind: str, context: int) -> int:
        return int(memory_bytes // self.sequence_bytes(kind, context, states=True))


def describe(model: Path) -> Description:
    """model: a directory with config.json, or that file. Raises ConfigError for a model that is not known."""
    parsed = ModelConfig.read(model.parent if model.name == "config.json" else model)
    if parsed.compressed is not None:
        caches = _compressed(parsed.compressed, block_granularity(parsed))
    else:
        layouts = {kind: cache_layout(parsed, 1, kind) for kind in FORMATS}
        caches = [
            LayerCache(
                kind="keys and values" if parsed.latent is None else "latents",
                layers=parsed.num_layers,
                token_bytes={kind: layout.block_bytes // layout.num_layers for kind, layout in layouts.items()},
                window_bytes=dict.fromkeys(FORMATS, 0),
            )
        ]
    return Description(
        model_type=parsed.model_type,
        num_layers=parsed.num_layers,
        parameters=parsed.num_parameters,
        active_parameters=parsed.num_active_parameters,
        caches=caches,
    )


def _compressed(model: CompressedConfig, block_size: int) -> list[LayerCache]:
    layouts = {
        "bf16": CompressedLayout(model=model, block_size=block_size, kv_dtype="bf16"),
        INT8_INDEX: CompressedLayout(model=model, block_size=block_size, kv_dtype="bf16", index_dtype="int8"),
        "int8": CompressedLayout(model=model, block_size=block_size, kv_dtype="int8"),
    }
    return [
        LayerCache(
            kind=kind.replace("compressed", f"compressed {model.rate(kind)}"),
            layers=model.kinds.count(kind),
            token_bytes={
                name: 0.0 if kind == WINDOW else layout.block_row_bytes(kind) / block_size
                for name, layout in layouts.items()
            },
            window_bytes={name: layout.window_bytes for name, layout in layouts.items()},
            state_bytes=layouts["bf16"].sum_bytes(kind),
        )
        for kind in sorted(set(model.kinds), key=model.rate)
    ]


def table(found: Description, context: int, memory_gib: float) -> list[str]:
    """The lines that are printed."""
    lines = [
        f"{found.model_type}: {found.num_layers} layers, {found.parameters / 1e9:.1f} billion parameters, "
        f"{found.active_parameters / 1e9:.1f} billion a token",
        f"{'cache':34}" + "".join(f"{kind:>16}" for kind in found.formats),
    ]

    def line(title: str, values: Sequence[str]) -> None:
        lines.append(f"{title:34}" + "".join(f"{value:>16}" for value in values))

    for each in found.caches:
        line(
            f"{each.layers} x {each.kind}, bytes a token", [f"{each.token_bytes[kind]:,.6g}" for kind in found.formats]
        )
        if any(each.window_bytes.values()):
            line("   window, bytes", [f"{size:,}" for size in each.window_bytes.values()])
        if each.state_bytes:
            line("   unfinished entries, at most", [f"{each.state_bytes:,}"] * len(found.formats))
    line("all layers, bytes a token", [f"{found.token_bytes(kind):,.9g}" for kind in found.formats])
    line(
        f"a sequence of {context:,} tokens",
        [f"{found.sequence_bytes(kind, context) / (1 << 20):,.1f} MiB" for kind in found.formats],
    )
    fitting = [f"{found.sequences_in(memory_gib * GIB, kind, context):,}" for kind in found.formats]
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
