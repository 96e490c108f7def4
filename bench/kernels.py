"""The native CPU kernels against the machine's limits and against torch, one core, on SmolLM2-135M's shapes.

    python -m bench.kernels [--repeats 5]

Each line times one kernel and torch's way in turns (CPU time, medians). `linear` at few rows is held against
the read bandwidth of the machine (its weights are read once: all layers in turn, far more than a cache holds), at many
rows against torch's own F.linear. Prints a table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F

from bench.machine import describe, memory_to_read
from engine.kv_cache import KvCache, KvLayout, KvView
from engine.latent_cache import LatentLayout
from engine.ops import cpu, native, reference

HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 576, 1536, 49152, 30
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 64
SHAPES = [  # (out, in) of one layer
    ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One measurement. ours, torch and limit are rates in `unit`; limit is what the machine could do, where known."""

    kernel: str
    unit: str
    ours: float
    torch: float
    limit: float | None = None


def rates(
    work: float, repeats: int, *candidates: Callable[[], object], clock: Callable[[], float] = time.thread_time
) -> list[float]:
    """Median work per second of each candidate, run in turns; work in units of 1e9."""
    seconds: list[list[float]] = [[] for _ in candidates]
    for repeat in range(repeats + 1):
        for candidate, taken in zip(candidates, seconds, strict=True):
            begin = clock()
            candidate()
            if repeat:  # the first is for warming up
                taken.append(clock() - begin)
    return [work / 1e9 / statistics.median(taken) for taken in seconds]


