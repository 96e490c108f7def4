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
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench import random_model
from bench.machine import describe
from bench.offline import GREEDY
from bench.sequences import CachedSequences
from engine import ops
from engine.batch import BatchItem
from engine.engine import Engine
from engine.ops import native
from engine.quantization import WEIGHT_FORMATS
from engine.sampling import Sampled, SampleRow

LENGTH = 128
KINDS = ("qwen3-moe", "deepseek-v3")  # of random_model.CONFIGS, those that the CPU backend has as one call


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
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32], help="sequences in a step (1 8 32)")
    parser.add_argument("--weights", choices=WEIGHT_FORMATS, default="bf16", help="how matrices are held")
    parser.add_argument("--cores", type=int, default=1, help="cores to use (default 1)")
    parser.add_argument("--repeats", type=int, default=20, help="steps of each (default 20)")
    args = parser.parse_args()
    if min(*args.batch, args.cores, args.repeats) < 1:
        parser.error("--batch, --cores and --repeats are at least 1")
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)
    backend = ops.load("cpu")
    backend.set_num_threads(len(cores))
    steps: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'model':12} {'batch':>5} {'one call ms':>12} {'operators ms':>13} {'ratio':>6}")
    for kind in args.kinds:
        engine = random_model.load(kind, backend, weights=args.weights, memory_bytes=512 << 20)
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
