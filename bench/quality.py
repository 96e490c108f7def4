"""What int8 costs in quality, in the KV cache or in the weights: next-token distributions against bf16 on real text.

    python -m bench.quality [--model DIR] [--tokens 8192] [--window 1024] [--backend cpu] [--weights]

The text is the Python language reference that ships with Python's standard library (pydoc_data), cut into windows that
are prefilled through the real engine: paged cache, chunks, attention over what the cache stores. For the cache,
activations are fp32, so that nothing but the cache differs; for weights (--weights) activations and cache are bf16, and
nothing but the format of the matrices differs. Printed per dtype or format: mean and 99th percentile of
KL(bf16 || it) per token in nats, how often the likeliest token is the same, and perplexity; for weights also how far
greedy answers of 64 tokens agree. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.machine import describe
from bench.sequences import CachedSequences
from engine.engine import Engine
from engine.quantization import AS_LOADED, WEIGHT_FORMATS
from twinpool import model_store

CHUNK = 256  # tokens a prefill step, and rows of logits held at once
CACHE_BYTES = 512 << 20
REFERENCE = "bf16"
ANSWER_TOKENS = 64
NUM_ANSWERS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    name: str
    bytes_per_token: float  # of KV
    mean_kl: float
    p99_kl: float
    same_top1: float
    perplexity: float


def hidden_states(engine: Engine, windows: list[list[int]]) -> torch.Tensor:
    """[all tokens, hidden]: every window from an empty cache, in chunks."""
    hidden = []
    for window in windows:
        sequence = CachedSequences(engine, 1, len(window))
        for start in range(0, len(window), CHUNK):
            item = sequence.item(0, window[start : start + CHUNK], start)
            hidden.append(engine.forward(sequence.batch([item])))
        sequence.release()
    return torch.cat(hidden)


def greedy_answers(engine: Engine, windows: list[list[int]]) -> list[list[int]]:
    """The likeliest ANSWER_TOKENS tokens after prompts that end at places all over the text, all in one batch."""
    every = max(1, sum(map(len, windows)) // NUM_ANSWERS)
    text = [token_id for window in windows for token_id in window]
    prompts = [text[max(0, end - 64) : end] for end in range(every, len(text) + 1, every)][:NUM_ANSWERS]
    sequences = CachedSequences(engine, len(prompts), max(map(len, prompts)) + ANSWER_TOKENS)
    answers: list[list[int]] = [[] for _ in prompts]
    new, starts = prompts, [0] * len(prompts)
    for _ in range(ANSWER_TOKENS):
        batch = sequences.batch([sequences.item(i, new[i], starts[i]) for i in range(len(prompts))])
        likeliest = engine.logits(engine.forward(batch)[batch.last_token_rows]).argmax(-1).tolist()
        starts = [start + len(token_ids) for start, token_ids in zip(starts, new, strict=True)]
        new = [[token_id] for token_id in likeliest]
        for answer, token_id in zip(answers, likeliest, strict=True):
            answer.append(token_id)
    sequences.release()
    return answers


def agreement(answers: list[list[int]], reference: list[list[int]]) -> float:
    """Mean share of an answer up to its first token that differs."""
    shares = []
    for mine, theirs in zip(answers, reference, strict=True):
        differing = (i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        shares.append(next(differing, len(theirs)) / len(theirs))
    return sum(shares) / len(shares)


def compare(
    name: str,
    engine: Engine,
    hidden: torch.Tensor,
    base: Engine,
    reference: torch.Tensor,
    windows: list[list[int]],
) -> Quality:
    """Quality of `engine`, which computed `hidden`, against `base`, which computed `reference` of the same tokens."""
    kls, same, nlls = [], [], []
    for rows, next_ids in predictions(windows):
        mine = engine.logits(hidden[rows]).double().log_softmax(-1)
        theirs = base.logits(reference[rows]).double().log_softmax(-1)
        kls.append((theirs.exp() * (theirs - mine)).sum(-1))
        same.append((mine.argmax(-1) == theirs.argmax(-1)).double())
        nlls.append(-mine.gather(1, next_ids.unsqueeze(1)).squeeze(1))
    kl = torch.cat(kls)
    layout = engine.cache.layout
    return Quality(
        name=name,
        bytes_per_token=layout.block_bytes / layout.block_size,
        mean_kl=float(kl.mean()),
        p99_kl=float(kl.quantile(0.99)),
        same_top1=float(torch.cat(same).mean()),
        perplexity=float(torch.cat(nlls).mean().exp()),
    )


def predictions(windows: list[list[int]]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Pieces of rows of the packed hidden states with the token that follows each row in its window."""
    offset = 0
    for window in windows:
        for start in range(0, len(window) - 1, CHUNK):
            end = min(start + CHUNK, len(window) - 1)
            yield slice(offset + start, offset + end), torch.tensor(window[start + 1 : end + 1])
        offset += len(window)


