"""What DeepSeek-V4's attention needs of a step: over windows, over compressed entries, and to choose among these.

A token of a layer sees the keys of its window, itself included, and by kind of the layer no entries, all entries that
are whole by then, or those that an indexer chooses (engine/models/compressed_attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch import BatchItem
from engine.compressed_config import HEAVY, SPARSE, WINDOW, CompressedConfig
from engine.latent_cache import item_bytes
from engine.model_config import ModelConfig

_SUM_BYTES = 4  # fp32


def compressed_attention(
    config: ModelConfig, kv_dtype: str, activation_bytes: int, items: Sequence[BatchItem]
) -> tuple[int, int]:
    """(bytes, operations) of all layers.

    Keys of windows are read as activations, which is what they are by then; of entries that an indexer chooses as many
    as the step's tokens choose together, at most all, since several may choose the same: exact for one token a
    sequence.
    """
    compressed = config.compressed
    assert compressed is not None
    num_bytes = operations = 0
    for kind in compressed.kinds:
        for item in items:
            start, end = item.start, item.start + len(item.token_ids)
            local = min(start, compressed.window - 1) + end - start
            pairs = sum(min(compressed.window, position + 1) for position in range(start, end))
            num_bytes += local * compressed.head_dim * activation_bytes
            if kind != WINDOW:
                visible = [(position + 1) // compressed.rate(kind) for position in range(start, end)]
                seen = [min(each, compressed.index_top_k) if kind == SPARSE else each for each in visible]
                num_bytes += min(visible[-1], sum(seen)) * _entry_bytes(compressed, kv_dtype)
                pairs += sum(seen)
                choosing = [each for each in visible if kind == SPARSE and each > compressed.index_top_k]
                if choosing:  # a product with each of the indexer's heads, and their weighted sum
                    num_bytes += choosing[-1] * _index_bytes(compressed, kv_dtype)
                    operations += 2 * compressed.index_heads * (compressed.index_dim + 1) * sum(choosing)
            operations += 4 * config.num_heads * compressed.head_dim * pairs
    return num_bytes, operations


def compressed_kv_access(compressed: CompressedConfig, kv_dtype: str, items: Sequence[BatchItem]) -> int:
    """Bytes of all layers: windows read and written, entries that become whole, sums of tokens that are none yet."""
    num_bytes, item_size = 0, _entry_bytes(compressed, kv_dtype)
    for kind in compressed.kinds:
        rate = compressed.rate(kind)
        for item in items:
            start, end = item.start, item.start + len(item.token_ids)
            num_bytes += (min(start, compressed.window - 1) + min(end - start, compressed.window)) * item_size
            if kind == WINDOW:
                continue
            whole = end // rate - start // rate
            kept = end - max(start, end // rate * rate)  # new tokens that are part of no entry yet
            held = start % rate if whole else 0  # older ones that now are
            num_bytes += whole * item_size + (kept + held) * _sum_bytes(compressed.head_dim, kind)
            if kind == SPARSE:
                num_bytes += whole * _index_bytes(compressed, kv_dtype)
                num_bytes += (kept + held) * _sum_bytes(compressed.index_dim, kind)
                if whole:  # the half of the last entry's tokens that the next one needs: read if there is one, written
                    overlaps = (start >= rate) + 1
                    num_bytes += overlaps * rate * 2 * (compressed.head_dim + compressed.index_dim) * _SUM_BYTES
    return num_bytes


def _sum_bytes(dim: int, kind: str) -> int:
    """A token's keys and gates; entries that overlap take two halves of each."""
    return 2 * (dim if kind == HEAVY else 2 * dim) * _SUM_BYTES


def _entry_bytes(compressed: CompressedConfig, kv_dtype: str) -> int:
    return sum(item_bytes(compressed.head_dim - compressed.rope_dim, compressed.rope_dim, kv_dtype))


def _index_bytes(compressed: CompressedConfig, kv_dtype: str) -> int:
    return sum(item_bytes(compressed.index_dim, 0, kv_dtype))
