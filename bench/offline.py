"""The engine alone, without processes and networks: decode and prefill speed against the limits of the machine.

    python -m bench.offline [--model M] [--quick] [--cores 1]

Every round measures the read bandwidth of the cores and one or more steps of each setting in turns, so that ratios hold
on a noisy machine; medians over the rounds. Decode is 256 tokens in, 128 out, in batches of 1, 8 and 32; its bandwidth
fraction is what a step has to read at batch 1 (packed weights once, the KV of the context) over the time it took, over
the read bandwidth. The step's overhead is what it takes beside the native calls. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.machine import describe, memory_to_read
from bench.sequences import CachedSequences
from engine.engine import Engine
from engine.models.decoder import Decoder
from engine.ops import native
from engine.quantization import AS_LOADED, W8A8, W8A16
from engine.sampling import SampleRow
from twinpool import model_store
from twinpool.sampling import SamplingParams

PROMPT_TOKENS, ANSWER_TOKENS = 256, 128
BATCHES = (1, 8, 32)
PREFILLS = {"8x512": (8, 512), "1x2048": (1, 2048)}
CHUNK = 256  # tokens a prefill step, as a worker's --token-budget
MEMORY_BYTES = 768 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)


class Sequences(CachedSequences):
    """`count` sequences of random tokens, `length` tokens each computed."""

    length = 0

    def prefill(self, num_tokens: int) -> None:
        """All sequences from their start, in steps of CHUNK tokens."""
        vocab_size = self.engine.config.vocab_size
        for index in range(self.count):
            for start in range(0, num_tokens, CHUNK):
                token_ids = [7 * i % vocab_size for i in range(start, min(start + CHUNK, num_tokens))]
                self.engine.forward(self.batch([self.item(index, token_ids, start)]))
        self.length = num_tokens

    def step(self) -> None:
        """One token each, greedily, as a decode worker does it."""
        self.engine.decode(self.items([11], self.length), [SampleRow(GREEDY, [11], [])] * self.count)
        self.length += 1


@dataclass(frozen=True, slots=True)
class Limit:
    """Reads an array that no cache holds, on as many threads as the engine."""

    array: torch.Tensor
    threads: int

    def bytes_per_s(self) -> float:
        torch.set_num_threads(self.threads)
        begin = time.perf_counter()
        self.array.sum()
        seconds = time.perf_counter() - begin
        torch.set_num_threads(1)
        return self.array.nbytes / seconds


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def step_bytes(engine: Engine, context: int) -> int:
    """What a decode step at batch 1 must read: every packed weight once, and what is cached of the sequence.

    Of experts those that a token takes; of entries that an indexer chooses among all, which is more than it reads.
    """
    layout = engine.cache.layout
    return engine.weight_bytes + context * layout.block_bytes // layout.block_size + layout.state_bytes


def decode(engine: Engine, limit: Limit, batch: int, steps: int, rounds: int) -> tuple[float, list[float]]:
    """Tokens a second, and for each round the share of the read bandwidth."""
    rates, fractions = [], []
    for _ in range(rounds):
        sequences = Sequences(engine, batch, PROMPT_TOKENS + ANSWER_TOKENS)
        sequences.length = PROMPT_TOKENS  # the cache's content does not change the speed
        bandwidth = limit.bytes_per_s()
        seconds = statistics.median(timed(sequences.step) for _ in range(steps))
        rates.append(batch / seconds)
        fractions.append(step_bytes(engine, PROMPT_TOKENS + steps // 2) / seconds / bandwidth)
        sequences.release()
    return statistics.median(rates), fractions


def overhead(engine: Engine, steps: int) -> float | None:
    """Share of a decode step at batch 1 that passes outside the native calls; the median over the steps.

    None of a model whose layers are no single call: see `twinpool profile` for its operators.
    """
    decoder, model = engine.decoder, engine._model
    if decoder is None or not isinstance(model, Decoder):
        return None
    sequences, output, seconds = Sequences(engine, 1, PROMPT_TOKENS + ANSWER_TOKENS), model._output, 0.0
    call = output._run

    def timed_call(*arguments: object) -> None:
        nonlocal seconds
        seconds = timed(partial(call, *arguments))

    output._run = timed_call
    decoder.record(True)
    shares: list[float] = []
    items, rows = sequences.items([11], PROMPT_TOKENS), [SampleRow(GREEDY, [11], [])]
    for _ in range(steps):
        whole = timed(partial(engine.decode, items, rows))
        native_s = (decoder.events[-1][3] - decoder.events[0][2]) / 1e9 + seconds
        shares.append(1 - native_s / whole)
    decoder.record(False)
    output._run = call
    sequences.release()
    return statistics.median(shares)


def prefill(engine: Engine, count: int, length: int, rounds: int) -> float:
    """Tokens a second."""
    rates = []
    for _ in range(rounds):
        sequences = Sequences(engine, count, length)
        rates.append(count * length / timed(partial(sequences.prefill, length)))
        sequences.release()
    return statistics.median(rates)


def measure(model_dir: Path, threads: int, quick: bool) -> dict[str, object]:
    rounds, steps = (2, 6) if quick else (5, 24)
    limit = Limit(memory_to_read((128 if quick else 384) << 20), threads)
    engines = {
        weights: Engine.load(
            model_dir, weights=weights, memory_bytes=MEMORY_BYTES, max_sequences=max(BATCHES), threads=threads
        )
        for weights in (AS_LOADED, W8A16, W8A8)
    }
    decode_tok_s: dict[str, dict[str, float]] = {AS_LOADED: {}, W8A16: {}}
    fractions: dict[str, list[float]] = {AS_LOADED: [], W8A16: []}
    for batch in BATCHES:
        for weights in (AS_LOADED, W8A16):
            rate, shares = decode(engines[weights], limit, batch, max(3, steps // batch), rounds)
            decode_tok_s[weights][str(batch)] = round(rate, 1)
            if batch == 1:
                fractions[weights] = shares
    prefill_tok_s = {
        weights: {
            name: round(prefill(engines[weights], 2 if quick and count > 2 else count, length, 1 if quick else 3), 1)
            for name, (count, length) in PREFILLS.items()
        }
        for weights in (AS_LOADED, W8A8)
    }
    outside = overhead(engines[AS_LOADED], 4 * steps)
    return {
        "model": model_dir.name,
        "threads": threads,
        "isa": native.isa(),
        "read_gb_s": round(statistics.median(limit.bytes_per_s() for _ in range(3)) / 1e9, 2),
        "decode_bandwidth_fraction_bf16": round(statistics.median(fractions[AS_LOADED]), 3),
        "decode_bandwidth_fraction_w8a16": round(statistics.median(fractions[W8A16]), 3),
        "decode_tok_s": decode_tok_s,
        "prefill_tok_s": prefill_tok_s,
        "step_overhead_fraction": outside if outside is None else round(outside, 4),
    }


def table(figures: dict[str, object]) -> str:
    lines = [f"{name:34} {value}" for name, value in figures.items() if not isinstance(value, dict)]
    for name in ("decode_tok_s", "prefill_tok_s"):
        kinds = figures[name]
        assert isinstance(kinds, dict)
        lines += [
            f"{name} {kind:8} {case:8} {rate:>12}" for kind, cases in kinds.items() for case, rate in cases.items()
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.offline", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=model_store.DEFAULT_MODEL, help="model name or Hugging Face directory")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps, two of the eight prompts")
    parser.add_argument("--cores", type=int, default=1, help="cores to use (default 1)")
    args = parser.parse_args()
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, allowed[: args.cores])
    model_dir = model_store.ensure(args.model)
    figures = measure(model_dir, min(args.cores, len(allowed)), args.quick)
    print(table(figures))
    print(json.dumps({"bench": "offline", **describe(), **figures}))


if __name__ == "__main__":
    main()
