"""Where the time of a step goes: share per kind of operator, work against the limits of the machine, a trace.

    python -m bench.profile --model M --phase prefill|decode [--batch B] [--length L] [--weights W] [--trace FILE]

The same as `twinpool profile`. Decode: steps of B sequences of L tokens each. Prefill: B prompts of L tokens in one
step. Each kind is held against what this machine reads a second (a large array) and multiplies a second (bf16 rows by a
packed matrix that stays in the cache), measured in the same run; experts, and attention over anything but keys and
values of all tokens, are timed without it. The trace opens in chrome://tracing or Perfetto. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.machine import describe, memory_to_read
from bench.offline import GREEDY, Limit
from bench.operators import Operators
from bench.sequences import CachedSequences
from engine.batch import BatchItem
from engine.engine import Engine
from engine.ops import cpu, native
from engine.quantization import WEIGHT_FORMATS
from engine.sampling import SampleRow, complete, plain_draw
from twinpool import model_store
from twinpool.errors import ConfigError

KINDS = ("attention", "kv_access", "linear", "moe", "sampling", "other")


@dataclass(slots=True)
class Step:
    """Events of one step: (kind, name, begin, end) in ns of the monotonic clock, and its whole time."""

    events: list[tuple[str, str, int, int]] = field(default_factory=list)
    seconds: float = 0.0

    @contextmanager
    def event(self, kind: str, name: str) -> Iterator[None]:
        begin = time.monotonic_ns()
        yield
        self.events.append((kind, name, begin, time.monotonic_ns()))

    def share(self, kind: str) -> float:
        """Of the step's time; "other" is also what no event covers."""
        seconds = dict.fromkeys(KINDS, 0.0)
        for name, _, begin, end in self.events:
            seconds[name] += (end - begin) / 1e9
        seconds["other"] += max(0.0, self.seconds - sum(seconds.values()))
        return seconds[kind] / self.seconds


def run_step(sequences: CachedSequences, items: list[BatchItem], recorder: Any) -> Step:
    """One step as a worker runs it, recorded, but for the choice of the tokens, which is a call of its own here."""
    engine, step, rows = sequences.engine, Step(), [SampleRow(GREEDY, [0], [])] * len(items)
    model: Any = engine._model
    places, begin = range(len(items)), time.monotonic()
    with torch.inference_mode():
        if engine.decoder is not None and all(len(item.token_ids) == 1 for item in items):
            hidden = engine.decoder.decode(engine._batches.build(items))
        else:
            hidden = engine.forward(batch := sequences.batch(items))[batch.last_token_rows]
        for kind, place, started, ended in recorder.events:
            step.events.append((kind, place if isinstance(place, str) else f"layer {place}", started, ended))
        with step.event("linear", "output layer"):
            _, logits = model.tokens(hidden, [None] * len(items), places)
        with step.event("sampling", "sample"):
            tokens = model._output.from_last_logits([plain_draw(row) for row in rows], places)
            complete(logits, tokens, rows, places, eos_token_ids=(), max_context=engine.config.max_context)
    step.seconds = time.monotonic() - begin
    return step


def work(engine: Engine, items: list[BatchItem]) -> dict[str, tuple[float, float]]:
    """(bytes, operations) of a step by kind, as the algorithm needs them: each weight and cached token once."""
    config, layout = engine.config, engine.cache.layout
    tokens = sum(len(item.token_ids) for item in items)
    token_bytes = layout.block_bytes / layout.block_size
    contexts = sum(item.start + len(item.token_ids) for item in items)
    seen = sum(item.start + i + 1 for item in items for i in range(len(item.token_ids)))
    head = config.vocab_size * config.hidden_size
    layers = config.num_parameters - (head if config.tie_word_embeddings else 2 * head)
    known = {"kv_access": (tokens * token_bytes, 0.0)}
    if config.moe is None and config.latent is None:
        known["linear"] = (engine.weight_bytes, 2.0 * (tokens * layers + len(items) * head))
    if config.latent is None and config.compressed is None:
        known["attention"] = (
            contexts * token_bytes,
            4.0 * config.num_layers * config.num_heads * config.head_dim * seen,
        )
    return known


def multiply_limit() -> float:
    """Operations a second of 240 bf16 rows by a packed bf16 matrix of 0.6 MB."""
    x, weight = torch.randn(240, 576).bfloat16(), cpu.pack_linear(torch.randn(512, 576).bfloat16(), None)
    cpu.linear(x, weight)
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        cpu.linear(x, weight)
        times.append(time.perf_counter() - begin)
    return 2 * 240 * 576 * 512 / statistics.median(times)