def decode_linears(repeats: int) -> list[Line]:
    """All matrices of the model, once each, at the batch sizes of decode."""
    weights = [torch.randn(shape).bfloat16() for shape in SHAPES * LAYERS + [(VOCAB, HIDDEN)]]
    packed = [cpu.pack_linear(weight, None) for weight in weights]
    size = sum(weight.nbytes for weight in weights)
    memory = memory_to_read(512 << 20)
    lines = []
    for rows in (1, 4, 8, 16, 32):
        inputs = {width: torch.randn(rows, width).bfloat16() for width in (HIDDEN, INTERMEDIATE)}

        def ours(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in packed:
                cpu.linear(inputs[weight.in_features], weight)

        def torchs(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

        got, peer = rates(size, repeats, ours, torchs)
        (limit,) = rates(memory.nbytes, repeats, lambda: memory.sum())
        lines.append(Line(kernel=f"linear, {rows} rows", unit="GB/s of weights", ours=got, torch=peer, limit=limit))
    return lines


def prefill_linears(repeats: int) -> list[Line]:
    return [
        prefill_linear(out_features, in_features, dtype, repeats)
        for out_features, in_features in SHAPES
        for dtype in (torch.bfloat16, torch.float32)
    ]


def prefill_linear(out_features: int, in_features: int, dtype: torch.dtype, repeats: int) -> Line:
    x, weight = torch.randn(512, in_features).to(dtype), torch.randn(out_features, in_features).to(dtype)
    packed = cpu.pack_linear(weight, None)
    got, peer = rates(2 * 512 * weight.numel(), 4 * repeats, lambda: cpu.linear(x, packed), lambda: F.linear(x, weight))
    name = str(dtype).removeprefix("torch.")
    return Line(
        kernel=f"linear {name}, 512 rows, {in_features} -> {out_features}", unit="GFLOP/s", ours=got, torch=peer
    )


def caches(tokens: int) -> tuple[KvView, torch.Tensor]:
    """An int8 cache filled with one sequence, and its block table [1, blocks]."""
    layout = KvLayout(num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK, kv_dtype="int8")
    view = KvCache(layout, tokens // BLOCK).views[0]
    k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM).bfloat16()
    cpu.store_kv(k, v, view, torch.arange(tokens))
    return view, torch.arange(tokens // BLOCK, dtype=torch.int32)[None]


def attention(repeats: int, context: int) -> list[Line]:
    scale = HEAD_DIM**-0.5
    view, table = caches(context)
    k, v = (x.unsqueeze(0) for x in reference.gather_kv(view, table[0].long(), context, torch.bfloat16))
    q = torch.randn(context, HEADS, HEAD_DIM).bfloat16()
    heads_first = q.transpose(0, 1).unsqueeze(0)
    prefill = rates(
        4 * HEADS * HEAD_DIM * context * (context + 1) / 2,
        repeats,
        lambda: cpu.prefill_attention(q, view, table, [0, context], [context], scale),
        lambda: F.scaled_dot_product_attention(heads_first, k, v, is_causal=True, enable_gqa=True),
    )
    last, tables, lengths = q[:1].expand(32, -1, -1), table.expand(32, -1), [context] * 32
    decode = rates(
        32 * (view.k.nbytes + view.v.nbytes),
        repeats,
        lambda: cpu.decode_attention(last, view, tables, lengths, scale),
        lambda: reference.decode_attention(last, view, tables, lengths, scale),
    )
    return [
        Line(
            kernel=f"prefill attention, {context} tokens (torch: from dense bf16)",
            unit="GFLOP/s",
            ours=prefill[0],
            torch=prefill[1],
        ),
        Line(
            kernel=f"decode attention, 32 sequences of {context} (torch: gather, then fused)",
            unit="GB/s of int8 cache",
            ours=decode[0],
            torch=decode[1],
        ),
    ]


def shared_context(repeats: int, context: int, num_heads: int, num_kv_heads: int) -> Line:
    """A step of one sequence, whose context two threads share, against one thread; time that passes, not CPU time."""
    layout = KvLayout(num_layers=1, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, block_size=BLOCK, kv_dtype="int8")
    view = KvCache(layout, context // BLOCK).views[0]
    k, v = torch.randn(2, context, num_kv_heads, HEAD_DIM).bfloat16()
    cpu.store_kv(k, v, view, torch.arange(context))
    q, table = torch.randn(1, num_heads, HEAD_DIM).bfloat16(), torch.arange(context // BLOCK, dtype=torch.int32)[None]

    def step() -> None:
        for _ in range(8):  # layers of a step follow each other closely: threads wait awake for the next
            cpu.decode_attention(q, view, table, [context], HEAD_DIM**-0.5)

    def on(threads: int) -> float:
        cpu.set_num_threads(threads)
        (rate,) = rates(8 * (view.k.nbytes + view.v.nbytes), 4, step, clock=time.perf_counter)
        return rate

    turns = [(on(2), on(1)) for _ in range(repeats)]
    ours, alone = (statistics.median(turn[i] for turn in turns) for i in range(2))
    cpu.set_num_threads(1)
    return Line(
        kernel=f"decode attention, 1 sequence of {context}, {num_kv_heads} KV heads, 2 threads (torch: ours on 1)",
        unit="GB/s of int8 cache",
        ours=ours,
        torch=alone,
    )


def latents(repeats: int, context: int) -> list[Line]:
    """Decode attention of 16 heads over latents of DeepSeek-V3's size, 8 sequences."""
    lines = []
    for kv_dtype in ("int8", "bf16"):
        layout = LatentLayout(num_layers=1, rank=512, rope_dim=64, block_size=BLOCK, kv_dtype=kv_dtype)
        view = layout.view(0, [torch.zeros(8 * context // BLOCK, layout.row_bytes, dtype=torch.uint8)])
        cached = torch.randn(8 * context, 576).bfloat16()
        cpu.store_latents(cached[:, :512], cached[:, 512:], view, torch.arange(8 * context))
        table = torch.arange(8 * context // BLOCK, dtype=torch.int32).view(8, -1)
        case = (torch.randn(8, 16, 576).bfloat16(), view, table, list(range(9)), [context] * 8, 0.1)
        got, peer = rates(
            8 * context * sum(layout.item_bytes),
            repeats,
            partial(cpu.latent_attention, *case),
            partial(reference.latent_attention, *case),
        )
        name = f"latent decode attention, 8 sequences of {context}, {kv_dtype}"
        lines.append(Line(kernel=name, unit="GB/s of cache", ours=got, torch=peer))
    return lines


def store(repeats: int) -> list[Line]:
    layout = KvLayout(num_layers=1, num_kv_heads=8, head_dim=128, block_size=BLOCK, kv_dtype="int8")
    view, slots = KvCache(layout, 32).views[0], torch.arange(2048)
    k, v = torch.randn(2, 2048, 8, 128).bfloat16()
    copy = torch.empty_like(k)
    got, peer, limit = rates(
        k.nbytes + v.nbytes,
        4 * repeats,
        lambda: cpu.store_kv(k, v, view, slots),
        lambda: reference.store_kv(k, v, view, slots),
        lambda: (copy.copy_(k), copy.copy_(v)),
    )
    return [Line(kernel="store_kv, 2048 tokens (limit: copy)", unit="GB/s of bf16", ours=got, torch=peer, limit=limit)]


def elementwise(repeats: int, rows: int) -> list[Line]:
    x, weight = torch.randn(rows, HIDDEN).bfloat16(), torch.randn(HIDDEN).bfloat16()
    gate_up = torch.randn(rows, 2 * INTERMEDIATE).bfloat16()
    norms = rates(1e6, 20 * repeats, lambda: cpu.rms_norm(x, weight, 1e-5), lambda: reference.rms_norm(x, weight, 1e-5))
    activations = rates(1e6, 20 * repeats, lambda: cpu.silu_mul(gate_up), lambda: reference.silu_mul(gate_up))
    return [
        Line(kernel=f"{name}, {rows} rows", unit="calls/ms", ours=ours, torch=torchs)
        for name, (ours, torchs) in (("rms_norm", norms), ("silu_mul", activations))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timings per figure; the median counts (default 5)")
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cpu.set_num_threads(1)

    lines = [
        *decode_linears(repeats),
        *prefill_linears(repeats),
        *attention(repeats, 512),
        *attention(repeats, 2048),
        shared_context(repeats, 8192, HEADS, KV_HEADS),
        shared_context(repeats, 8192, 14, 2),
        shared_context(repeats, 8192, 8, 1),
        *latents(repeats, 1024),
        *store(repeats),
        *elementwise(repeats, 1),
        *elementwise(repeats, 512),
    ]
    width = max(len(line.kernel) for line in lines)
    print(f"{'kernel':{width}}  {'ours':>8}  {'torch':>8}  {'x torch':>7}  {'limit':>8}  of limit  unit")
    for line in lines:
        limit, share = ("", "") if line.limit is None else (f"{line.limit:.1f}", f"{line.ours / line.limit:.0%}")
        print(
            f"{line.kernel:{width}}  {line.ours:8.1f}  {line.torch:8.1f}  {line.ours / line.torch:7.1f}  {limit:>8}"
            f"  {share:>8}  {line.unit}"
        )
    print(json.dumps({"bench": "kernels", **describe(), "isa": native.isa(), "lines": [asdict(x) for x in lines]}))


if __name__ == "__main__":
    main()
