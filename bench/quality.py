"""What INT8 KV costs in quality: next-token distributions with an int8 cache against a bf16 cache, on real text.

    python -m bench.quality [--model DIR] [--tokens 8192] [--window 1024] [--backend cpu]

The text is the Python language reference that ships with Python's standard library (pydoc_data), cut into windows that
are prefilled through the real engine: paged cache, chunks, attention over what the cache stores. Activations are fp32,
so that nothing but the cache differs. Printed per cache dtype: mean and 99th percentile of KL(bf16 || dtype) per token
in nats, how often the likeliest token is the same, and perplexity. The last line is one JSON object.
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
from engine.batch import Batch, BatchItem
from engine.engine import Engine
from twinpool import model_store
from twinpool.errors import ConfigError

BLOCK_SIZE = 64
CHUNK = 256  # tokens a prefill step, and rows of logits held at once
CACHE_BYTES = 512 << 20
REFERENCE = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    kv_dtype: str
    bytes_per_token: float
    mean_kl: float
    p99_kl: float
    same_top1: float
    perplexity: float


def hidden_states(engine: Engine, windows: list[list[int]]) -> torch.Tensor:
    """[all tokens, hidden]: every window from an empty cache, in chunks."""
    hidden = []
    for window in windows:
        block_ids = engine.blocks.allocate(-(-len(window) // BLOCK_SIZE))
        if block_ids is None:
            raise ConfigError(
                f"a window of {len(window)} tokens does not fit {CACHE_BYTES} bytes of cache: lower --window"
            )
        for start in range(0, len(window), CHUNK):
            item = BatchItem(window[start : start + CHUNK], start, block_ids)
            hidden.append(engine.forward(Batch.build([item], BLOCK_SIZE)))
        engine.blocks.release(block_ids)
    return torch.cat(hidden)


def compare(engine: Engine, hidden: torch.Tensor, reference: torch.Tensor, windows: list[list[int]]) -> Quality:
    """Quality of `hidden` (computed over `engine`'s cache) against `reference` hidden states of the same tokens."""
    kls, same, nlls = [], [], []
    for rows, next_ids in predictions(windows):
        mine = engine.logits(hidden[rows]).double().log_softmax(-1)
        theirs = engine.logits(reference[rows]).double().log_softmax(-1)
        kls.append((theirs.exp() * (theirs - mine)).sum(-1))
        same.append((mine.argmax(-1) == theirs.argmax(-1)).double())
        nlls.append(-mine.gather(1, next_ids.unsqueeze(1)).squeeze(1))
    kl = torch.cat(kls)
    layout = engine.cache.layout
    return Quality(
        kv_dtype=layout.kv_dtype,
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


def measure(model_dir: Path, windows: list[list[int]], backend: str, threads: int) -> list[Quality]:
    results: list[Quality] = []
    reference: torch.Tensor | None = None
    for kv_dtype in (REFERENCE, "fp32", "int8"):
        engine = Engine.load(
            model_dir,
            backend=backend,
            dtype="fp32",
            kv_dtype=kv_dtype,
            block_size=BLOCK_SIZE,
            memory_bytes=CACHE_BYTES,
            threads=threads,
        )
        hidden = hidden_states(engine, windows)
        reference = hidden if reference is None else reference
        results.append(compare(engine, hidden, reference, windows))
    return results


def report(model_dir: Path, windows: list[list[int]], results: list[Quality]) -> dict[str, object]:
    table = Table(title=f"KV cache dtypes against {REFERENCE} on {sum(map(len, windows))} tokens, {model_dir.name}")
    for column in ("KV dtype", "bytes a token", "mean KL", "p99 KL", "same top-1", "perplexity", "change"):
        table.add_column(column, justify="right")
    base = results[0].perplexity
    for r in results:
        change = r.perplexity / base - 1
        table.add_row(
            r.kv_dtype,
            f"{r.bytes_per_token:.0f}",
            f"{r.mean_kl:.2e}",
            f"{r.p99_kl:.2e}",
            f"{r.same_top1:.2%}",
            f"{r.perplexity:.4f}",
            f"{change:+.4%}",
        )
    Console().print(table)
    int8 = results[-1]
    return {
        "bench": "quality",
        **describe(),
        "model": model_dir.name,
        "tokens": sum(map(len, windows)),
        "kv_int8_mean_kl": int8.mean_kl,
        "kv_int8_p99_kl": int8.p99_kl,
        "kv_int8_same_top1": int8.same_top1,
        "kv_int8_ppl_delta": int8.perplexity / base - 1,
        "kv_bf16_perplexity": base,
        "kv_int8_bytes_per_token": int8.bytes_per_token,
        "kv_bf16_bytes_per_token": results[0].bytes_per_token,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=model_store.DEFAULT_MODEL, help="model name or Hugging Face directory")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of text")
    parser.add_argument("--window", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--backend", default="cpu", help="engine backend")
    parser.add_argument("--threads", type=int, default=0, help="threads; 0: torch's choice")
    args = parser.parse_args()
    model_dir = model_store.ensure(args.model)
    windows = read_windows(model_dir, args.tokens, args.window)
    print(json.dumps(report(model_dir, windows, measure(model_dir, windows, args.backend, args.threads))))


if __name__ == "__main__":
    main()