def write_trace(path: Path, step: Step) -> None:
    """The Chrome trace event format: complete events, in microseconds."""
    first = min(begin for _, _, begin, _ in step.events)
    events = [
        {"ph": "X", "pid": 0, "tid": 0, "cat": kind, "name": f"{kind}: {name}"}
        | {"ts": (begin - first) / 1e3, "dur": (end - begin) / 1e3}
        for kind, name, begin, end in sorted(step.events, key=lambda event: event[2])
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def profile(engine: Engine, phase: str, batch: int, length: int, repeats: int) -> tuple[list[BatchItem], list[Step]]:
    """The items of the step, and the step as often as asked for."""
    if native.library() is None:
        raise ConfigError("only the native CPU backend can be profiled: install a C++ compiler, reinstall twinpool")
    recorder = engine.decoder or Operators()
    sequences = CachedSequences(engine, batch, length + (repeats if phase == "decode" else 0))
    vocab_size = engine.config.vocab_size
    prompt = [7 * i % vocab_size for i in range(length)]
    steps, items = [], []
    recorder.record(True)
    try:
        for repeat in range(repeats + 1):
            token_ids, start = (prompt, 0) if phase == "prefill" else ([11], length - 1 + max(0, repeat - 1))
            items = sequences.items(token_ids, start)
            if isinstance(recorder, Operators):
                recorder.events = []
            steps.append(run_step(sequences, items, recorder))
    finally:
        recorder.record(False)
    sequences.release()
    return items, steps[1:]  # the first is for warming up


def median_step(steps: list[Step]) -> Step:
    """The one of median time, whose shares add up."""
    return sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]


def report(
    engine: Engine, items: list[BatchItem], steps: list[Step], limits: tuple[float, float]
) -> dict[str, dict[str, float]]:
    """Prints the table; per kind: share of time, GB and Gop, and rates as shares of the limits (bytes/s, ops/s)."""
    typical = median_step(steps)
    seconds, needed = typical.seconds, work(engine, items)
    table = Table(
        title=f"step of {seconds * 1e3:.2f} ms; limits {limits[0] / 1e9:.1f} GB/s, {limits[1] / 1e9:.0f} Gop/s"
    )
    for column in ("kind", "share", "ms", "MB", "of read limit", "Gop", "of multiply limit"):
        table.add_column(column, justify="right")
    kinds = {}
    for kind in KINDS:
        share = typical.share(kind)
        num_bytes, operations = needed.get(kind, (0.0, 0.0))
        spent = share * seconds
        of_read = num_bytes / spent / limits[0] if spent and num_bytes else 0.0
        of_multiply = operations / spent / limits[1] if spent and operations else 0.0
        kinds[kind] = {
            "share": round(share, 4),
            "bytes": num_bytes,
            "operations": operations,
            "of_read_limit": round(of_read, 3),
            "of_multiply_limit": round(of_multiply, 3),
        }
        shown = (f"{share:.1%}", f"{spent * 1e3:.3f}", f"{num_bytes / 1e6:.1f}", f"{of_read:.2f}")
        table.add_row(kind, *shown, f"{operations / 1e9:.3f}", f"{of_multiply:.2f}")
    Console().print(table)
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(prog="twinpool profile", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=model_store.DEFAULT_MODEL, help="model name or Hugging Face directory")
    parser.add_argument("--phase", choices=("prefill", "decode"), default="decode")
    parser.add_argument("--batch", type=int, default=1, help="sequences in the step (default 1)")
    parser.add_argument("--length", type=int, default=256, help="tokens of each (default 256)")
    parser.add_argument("--weights", choices=WEIGHT_FORMATS, default="bf16", help="how matrices are held")
    parser.add_argument("--memory", type=int, default=1 << 30, help="bytes of KV cache (default 1 GiB)")
    parser.add_argument("--cores", type=int, default=1, help="cores to use (default 1)")
    parser.add_argument("--repeats", type=int, default=10, help="steps; the one of median time counts (default 10)")
    parser.add_argument("--trace", type=Path, default=Path("twinpool-trace.json"), help="where the trace goes")
    args = parser.parse_args()
    if min(args.batch, args.length, args.cores, args.repeats) < 1:
        parser.error("--batch, --length, --cores and --repeats are at least 1")
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)
    try:
        model_dir = model_store.ensure(args.model)
        engine = Engine.load(
            model_dir,
            weights=args.weights,
            memory_bytes=args.memory,
            max_sequences=args.batch,
            threads=len(cores),
        )
        limit = Limit(memory_to_read(256 << 20), len(cores))
        limits = (limit.bytes_per_s(), multiply_limit())
        items, steps = profile(engine, args.phase, args.batch, args.length, args.repeats)
    except ConfigError as error:
        parser.error(error.message)
    kinds = report(engine, items, steps, limits)
    write_trace(args.trace, steps[-1])
    print(f"trace: {args.trace}")
    seconds = median_step(steps).seconds
    settings = {"phase": args.phase, "batch": args.batch, "length": args.length, "weights": args.weights}
    figures = {"isa": native.isa(), "step_ms": round(seconds * 1e3, 3), "read_gb_s": round(limits[0] / 1e9, 2)}
    print(
        json.dumps({"bench": "profile", **describe(), "model": model_dir.name, **settings, **figures, "kinds": kinds})
    )


if __name__ == "__main__":
    main()
