"""A decode step of models with experts: all layers as one native call, against the same operator by operator.

    python -m bench.moe_step [--kinds qwen3-moe deepseek-v3] [--batch 1 8 32] [--weights W] [--cores N] [--repeats R]

The models have eight layers of random weights, which take some seconds to make and up to 3 GB; int8 cache, sequences of
128 tokens, greedy choice. Both ways run in turns, step by step, on the same tokens. Operator by operator is what such
models were before: a batch of new tensors, then each operator a call from Python. Ratios are medians over pairs of
steps. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.machine import describe
from bench.offline import GREEDY
from bench.sequences import CachedSequences
from engine import models, ops
from engine.batch import BatchItem
from engine.engine import Engine
from engine.kv_cache import KvCache
from engine.model_config import ModelConfig
from engine.ops import native
from engine.quantization import WEIGHT_FORMATS
from engine.sampling import Sampled, SampleRow

LENGTH, BLOCK_SIZE = 128, 64
_COMMON = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "num_experts_per_tok": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 384,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
    },
}


class RandomWeights:
    """In the place of a checkpoint: every tensor it is asked for, scaled by the number of inputs."""

    names: Sequence[str] = ()

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype) if name.endswith("weight") else torch.zeros(shape, dtype=dtype)
        scaled: torch.Tensor = torch.randn(shape, generator=self._generator) * shape[-1] ** -0.5
        return scaled.to(dtype)

    def untaken(self, layer: int) -> list[str]:
        return []


def load(kind: str, weights: str, memory_bytes: int, **sizes: Any) -> Engine:
    """sizes: that differ from KINDS."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_COMMON | KINDS[kind] | sizes))
        config = ModelConfig.read(Path(folder))
    checkpoint: Any = RandomWeights()
    backend = ops.load("cpu")
    layout = models.cache_layout(config, BLOCK_SIZE, "int8")
    with torch.inference_mode():
        model = models.read(
            *(config, checkpoint, backend, torch.bfloat16), int8_cache=True, weights=weights, latent_form="absorbed"
        )
        cache = KvCache(layout, memory_bytes // layout.block_bytes)
    return Engine(config, model, cache, model_name=kind, fingerprint="")


@torch.inference_mode()
def by_operator(engine: Engine, sequences: CachedSequences, items: list[BatchItem]) -> list[Sampled]:
    """Engine.decode for a backend that has no such call."""
    model: Any = engine._model
    batch = sequences.batch(items)
    cos, sin = model.rotary.cos_sin(batch.positions)
    residual = F.embedding(batch.token_ids, model.embedding)
    hidden = model.forward_by_operator(residual, cos, sin, batch, engine.cache.views, None)
    return engine.next_tokens(hidden, rows(len(items)))


def rows(count: int) -> list[SampleRow]:
    return [SampleRow(GREEDY, [0], [])] * count


def measure(engine: Engine, count: int, repeats: int) -> tuple[float, float, float]:
    """Seconds of a step of `count` sequences in one call and by operator, and the second over the first."""
    sequences = CachedSequences(engine, count, LENGTH + repeats + 1)
    generator = torch.Generator().manual_seed(count)

    def token_ids(number: int) -> list[int]:
        return torch.randint(engine.config.vocab_size, (number,), generator=generator).tolist()

    for index in range(count):
        engine.forward(sequences.batch([sequences.item(index, token_ids(LENGTH), 0)]))
    pairs: list[tuple[float, float]] = []
    for repeat in range(repeats + 1):
        items = [sequences.item(index, token_ids(1), LENGTH + repeat) for index in range(count)]
        ways: list[Callable[[], list[Sampled]]] = [
            lambda items=items: engine.decode(items, rows(count)),  # type: ignore[misc]
            lambda items=items: by_operator(engine, sequences, items),  # type: ignore[misc]
        ]
        taken, answers = [0.0, 0.0], [[], []]  # type: ignore[var-annotated]
        for way in (0, 1) if repeat % 2 else (1, 0):
            begin = time.perf_counter()
            answers[way] = ways[way]()
            taken[way] = time.perf_counter() - begin
        if answers[0] != answers[1]:
            raise AssertionError(f"{answers[0]} in one call, {answers[1]} by operator")
        pairs.append((taken[0], taken[1]))
    sequences.release()
    whole, single = (statistics.median(each) for each in zip(*pairs[1:], strict=True))  # the first is for warming up
    return whole, single, statistics.median(b / a for a, b in pairs[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32], help="sequences in a step (1 8 32)")
    parser.add_argument("--weights", choices=WEIGHT_FORMATS, default="bf16", help="how matrices are held")
    parser.add_argument("--cores", type=int, default=1, help="cores to use (default 1)")
    parser.add_argument("--repeats", type=int, default=20, help="steps of each (default 20)")
    args = parser.parse_args()
    if min(*args.batch, args.cores, args.repeats) < 1:
        parser.error("--batch, --cores and --repeats are at least 1")
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)
    ops.load("cpu").set_num_threads(len(cores))
    steps: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'model':12} {'batch':>5} {'one call ms':>12} {'operators ms':>13} {'ratio':>6}")
    for kind in args.kinds:
        engine = load(kind, args.weights, 512 << 20)
        steps[kind] = {}
        for count in args.batch:
            whole, single, ratio = measure(engine, count, args.repeats)
            steps[kind][str(count)] = {"ms": round(whole * 1e3, 2), "by_operator_ms": round(single * 1e3, 2)}
            steps[kind][str(count)]["ratio"] = round(ratio, 3)
            print(f"{kind:12} {count:5} {whole * 1e3:12.2f} {single * 1e3:13.2f} {ratio:6.2f}", flush=True)
        del engine
    result = {"bench": "moe_step", **describe(), "isa": native.isa(), "weights": args.weights, "steps": steps}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