def read_windows(model_dir: Path, num_tokens: int, window: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = "\n\n".join(topics[name] for name in sorted(topics))
    token_ids = tokenizer.encode(text[: 16 * num_tokens], add_special_tokens=False).ids[:num_tokens]
    return [token_ids[i : i + window] for i in range(0, len(token_ids) - 1, window)]


def measure_kv(model_dir: Path, windows: list[list[int]], backend: str, threads: int) -> list[Quality]:
    results: list[Quality] = []
    reference: torch.Tensor | None = None
    for kv_dtype in (REFERENCE, "fp32", "int8"):
        engine = load(model_dir, backend, threads, dtype="fp32", kv_dtype=kv_dtype)
        hidden = hidden_states(engine, windows)
        reference = hidden if reference is None else reference
        results.append(compare(kv_dtype, engine, hidden, engine, reference, windows))
    return results


def measure_weights(
    model_dir: Path, windows: list[list[int]], backend: str, threads: int
) -> tuple[list[Quality], dict[str, float]]:
    """The qualities, and of each format how far its greedy answers agree with bf16's."""
    results: list[Quality] = []
    agreements: dict[str, float] = {}
    base = load(model_dir, backend, threads, dtype="bf16", kv_dtype="bf16")
    reference, expected = hidden_states(base, windows), greedy_answers(base, windows)
    for weights in WEIGHT_FORMATS:
        engine = load(model_dir, backend, threads, dtype="bf16", kv_dtype="bf16", weights=weights)
        hidden = hidden_states(engine, windows)
        results.append(compare(weights, engine, hidden, base, reference, windows))
        agreements[weights] = agreement(greedy_answers(engine, windows), expected)
    return results, agreements


def load(model_dir: Path, backend: str, threads: int, *, dtype: str, kv_dtype: str, weights: str = AS_LOADED) -> Engine:
    return Engine.load(
        model_dir,
        backend=backend,
        dtype=dtype,
        kv_dtype=kv_dtype,
        weights=weights,
        memory_bytes=CACHE_BYTES,
        max_sequences=NUM_ANSWERS,
        threads=threads,
    )


def print_table(title: str, results: list[Quality], agreements: dict[str, float]) -> None:
    table = Table(title=title)
    names = ("", "KV bytes a token", "mean KL", "p99 KL", "same top-1", "perplexity", "change", "greedy agreement")
    for column in names[: 8 if agreements else 7]:
        table.add_column(column, justify="right")
    for r in results:
        change = r.perplexity / results[0].perplexity - 1
        table.add_row(
            r.name,
            f"{r.bytes_per_token:.0f}",
            f"{r.mean_kl:.2e}",
            f"{r.p99_kl:.2e}",
            f"{r.same_top1:.2%}",
            f"{r.perplexity:.4f}",
            f"{change:+.4%}",
            *([f"{agreements[r.name]:.1%}"] if agreements else []),
        )
    Console().print(table)


def report(
    what: str, model_dir: Path, windows: list[list[int]], results: list[Quality], agreements: dict[str, float]
) -> dict[str, object]:
    """The JSON object: per result KL, agreement and change of perplexity, named after what it was measured of."""
    num_tokens = sum(map(len, windows))
    print_table(f"{what} against {REFERENCE} on {num_tokens} tokens, {model_dir.name}", results, agreements)
    base = results[0]
    figures: dict[str, object] = {f"{what}_{base.name}_perplexity": base.perplexity}
    for r in results:
        prefix = f"{what}_{r.name}"
        figures[f"{prefix}_bytes_per_token"] = r.bytes_per_token
        if r is not base:
            figures[f"{prefix}_mean_kl"] = r.mean_kl
            figures[f"{prefix}_p99_kl"] = r.p99_kl
            figures[f"{prefix}_same_top1"] = r.same_top1
            figures[f"{prefix}_ppl_delta"] = r.perplexity / base.perplexity - 1
            if agreements:
                figures[f"{prefix}_greedy_agreement"] = agreements[r.name]
    return {"bench": "quality", **describe(), "model": model_dir.name, "tokens": num_tokens, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=model_store.DEFAULT_MODEL, help="model name or Hugging Face directory")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of text")
    parser.add_argument("--window", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--backend", default="cpu", help="engine backend")
    parser.add_argument("--threads", type=int, default=0, help="threads; 0: one a core")
    parser.add_argument("--weights", action="store_true", help="measure the formats of weights, not of the cache")
    args = parser.parse_args()
    model_dir = model_store.ensure(args.model)
    windows = read_windows(model_dir, args.tokens, args.window)
    if args.weights:
        results, agreements = measure_weights(model_dir, windows, args.backend, args.threads)
        print(json.dumps(report("weights", model_dir, windows, results, agreements)))
    else:
        results = measure_kv(model_dir, windows, args.backend, args.threads)
        print(json.dumps(report("kv", model_dir, windows, results, {})))


if __name__ == "__main__":
    main()
