"""What each step from plain torch to this engine is worth: one ratio a step, all of them in one run.

    python -m bench.ablation [--model M] [--quick]

    naive -> flash          attention of a prompt: softmax(Q K^T) V over dense tensors, against the native kernel
    growing -> paged        one token more for each sequence: torch.cat of K and V, against a write into blocks that
                            were allocated at the start; the same attention after either
    bf16 KV -> INT8 KV      that attention alone, and the whole decode step
    bf16 -> W8A16 -> W8A8   the whole step, decode and prefill
    unfused -> fused        the whole step, operator by operator from Python, against all layers in one native call

Each pair does the same work on the shapes of the model and on one core, in turns, in CPU time; medians. Everything that
a decode step reads is as large as in service (all layers in turn), so that no cache flatters either side. Prints a
table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.kernels import rates
from bench.machine import describe
from bench.offline import Sequences
from engine.batch import Batch, BatchItem
from engine.engine import BLOCK_SIZE, Engine
from engine.kv_cache import KvCache, KvLayout
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.ops import cpu, native
from engine.quantization import AS_LOADED, W8A8, W8A16
from twinpool import model_store

INT8, BF16 = "int8", "bf16"
Work = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """How much work; only tests make it smaller."""

    prompts: tuple[int, ...] = (512, 2048)  # of attention alone
    batch: int = 8  # sequences of the steps that are about KV
    context: int = 1024  # tokens of each
    decodes: tuple[tuple[int, int], ...] = ((1, 256), (8, 256))  # sequences, tokens in the cache of each
    prefill: int = 512
    memory_bytes: int = 512 << 20  # of each engine's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One ratio: how many times as fast `after` is."""

    step: str
    work: str
    before_ms: float
    after_ms: float
    ratio: float


