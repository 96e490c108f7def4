"""Choosing experts in one operator against the same in single torch operators, on one core.

    python -m bench.moe [--repeats 200]

Times `moe_gating_top_k` and the sequence of torch operators that model code writes, in turns (medians), for the gatings
of DeepSeek-V3 (256 experts in 8 groups; this is `gating_speedup`), DeepSeek-V4 and Qwen3-MoE; and a whole layer of
experts at small batches against reading the chosen experts' weights once. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.machine import describe, memory_to_read
from engine.ops import cpu, native

ROWS = (1, 8, 32, 128)
HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 768, 64, 8  # a layer of Qwen3-30B-A3B with half of its experts


def deepseek_v3(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.sigmoid()
    choice = scores + bias
    group_scores = choice.view(-1, 8, 32).topk(2, dim=-1)[0].sum(dim=-1)
    groups = torch.topk(group_scores, k=4, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(group_scores).scatter_(1, groups, 1)
    mask = mask.unsqueeze(-1).expand(-1, 8, 32).reshape(-1, 256)
    experts = torch.topk(choice.masked_fill(~mask.bool(), float("-inf")), k=8, dim=-1, sorted=False)[1]
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * 2.5, experts


def deepseek_v4(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = F.softplus(logits).sqrt()
    experts = torch.topk(scores + bias, 6, dim=-1, sorted=False)[1]
    weights = scores.gather(1, experts)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 1.5, experts


def qwen3_moe(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, experts = torch.topk(torch.softmax(logits, dim=-1), 8, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), experts


def medians(repeats: int, *candidates: Callable[[], object]) -> list[float]:
    """Seconds of each candidate, run in turns."""
    taken: list[list[float]] = [[] for _ in candidates]
    for _ in range(repeats):
        for candidate, seconds in zip(candidates, taken, strict=True):
            begin = time.perf_counter()
            candidate()
            seconds.append(time.perf_counter() - begin)
    return [statistics.median(seconds) for seconds in taken]


def gatings(repeats: int) -> dict[str, dict[str, float]]:
    """For each model and number of rows, how many times as fast as torch."""
    speedups: dict[str, dict[str, float]] = {}
    print(f"{'gating':12} {'rows':>5} {'ours us':>9} {'torch us':>9} {'x torch':>8}")
    cases: list[tuple[str, Callable[..., object], int, dict[str, Any]]] = [
        ("deepseek-v3", deepseek_v3, 256, {"k": 8, "k_group": 4, "group_count": 8, "norm_type": "sigmoid"}),
        ("deepseek-v4", deepseek_v4, 256, {"k": 6, "norm_type": "sqrtsoftplus"}),
        ("qwen3-moe", qwen3_moe, 128, {"k": 8}),
    ]
    for name, unfused, num_experts, arguments in cases:
        speedups[name] = {}
        for rows in ROWS:
            logits, bias = torch.randn(rows, num_experts), torch.randn(num_experts) * 0.05
            given = None if name == "qwen3-moe" else bias

            ours = partial(cpu.moe_gating_top_k, logits, bias=given, **arguments)
            torchs = partial(unfused, logits, bias)
            medians(5, ours, torchs)
            got, peer = medians(repeats, ours, torchs)
            speedups[name][str(rows)] = round(peer / got, 2)
            print(f"{name:12} {rows:5} {got * 1e6:9.1f} {peer * 1e6:9.1f} {peer / got:8.1f}")
    return speedups


def experts_layer(repeats: int) -> dict[str, float]:
    """At 1 and 4 rows: the share of the read bandwidth at which the chosen experts' weights are read."""
    matrices = [
        (torch.randn(2 * INNER, HIDDEN).bfloat16(), torch.randn(HIDDEN, INNER).bfloat16()) for _ in range(EXPERTS)
    ]
    gate_up, down = ([cpu.pack_linear(each, None) for each in kind] for kind in zip(*matrices, strict=True))
    experts = cpu.pack_experts(gate_up, down)
    memory = memory_to_read(256 << 20)
    shares = {}
    for rows in (1, 4):
        x = torch.randn(rows, HIDDEN).bfloat16()
        seconds, read = [], 0
        for _ in range(repeats):
            weights, chosen = cpu.moe_gating_top_k(torch.randn(rows, EXPERTS), CHOSEN)
            memory.sum()  # nothing of the last turn is left in a cache
            begin = time.perf_counter()
            cpu.moe_experts(x, experts, weights, chosen)
            seconds.append((time.perf_counter() - begin) / experts.nbytes(chosen.flatten().tolist()))
            read = experts.nbytes(chosen.flatten().tolist())
        (limit,) = medians(9, lambda: memory.sum())
        shares[str(rows)] = round(limit / memory.nbytes / statistics.median(seconds), 2)
        print(f"experts, {rows} rows: {read / 1e6:.1f} MB of weights, {shares[str(rows)]:.0%} of the read bandwidth")
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200, help="timings per figure; the median counts (default 200)")
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cpu.set_num_threads(1)
    with torch.inference_mode():
        speedups = gatings(repeats)
        shares = experts_layer(max(5, repeats // 10))
    result = {"bench": "moe", **describe(), "isa": native.isa()}
    result |= {"gating_speedup": speedups.pop("deepseek-v3"), "other_gatings": speedups, "experts_read_share": shares}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
