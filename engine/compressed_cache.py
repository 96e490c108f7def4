"""The cache of attention over a window and compressed entries (DeepSeek-V4): rows of blocks and rows of sequences.

A layer with entries has a region of blocks. A row holds, for a block of tokens, the entries that they became:

    entries       [block_size / rate] of head_dim      a key and value, whose last rope_dim elements are turned
    index entries [block_size / rate] of index_dim     layers that choose among their entries only

Every layer has a region of sequences. A row holds what does not grow with the sequence:

    sums          fp32 [rate - 1, 2, width]   keys and gates of the tokens that are no entry yet, at position % rate
    overlap       fp32 [rate, 2, dim]         of the last tokens that became one, what the next entry needs of them
    (both again, for index entries)
    window        [window] of head_dim        keys of the newest tokens, at position % window

Windows and entries are bf16 or fp32; as int8 they have one fp16 scale each, which does not cover the part that rope
turns: that stays bf16. Index entries are int8 as a whole, turned by a Hadamard matrix, as are the queries that they are
scored with. The two elements that rope turns together lie half of rope_dim apart (published models: side by side).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.compressed_config import HEAVY, SPARSE, WINDOW, CompressedConfig
from engine.latent_cache import LatentView, item_bytes, view_items
from engine.region_shape import RegionShape, row_bytes

_SUM_BYTES = 4  # sums are fp32, whatever the cache's dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedLayout:
    """Shape of the rows of all regions. A block is a multiple of the tokens of every kind of entry."""

    model: CompressedConfig
    block_size: int  # tokens a row of blocks
    kv_dtype: str  # a key of KV_DTYPES
    index_dtype: str = ""  # of index entries, "": as the others

    @property
    def num_layers(self) -> int:
        return len(self.model.kinds)

    @property
    def regions(self) -> tuple[RegionShape, ...]:
        found = []
        for layer, kind in enumerate(self.model.kinds):
            if kind != WINDOW:
                size = self.block_row_bytes(kind)
                found.append(RegionShape(name=f"layer.{layer}", layer=layer, per="block", row_bytes=size))
            size = -(-(self.window_bytes + self.sum_bytes(kind)) // _SUM_BYTES) * _SUM_BYTES
            found.append(RegionShape(name=f"layer.{layer}.state", layer=layer, per="sequence", row_bytes=size))
        return tuple(found)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block of tokens takes over all layers."""
        return row_bytes(self.regions, "block")

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence takes over all layers, beside its blocks."""
        return row_bytes(self.regions, "sequence")

    @property
    def window_bytes(self) -> int:
        """Of one layer's window."""
        return self.model.window * sum(self._entry_bytes)

    def block_row_bytes(self, kind: str) -> int:
        """Of one row of blocks in a layer of that kind, which has entries."""
        count = self.block_size // self.model.rate(kind)
        return count * (sum(self._entry_bytes) + (sum(self._index_bytes) if kind == SPARSE else 0))

    def sum_bytes(self, kind: str) -> int:
        """Of what is not whole yet in one layer of that kind."""
        return sum(_SUM_BYTES * math.prod(shape) for shape in self._sum_shapes(kind))

    def describe(self) -> str:
        """Everything two caches must agree on to exchange rows, as one line (part of the fingerprint)."""
        model = self.model
        kinds = "".join({WINDOW: "w", SPARSE: "s", HEAVY: "h"}[kind] for kind in model.kinds)
        return (
            f"layers={kinds} rates={model.sparse_rate},{model.heavy_rate} window={model.window} head={model.head_dim} "
            f"rope={model.rope_dim} index={model.index_dim} dtype={self.kv_dtype} order=compressed/v1"
            f"{' rope-dtype=bf16 scales=entry-fp16 index=hadamard/v1' if self.kv_dtype == 'int8' else ''}"
        )

    def view(self, layer: int, buffers: Sequence[torch.Tensor]) -> CompressedView:
        """The layer's buffers, uint8 [rows, row_bytes] of blocks (where it has entries) and of sequences, typed."""
        model, kind = self.model, self.model.kinds[layer]
        entries = index = None
        if kind != WINDOW:
            count = self.block_size // model.rate(kind)
            begin = count * sum(self._entry_bytes)
            entries = self._view(buffers[0][:, :begin])
            if kind == SPARSE:
                index = view_items(buffers[0][:, begin:], count, model.index_dim, 0, self.index_dtype or self.kv_dtype)
        state, begin, sums = buffers[-1], 0, []
        for shape in self._sum_shapes(kind):
            end = begin + _SUM_BYTES * math.prod(shape)
            sums.append(state[:, begin:end].view(torch.float32).unflatten(1, shape))
            begin = end
        window = self._view(state[:, begin : begin + self.window_bytes])
        pairs = [Unfinished(sums=sums[0], overlap=None)] if kind == HEAVY else []
        if kind == SPARSE:
            pairs = [Unfinished(sums=sums[i], overlap=sums[i + 1]) for i in (0, 2)]
        return CompressedView(
            window=window,
            entries=entries,
            unfinished=pairs[0] if pairs else None,
            index=index,
            index_unfinished=pairs[1] if len(pairs) > 1 else None,
        )

    def _view(self, buffer: torch.Tensor) -> LatentView:
        """Of windows or entries."""
        count = buffer.shape[1] // sum(self._entry_bytes)
        rope_dim = self.model.rope_dim
        return view_items(buffer, count, self.model.head_dim - rope_dim, rope_dim, self.kv_dtype)

    @property
    def _entry_bytes(self) -> tuple[int, ...]:
        return item_bytes(self.model.head_dim - self.model.rope_dim, self.model.rope_dim, self.kv_dtype)

    @property
    def _index_bytes(self) -> tuple[int, ...]:
        return item_bytes(self.model.index_dim, 0, self.index_dtype or self.kv_dtype)

    def _sum_shapes(self, kind: str) -> list[tuple[int, int, int]]:
        model = self.model
        if kind == SPARSE:
            rate, dims = model.sparse_rate, (model.head_dim, model.index_dim)
            return [shape for dim in dims for shape in ((rate - 1, 2, 2 * dim), (rate, 2, dim))]
        return [(model.heavy_rate - 1, 2, model.head_dim)] if kind == HEAVY else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """Keys and gates in fp32: sums [rows, rate - 1, 2, width]; overlap [rows, rate, 2, dim] where windows overlap."""

    sums: torch.Tensor
    overlap: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedView:
    """One layer's regions seen as tensors that share their memory; None where its kind has no such thing."""

    window: LatentView
    entries: LatentView | None
    unfinished: Unfinished | None
    index: LatentView | None
    index_unfinished: Unfinished | None
