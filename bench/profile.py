"""Where the time of a step goes: share per kind of operator, work against the limits of the machine, a trace.

    python -m bench.profile --model M --phase prefill|decode [--batch B] [--length L] [--weights W] [--trace FILE]

The same as `twinpool profile`. Decode: steps of B sequences of L tokens each. Prefill: B prompts of L tokens in one
step. Tokens are random, so that experts are chosen as different tokens choose them. What each kind needs
(bench/work.py; of experts those that were really chosen) is held against what this machine reads a second (a large
array) and multiplies a second (bf16 rows by a matrix), measured in the same run.

The native CPU backend records its own operators. Every other backend is recorded by torch.profiler, on an Ascend NPU
by torch_npu.profiler (not yet run on silicon). The trace opens in chrome://tracing or Perfetto. Last line: one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from bench import device_profile, random_model
from bench.limits import native_limits, torch_limits
from bench.machine import describe
from bench.offline import GREEDY
from bench.operators import TimedOperators
from bench.profile_table import figures, table
from bench.sequences import CachedSequences
from bench.step import Event, Step, median_step, write_trace
from engine import ops
from engine.batch import BatchItem
from engine.engine import Engine
from engine.ops import native
from engine.quantization import WEIGHT_FORMATS
from engine.sampling import SampleRow, complete, plain_draw
from twinpool import model_store
from twinpool.errors import ConfigError

AUTO, NATIVE = "auto", "native"
PROFILERS = (AUTO, NATIVE, device_profile.TORCH, device_profile.TORCH_NPU)


def choose_profiler(asked: str, backend: ModuleType) -> str:
    """Raises ConfigError for one that does not see what the backend does, and where something that it needs is
    missing."""
    is_native, tool = backend.NAME == "cpu", asked
    if asked == AUTO and is_native:
        tool = NATIVE
    elif asked == AUTO:
        tool = device_profile.TORCH_NPU if backend.DEVICE == "npu" else device_profile.TORCH
    if tool == NATIVE and not is_native:
        raise ConfigError(f"--profiler native records the native CPU backend only, not {backend.NAME}")
    if tool == device_profile.TORCH and is_native:
        raise ConfigError("--profiler torch does not see into the native CPU backend: take --backend reference")
    if tool != NATIVE:
        device_profile.find(tool, backend.DEVICE)
    return tool


def plan(sequences: CachedSequences, phase: str, length: int, repeats: int) -> list[list[BatchItem]]:
    """What each step computes, the one for warming up included."""
    generator, vocab_size = torch.Generator().manual_seed(0), sequences.engine.config.vocab_size

    def token_ids(count: int) -> list[int]:
        return torch.randint(vocab_size, (count,), generator=generator).tolist()

    if phase == "prefill":
        return [[sequences.item(i, token_ids(length), 0) for i in range(sequences.count)] for _ in range(repeats + 1)]
    return [
        [sequences.item(i, token_ids(1), length - 1 + max(0, repeat - 1)) for i in range(sequences.count)]
        for repeat in range(repeats + 1)
    ]


def profile(
    engine: Engine, backend: ModuleType, tool: str, phase: str, batch: int, length: int, repeats: int, trace: Path
) -> list[Step]:
    """The steps as often as asked for, after one for warming up, and a trace file of one of them, or of all."""
    sequences = CachedSequences(engine, batch, length + (repeats if phase == "decode" else 0))
    planned = plan(sequences, phase, length, repeats)
    if tool == NATIVE:
        steps = record_natively(sequences, backend, planned)
        write_trace(trace, median_step(steps))
    else:

        def take_step(items: Sequence[BatchItem], span: Any) -> None:
            with torch.inference_mode():
                batch = sequences.batch(items)
                logits = engine.logits(engine.forward(batch)[batch.last_token_rows])
                with span("sampling", "sample"):
                    engine.sample(logits, _rows(len(items)))

        steps = device_profile.record_steps(tool, backend.DEVICE, backend, take_step, planned, trace)
    sequences.release()
    return steps


def record_natively(
    sequences: CachedSequences, backend: ModuleType, planned: Sequence[Sequence[BatchItem]]
) -> list[Step]:
    recorder = sequences.engine.decoder or TimedOperators(backend)
    steps = []
    try:
        for items in planned:
            recorder.record(True)
            steps.append(_native_step(sequences, items, recorder))
    finally:
        recorder.record(False)
    return steps[1:]  # the first was for warming up


def _native_step(sequences: CachedSequences, items: Sequence[BatchItem], recorder: Any) -> Step:
    """One step as a worker runs it, recorded, but for the choice of the tokens, which is a call of its own here."""
    engine, rows, places = sequences.engine, _rows(len(items)), range(len(items))
    model: Any = engine._model
    begin = time.monotonic_ns()
    with torch.inference_mode():
        if engine.decoder is not None and all(len(item.token_ids) == 1 for item in items):
            hidden = engine.decoder.decode(engine._batches.build(items))
        else:
            batch = sequences.batch(items)
            hidden = engine.forward(batch)[batch.last_token_rows]
        in_layers = time.monotonic_ns()
        _, logits = model.tokens(hidden, [None] * len(items), places)
        has_logits = time.monotonic_ns()
        tokens = model._output.from_last_logits([plain_draw(row) for row in rows], places)
        complete(logits, tokens, rows, places, eos_token_ids=(), max_context=engine.config.max_context)
    end = time.monotonic_ns()
    events: list[Event] = [
        (kind, place if isinstance(place, str) else f"layer {place}", started, ended)
        for kind, place, started, ended in recorder.events
    ]
    events += [("linear", "output layer", in_layers, has_logits), ("sampling", "sample", has_logits, end)]
    return Step(items=items, events=events, seconds=(end - begin) / 1e9, chosen_experts=list(recorder.chosen_experts))


def _rows(count: int) -> list[SampleRow]:
    return [SampleRow(GREEDY, [0], [])] * count


def load(args: argparse.Namespace, backend: ModuleType, threads: int) -> Engine:
    options = {
        "weights": args.weights,
        "memory_bytes": args.memory,
        "max_sequences": args.batch,
        "latent_form": "plain" if args.phase == "prefill" else "absorbed",  # as the workers of each pool
    }
    if args.random_weights:
        backend.set_num_threads(threads)
        return random_model.load(args.model, backend, **options)
    return Engine.load(model_store.ensure(args.model), backend=args.backend, threads=threads, **options)


def main() -> None:
    parser = argparse.ArgumentParser(prog="twinpool profile", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=model_store.DEFAULT_MODEL, help="model name or Hugging Face directory")
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help=f"of MODEL, only config.json is read; or MODEL is one of {', '.join(random_model.CONFIGS)}",
    )
    parser.add_argument("--phase", choices=("prefill", "decode"), default="decode")
    parser.add_argument("--batch", type=int, default=1, help="sequences in the step (default 1)")
    parser.add_argument("--length", type=int, default=256, help="tokens of each (default 256)")
    parser.add_argument("--weights", choices=WEIGHT_FORMATS, default="bf16", help="how matrices are held")
    parser.add_argument("--backend", choices=ops.BACKENDS, default="cpu", help="whose operators (default cpu)")
    parser.add_argument("--profiler", choices=PROFILERS, default=AUTO, help="what records them (auto: the backend's)")
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
        backend = ops.load(args.backend)
        tool = choose_profiler(args.profiler, backend)
        engine = load(args, backend, len(cores))
        limits = native_limits(len(cores)) if backend.NAME == "cpu" else torch_limits(backend.DEVICE)
        steps = profile(engine, backend, tool, args.phase, args.batch, args.length, args.repeats, args.trace)
    except ConfigError as error:
        parser.error(error.message)
    step = median_step(steps)
    kinds = figures(engine, step, limits)
    Console().print(table(kinds, step.seconds, limits))
    print(f"trace: {args.trace}")
    settings = {"phase": args.phase, "batch": args.batch, "length": args.length, "weights": args.weights}
    measured = {
        "backend": backend.NAME,
        "profiler": tool,
        "isa": native.isa() if backend.NAME == "cpu" else "",
        "step_ms": round(step.seconds * 1e3, 3),
        "read_gb_s": round(limits.bytes_per_s / 1e9, 2),
        "multiply_gop_s": round(limits.operations_per_s / 1e9, 1),
        "experts_read": [len(each) for each in step.chosen_experts],
    }
    result = {"bench": "profile", **describe(), "model": engine.model_name, **settings, **measured, "kinds": kinds}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
