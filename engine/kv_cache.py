"""The paged KV cache: one region a layer, one row a block of tokens, allocated once at start.

A row holds, side by side and head-major, so that a scale can never be separated from the data it scales:

    K  [num_kv_heads, block_size, head_dim]   int8 | bf16 | fp32
    V  [num_kv_heads, block_size, head_dim]
    K scales [num_kv_heads, block_size]       fp16, int8 only: one scale per token and KV head
    V scales [num_kv_heads, block_size]

Int8 keys are balanced and rotated first, as queries are (engine/models/int8_keys.py): attention scores stay the same.
Block b of a sequence lives in row b of every layer's region. What is stored is what travels between the pools.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

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
    def is_shared(self) -> bool:
        """Whether a row belongs to all heads at once."""
        return False

    @property
    def item_bytes(self) -> tuple[int, ...]:
        """The planes of a row, in order: bytes for each KV head and token."""
        head = self.head_dim * KV_DTYPES[self.kv_dtype].itemsize
        return (head, head, 2, 2) if self.kv_dtype == "int8" else (head, head)

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
        return self.num_layers * self.row_bytes

    def describe(self) -> str:
        """Everything two caches must agree on to exchange rows, as one line (part of the fingerprint).

        The block size is not: kvtransfer makes rows of one size from those of another.
        """
        return (
            f"layers={self.num_layers} kv_heads={self.num_kv_heads} head_dim={self.head_dim} "
            f"dtype={self.kv_dtype} order=head-major/v1"
            f"{' scales=token-head-fp16 keys=balanced-hadamard/v1' if self.kv_dtype == 'int8' else ''}"
        )

    def view(self, buffer: torch.Tensor) -> KvView:
        """uint8 [num_rows, row_bytes] seen as what it holds."""
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
    """What rows are like, whatever attention they are for: KvLayout, or engine.latent_cache.LatentLayout."""

    @property
    def num_layers(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def is_shared(self) -> bool: ...
    @property
    def item_bytes(self) -> tuple[int, ...]: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    def describe(self) -> str: ...
    def view(self, buffer: torch.Tensor) -> Any: ...


Allocate = Callable[[int], memoryview]  # of so many writable, zeroed bytes, which live as long as they are looked at


class KvCache:
    """All layers' regions. `buffers[i]`: layer i's, uint8 [num_rows, row_bytes]; `views[i]`: the same memory, typed."""

    def __init__(self, layout: Layout, num_rows: int, device: str = "cpu", *, allocate: Allocate | None = None) -> None:
        """allocate: where host memory comes from, when not from torch."""
        if num_rows < 1:
            raise ConfigError(
                f"the cache memory holds not one block of {layout.block_size} tokens: raise --memory to "
                f"{layout.block_bytes} bytes at least"
            )
        self.layout = layout
        self.num_rows = num_rows
        try:
            if allocate is None:
                self.buffers = [
                    torch.zeros(num_rows, layout.row_bytes, dtype=torch.uint8, device=device)
                    for _ in range(layout.num_layers)
                ]
            else:
                whole = torch.frombuffer(allocate(num_rows * layout.block_bytes), dtype=torch.uint8)
                self.buffers = list(whole.view(layout.num_layers, num_rows, layout.row_bytes))
        except (RuntimeError, MemoryError) as exc:
            raise ConfigError(
                f"cannot allocate {num_rows * layout.block_bytes} bytes of KV cache: lower --memory"
            ) from exc
        self.views = [layout.view(buffer) for buffer in self.buffers]
