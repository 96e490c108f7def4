"""What a step needs, by kind of operator: bytes to read or write, and operations.

Counted as the model needs it, whoever computes it: each matrix is read once a step, of experts those that any of the
step's tokens was sent to, and a cached token once by its sequence in each layer; a product with its addition is two
operations. Not counted: activations, which lie in a processor's cache or could, the matrices that only change a basis
for int8, and what is "other": norms, gates, the mixing of streams, Python. Counts are held against transformers and
against figures worked out by hand in tests/bench/test_work.py.

    linear      matrices outside experts; bytes as they are packed
    moe         the router, chosen experts, what every token passes through beside them
    attention   scores and sums over keys; of DeepSeek-V4 also the indexer's scores (bench/compressed_work.py)
    kv_access   what is stored of new tokens, and what is read other than by attention itself
    sampling    logits: read once, one comparison each
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.compressed_work import compressed_attention, compressed_kv_access
from engine.batch import BatchItem
from engine.engine import Engine
from engine.models.expert_mlp import ExpertMlp
from engine.models.latent_attention import LatentAttention
from engine.models.streams import StreamDecoder


@dataclass(frozen=True, slots=True)
class Work:
    num_bytes: float
    operations: float


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a step: new tokens, cached tokens of all sequences after it, and pairs of a new token and one it may see."""

    tokens: int
    contexts: int
    pairs: int

    @classmethod
    def of(cls, items: Sequence[BatchItem]) -> Counts:
        ends = [item.start + len(item.token_ids) for item in items]
        pairs = sum(end * (end + 1) - item.start * (item.start + 1) for item, end in zip(items, ends, strict=True))
        return cls(sum(len(item.token_ids) for item in items), sum(ends), pairs // 2)


def work(engine: Engine, items: Sequence[BatchItem], chosen_experts: Sequence[Sequence[int]]) -> dict[str, Work]:
    """chosen_experts: of each layer with experts in order, those that a token was sent to."""
    counts, model = Counts.of(items), engine._model
    kinds = {
        "linear": linear(model, len(items), counts),
        "attention": attention(engine, items, counts),
        "kv_access": kv_access(engine, items, counts),
        "sampling": sampling(engine, len(items)),
    }
    if engine.config.moe is not None:
        kinds["moe"] = moe(model, chosen_experts, counts)
    return kinds


def linear(model: Any, rows: int, counts: Counts) -> Work:
    """rows: of logits."""
    passes: list[tuple[Any, int]] = [(model.head, rows)]
    for layer in model.layers:
        projected = layer.attention.kv_b if isinstance(layer.attention, LatentAttention) else ()
        for packed in layer.attention.packed:
            # The plain form projects the latents of all that is cached.
            passes.append((packed, counts.contexts if any(packed is each for each in projected) else counts.tokens))
        if not isinstance(layer.mlp, ExpertMlp):
            passes.append((layer.mlp, counts.tokens))
        if isinstance(model, StreamDecoder):
            passes += [(each.fn, counts.tokens) for each in (layer.attention_connection, layer.mlp_connection)]
    if isinstance(model, StreamDecoder):
        passes.append((model.merge.fn, counts.tokens))
    return Work(
        sum(packed.nbytes for packed, _ in passes), sum(2 * count * packed.num_elements for packed, count in passes)
    )


def moe(model: Any, chosen_experts: Sequence[Sequence[int]], counts: Counts) -> Work:
    sparse: Iterable[ExpertMlp] = [layer.mlp for layer in model.layers if isinstance(layer.mlp, ExpertMlp)]
    read = operations = 0
    for mlp, chosen in zip(sparse, chosen_experts, strict=True):
        read += mlp.nbytes_of(chosen)
        operations += 2 * counts.tokens * mlp.num_elements
    return Work(read, operations)


def attention(engine: Engine, items: Sequence[BatchItem], counts: Counts) -> Work:
    config, layout = engine.config, engine.cache.layout
    if config.compressed is not None:
        return Work(*compressed_attention(config, layout.kv_dtype, _activation_bytes(engine), items))
    layers, heads, cached = config.num_layers, config.num_heads, counts.contexts * _token_bytes(engine)
    latent = config.latent
    if latent is None:
        return Work(cached, 4 * layers * heads * config.head_dim * counts.pairs)
    if _is_plain(engine):
        projected = counts.contexts * layers * heads * (latent.qk_dim + latent.v_dim) * _activation_bytes(engine)
        return Work(projected, 2 * layers * heads * (latent.qk_dim + latent.v_dim) * counts.pairs)
    return Work(cached, 2 * layers * heads * (2 * latent.kv_rank + latent.rope_dim) * counts.pairs)


def kv_access(engine: Engine, items: Sequence[BatchItem], counts: Counts) -> Work:
    config, layout = engine.config, engine.cache.layout
    if config.compressed is not None:
        return Work(compressed_kv_access(config.compressed, layout.kv_dtype, items), 0)
    gathered = counts.contexts if _is_plain(engine) else 0  # before they are projected
    return Work((counts.tokens + gathered) * _token_bytes(engine), 0)


def sampling(engine: Engine, rows: int) -> Work:
    logits = rows * engine.config.vocab_size
    return Work(logits * _activation_bytes(engine), logits)


def _is_plain(engine: Engine) -> bool:
    model: Any = engine._model
    first = model.layers[0].attention
    return isinstance(first, LatentAttention) and bool(first.kv_b)


def _activation_bytes(engine: Engine) -> int:
    model: Any = engine._model
    return int(model.embedding.itemsize)


def _token_bytes(engine: Engine) -> float:
    """Of a cached token over all layers."""
    return engine.cache.layout.block_bytes / engine.cache.layout.block_size
