"""The cache: regions of rows, allocated once at start, and what a row is like for attention over keys and values.

A row of KvLayout holds a block of tokens, side by side and head-major, so that a scale can never be separated from the
data it scales:

    K  [num_kv_heads, block_size, head_dim]   int8 | bf16 | fp32
    V  [num_kv_heads, block_size, head_dim]
    K scales [num_kv_heads, block_size]       fp16, int8 only: one scale per token and KV head
    V scales [num_kv_heads, block_size]

Int8 keys are balanced and rotated first, as queries are (engine/models/int8_keys.py): attention scores stay the same.
Block b of a sequence lives in row b of every layer's region. What is stored is what travels between the pools. Other
attention has other rows (engine/latent_cache.py), and some a row for every sequence as well (engine/region_shape.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.region_shape import BlockParts, Per, RegionShape, row_bytes
from twinpool.errors import ConfigError

KV_DTYPES = {"int8": torch.int8, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape of every row of every layer's region."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens a row
    kv_dtype: str  # a key of KV_DTYPES

    @property
    def regions(self) -> tuple[RegionShape, ...]:
        head = self.head_dim * KV_DTYPES[self.kv_dtype].itemsize
        parts = BlockParts(
            tokens=self.block_size,
            num_heads=self.num_kv_heads,
            item_bytes=(head, head, 2, 2) if self.kv_dtype == "int8" else (head, head),
            is_shared=False,
        )
        return one_a_layer(self.num_layers, self.row_bytes, parts)

    @property
    def _plane_bytes(self) -> int:
        return self.num_kv_heads * self.block_size * self.head_dim * KV_DTYPES[self.kv_dtype].itemsize

    @property
    def _scale_bytes(self) -> int:
        return self.num_kv_heads * self.block_size * 2 if self.kv_dtype == "int8" else 0

    @property
    def row_bytes(self) -> int:
        return 2 * self._plane_bytes + 2 * self._scale_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes that one block of tokens takes over all layers."""
        return row_bytes(self.regions, "block")

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence takes over all layers, beside its blocks."""
        return 0

    def describe(self) -> str:
        """Everything two caches must agree on to exchange rows, as one line (part of the fingerprint).

        The block size is not: kvtransfer makes rows of one size from those of another.
        """
        return (
            f"layers={self.num_layers} kv_heads={self.num_kv_heads} head_dim={self.head_dim} "
            f"dtype={self.kv_dtype} order=head-major/v1"
            f"{' scales=token-head-fp16 keys=balanced-hadamard/v1' if self.kv_dtype == 'int8' else ''}"
        )

    def view(self, layer: int, buffers: Sequence[torch.Tensor]) -> KvView:
        """The layer's one buffer, uint8 [num_rows, row_bytes], seen as what it holds."""
        (buffer,) = buffers
        plane, scale = self._plane_bytes, self._scale_bytes
        shape = (self.num_kv_heads, self.block_size, self.head_dim)
        dtype = KV_DTYPES[self.kv_dtype]
        k = buffer[:, :plane].view(dtype).unflatten(1, shape)
        v = buffer[:, plane : 2 * plane].view(dtype).unflatten(1, shape)
        if not scale:
            return KvView(k=k, v=v, k_scale=None, v_scale=None)
        k_scale = buffer[:, 2 * plane : 2 * plane + scale].view(torch.float16).unflatten(1, shape[:2])
        v_scale = buffer[:, 2 * plane + scale :].view(torch.float16).unflatten(1, shape[:2])
        return KvView(k=k, v=v, k_scale=k_scale, v_scale=v_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvView:
    """One layer's region seen as tensors that share its memory.

    k, v: [num_rows, num_kv_heads, block_size, head_dim]; k_scale, v_scale: [num_rows, num_kv_heads, block_size] fp16,
    or None when the cache is not quantized.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @property
    def block_size(self) -> int:
        return self.k.shape[2]


class Layout(Protocol):
    """What rows are like, whatever attention they are for: KvLayout, or engine.latent_cache.LatentLayout.

    `regions` come in order of their layers; a layer may have several, or only one of sequences. `view` gives a model
    what one layer remembers, from the buffers of that layer's regions in order.
    """

    @property
    def num_layers(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def regions(self) -> tuple[RegionShape, ...]: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    def describe(self) -> str: ...
    def view(self, layer: int, buffers: Sequence[torch.Tensor]) -> Any: ...


def one_a_layer(num_layers: int, row_bytes: int, parts: BlockParts) -> tuple[RegionShape, ...]:
    """The simple case: every layer has one region, of blocks, and all are alike."""
    return tuple(
        RegionShape(name=f"layer.{layer}", layer=layer, per="block", row_bytes=row_bytes, parts=parts)
        for layer in range(num_layers)
    )


def division(layout: Layout, memory_bytes: int, max_sequences: int) -> tuple[int, int]:
    """Rows of blocks and rows of sequences that `memory_bytes` are divided into.

    A model that remembers something for every sequence gets a row for each of max_sequences, in half of the memory at
    most; the rest is blocks. Raises ConfigError when it does not hold one block and one sequence.
    """
    num_states = 0
    if layout.state_bytes:
        num_states = max(1, min(max_sequences, memory_bytes // 2 // layout.state_bytes))
    num_rows = (memory_bytes - num_states * layout.state_bytes) // layout.block_bytes
    if num_rows < 1:
        what = f"one block of {layout.block_size} tokens" + (" and the state of one sequence" if num_states else "")
        raise ConfigError(
            f"the cache memory holds not {what}: raise --memory to {layout.block_bytes + layout.state_bytes} bytes at "
            "least",
            field="memory",
        )
    return num_rows, num_states


Allocate = Callable[[int], memoryview]  # of so many writable, zeroed bytes, which live as long as they are looked at

_LINE_BYTES = 64  # of a processor's cache: no two regions share one


class KvCache:
    """All regions. `buffers[i]`: that of `regions[i]`, uint8 [rows, row_bytes]; `views[layer]`: a layer's, typed.

    A region of blocks has `num_rows` rows, one of sequences `num_states`.
    """

    def __init__(
        self,
        layout: Layout,
        num_rows: int,
        device: str = "cpu",
        *,
        num_states: int = 0,
        allocate: Allocate | None = None,
    ) -> None:
        """allocate: where host memory comes from, when not from torch."""
        if num_rows < 1 or (layout.state_bytes and num_states < 1):
            raise ValueError(f"a cache of {num_rows} blocks and the states of {num_states} sequences holds nothing")
        self.layout = layout
        self.num_rows = num_rows
        self.num_states = num_states if layout.state_bytes else 0
        self.regions = layout.regions
        shapes = [(num_rows if each.per == "block" else num_states, each.row_bytes) for each in self.regions]
        ends = [0]
        for rows, size in shapes:
            ends.append(ends[-1] + -(-rows * size // _LINE_BYTES) * _LINE_BYTES)
        try:
            if allocate is None:
                self.buffers = [torch.zeros(*shape, dtype=torch.uint8, device=device) for shape in shapes]
            else:
                whole = torch.frombuffer(allocate(ends[-1]), dtype=torch.uint8)
                self.buffers = [
                    whole[begin : begin + rows * size].view(rows, size)
                    for begin, (rows, size) in zip(ends, shapes, strict=False)
                ]
        except (RuntimeError, MemoryError) as exc:
            raise ConfigError(f"cannot allocate {ends[-1]} bytes of KV cache: lower --memory", field="memory") from exc
        self.views = [
            layout.view(layer, [self.buffers[i] for i, each in enumerate(self.regions) if each.layer == layer])
            for layer in range(layout.num_layers)
        ]

    @property
    def memory(self) -> list[memoryview]:
        """Of each region, as plain bytes."""
        return [buffer.numpy().data for buffer in self.buffers]

    def numbers(self, layer: int, per: Per) -> tuple[int, ...]:
        """Of the regions of that layer and kind, in `regions`."""
        return tuple(i for i, each in enumerate(self.regions) if each.layer == layer and each.per == per)

    @torch.inference_mode()
    def clear(self, per: Per, rows: Sequence[int]) -> None:
        """Nothing of whoever had these rows before is left in any region of that kind."""
        for buffer in self.buffers_of(per):
            buffer[rows] = 0

    def buffers_of(self, per: Per) -> list[torch.Tensor]:
        return [buffer for each, buffer in zip(self.regions, self.buffers, strict=True) if each.per == per]