def compared(names: Sequence[str], work: str, repeats: int, *candidates: Work) -> list[Step]:
    """A step for each neighbouring pair of candidates, all of which run in turns."""
    with torch.inference_mode():
        seconds = [1 / rate for rate in rates(1e9, repeats, *candidates)]
    return [
        Step(
            step=f"{names[i]} -> {names[i + 1]}",
            work=work,
            before_ms=round(seconds[i] * 1e3, 3),
            after_ms=round(seconds[i + 1] * 1e3, 3),
            ratio=round(seconds[i] / seconds[i + 1], 2),
        )
        for i in range(len(names) - 1)
    ]


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal softmax(Q K^T) V with all scores in memory. q [N, T, D], k and v [M, T, D] -> [N, T, D].

    Query heads that share a KV head are one product, so nothing is repeated that need not be.
    """
    (num_heads, tokens, head_dim), num_kv_heads = q.shape, k.shape[0]
    grouped = q.view(num_kv_heads, -1, head_dim)
    scores = (grouped @ k.transpose(1, 2)).view(num_heads, tokens, tokens) * head_dim**-0.5
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).float().softmax(-1).to(q.dtype)
    out: torch.Tensor = (weights.view(num_kv_heads, -1, tokens) @ v).view(q.shape)
    return out


def filled(config: ModelConfig, kv_dtype: str, sequences: int, context: int) -> tuple[KvCache, torch.Tensor]:
    """A cache of all layers with `sequences` of `context` random tokens each, and their block tables."""
    layout = KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        kv_dtype=kv_dtype,
    )
    blocks = -(-context // BLOCK_SIZE)
    cache = KvCache(layout, sequences * blocks)
    k, v = torch.randn(2, sequences * blocks * BLOCK_SIZE, config.num_kv_heads, config.head_dim).bfloat16()
    for view in cache.views:
        cpu.store_kv(k, v, view, torch.arange(len(k)))
    return cache, torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)


def flash(config: ModelConfig, tokens: int, repeats: int) -> list[Step]:
    cache, table = filled(config, BF16, 1, tokens)
    view = cache.views[0]
    q = torch.randn(tokens, config.num_heads, config.head_dim).bfloat16()
    heads_first = q.transpose(0, 1).contiguous()
    k, v = (x.transpose(0, 1).flatten(1, 2)[:, :tokens].contiguous() for x in (view.k, view.v))
    return compared(
        ("naive attention", "flash"),
        f"attention of a prompt of {tokens}, one layer",
        repeats,
        lambda: naive_attention(heads_first, k, v),
        lambda: cpu.prefill_attention(q, view, table, [0, tokens], [tokens], config.head_dim**-0.5),
    )


def kv_steps(config: ModelConfig, shapes: Shapes, repeats: int) -> list[Step]:
    """Growing -> paged -> INT8: the KV of one decode step, over all layers, with the attention that reads it."""
    batch, context, scale = shapes.batch, shapes.context, config.head_dim**-0.5
    caches = {kv_dtype: filled(config, kv_dtype, batch, context) for kv_dtype in (BF16, INT8)}
    q = torch.randn(batch, config.num_heads, config.head_dim).bfloat16()
    new_k, new_v = torch.randn(2, batch, config.num_kv_heads, config.head_dim).bfloat16()
    slots = torch.arange(batch) * (context + -context % BLOCK_SIZE) + context - 1
    grown = torch.randn(config.num_layers, 2, batch, config.num_kv_heads, context - 1, config.head_dim).bfloat16()
    lengths = [context] * batch

    def growing() -> None:
        cache, table = caches[BF16]
        for view, (k, v) in zip(cache.views, grown, strict=True):
            torch.cat((k, new_k.unsqueeze(2)), dim=2)
            torch.cat((v, new_v.unsqueeze(2)), dim=2)
            cpu.decode_attention(q, view, table, lengths, scale)

    def paged(kv_dtype: str) -> None:
        cache, table = caches[kv_dtype]
        for view in cache.views:
            cpu.store_kv(new_k, new_v, view, slots)
            cpu.decode_attention(q, view, table, lengths, scale)

    return compared(
        ("growing tensors", "paged, preallocated", "INT8 KV"),
        f"KV and attention of a decode step, {batch} x {context}",
        repeats,
        growing,
        partial(paged, BF16),
        partial(paged, INT8),
    )


def decode_work(engine: Engine, sequences: int, context: int) -> Work:
    """One decode step with sampling at this context, as bench.offline does it; its cache content does not matter."""
    rows = Sequences(engine, sequences, context + 1)

    def step() -> None:
        rows.length = context
        rows.step()

    return step


def prefill_work(engine: Engine, tokens: int) -> Work:
    return partial(Sequences(engine, 1, tokens).prefill, tokens)


def unfused(engine: Engine, items: list[BatchItem]) -> Work:
    """The model operator by operator, with the same native operators."""
    model, views = engine._model, engine.cache.views
    assert isinstance(model, Decoder), "only models with one stream have all layers as one call"
    batch = Batch.build(items, BLOCK_SIZE)

    def step() -> None:
        cos, sin = model.rotary.cos_sin(batch.positions)
        residual = F.embedding(batch.token_ids, model.embedding)
        model.forward_by_operator(residual, cos, sin, batch, views, None)

    return step


def engine_steps(model_dir: Path, shapes: Shapes, repeats: int) -> Iterator[Step]:
    """The steps that are measured on the whole model."""

    def load(weights: str, kv_dtype: str = INT8) -> Engine:
        return Engine.load(
            model_dir,
            weights=weights,
            kv_dtype=kv_dtype,
            block_size=BLOCK_SIZE,
            memory_bytes=shapes.memory_bytes,
            threads=1,
        )

    plain, batch, context = load(AS_LOADED), shapes.batch, shapes.context
    yield from compared(
        ("bf16 KV", "INT8 KV"),
        f"decode step, {batch} x {context}",
        repeats,
        *(decode_work(engine, batch, context) for engine in (load(AS_LOADED, BF16), plain)),
    )
    engines = (plain, load(W8A16), load(W8A8))
    names = ("bf16 weights", "W8A16", "W8A8")
    for sequences, length in shapes.decodes:
        work = [decode_work(engine, sequences, length) for engine in engines]
        yield from compared(names, f"decode step, {sequences} x {length}", repeats, *work)
    work = [prefill_work(engine, shapes.prefill) for engine in engines]
    yield from compared(names, f"prefill of {shapes.prefill}", repeats, *work)
    for sequences, length in shapes.decodes:
        items = Sequences(plain, sequences, length + 1).items([11], length)
        yield from fused(plain, items, f"{sequences} x {length}", repeats)
    prompt = Sequences(plain, 1, shapes.prefill).items([11] * shapes.prefill, 0)
    yield from fused(plain, prompt, f"a prompt of {shapes.prefill}", repeats)


def fused(engine: Engine, items: list[BatchItem], work: str, repeats: int) -> list[Step]:
    """All layers of a step, without logits."""
    batch = Batch.build(items, BLOCK_SIZE)
    return compared(
        ("unfused", "fused"), f"layers, {work}", repeats, unfused(engine, items), lambda: engine.forward(batch)
    )


def measure(model_dir: Path, shapes: Shapes, repeats: int) -> list[Step]:
    config = ModelConfig.read(model_dir)
    cpu.set_num_threads(1)
    steps = [step for tokens in shapes.prompts for step in flash(config, tokens, repeats)]
    return [*steps, *kv_steps(config, shapes, repeats), *engine_steps(model_dir, shapes, repeats)]


def table(steps: Sequence[Step]) -> str:
    widths = [max(len(getattr(step, name)) for step in steps) for name in ("step", "work")]
    return "\n".join(
        f"{step.step:{widths[0]}}  {step.work:{widths[1]}}  {step.before_ms:9.2f} ms  {step.after_ms:9.2f} ms"
        f"  {step.ratio:6.2f} x"
        for step in steps
    )


def main(argv: Sequence[str] | None = None, shapes: Shapes | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=model_store.DEFAULT_MODEL, help="model name or Hugging Face directory")
    parser.add_argument("--quick", action="store_true", help="three timings a figure instead of nine")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model_dir = model_store.ensure(args.model)
    steps = measure(model_dir, shapes or Shapes(), 3 if args.quick else 9)
    print(table(steps))
    described = {**describe(), "isa": native.isa(), "model": model_dir.name}
    print(json.dumps({"bench": "ablation", **described, "steps": [asdict(step) for step in steps]}))


if __name__ == "__main__":
    main()
