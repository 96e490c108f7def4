"""Attention of DeepSeek-V4: over the keys of a window, and over entries that stand for several tokens each.

One key a token, which is its value as well, for all heads. Since values are turned by rope as keys are, what attention
returns is turned back. Layers of three kinds (engine/compressed_config.py): over the window alone; over all entries as
well; or over those that an indexer of its own chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from engine.compressed_cache import CompressedView, Unfinished
from engine.compressed_config import HEAVY, SPARSE, WINDOW, CompressedConfig
from engine.latent_cache import LatentView
from engine.models.compressed_step import Entries, Step
from engine.models.int8_weights import Projection, hadamard
from engine.models.projections import Reader
from engine.rope import halves_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """Makes one entry of `rate` tokens, or of as many and those before them where windows overlap."""

    ops: ModuleType
    overlaps: bool
    rope_dim: int
    keys_gates: Any  # a linear in fp32 to keys | gates, each of width (2 *) dim
    bias: torch.Tensor  # fp32 [rate, width], of the gates
    norm: torch.Tensor  # [dim] fp32
    eps: float

    def forward(self, x: torch.Tensor, entries: Entries, unfinished: Unfinished) -> torch.Tensor:
        """x fp32 [T, hidden] normed: the entries that are whole now, fp32 [N, dim], turned; `unfinished` takes the
        rest."""
        computed = self.ops.linear(x, self.keys_gates).unflatten(1, (2, -1))
        made = torch.empty(0, len(self.norm))
        if len(entries.slots):
            made = self._entries(computed, entries, unfinished)
        unfinished.sums[entries.kept_to[:, 0], entries.kept_to[:, 1]] = computed[entries.kept]
        return made

    def _entries(self, computed: torch.Tensor, entries: Entries, unfinished: Unfinished) -> torch.Tensor:
        count, rate, dim = len(entries.slots), entries.rate, len(self.norm)
        tokens = torch.empty(count * rate, *computed.shape[1:])
        tokens[entries.read_to] = unfinished.sums[entries.read[:, 0], entries.read[:, 1]]
        tokens[entries.own_to] = computed[entries.own]
        tokens = tokens.unflatten(0, (count, rate))
        keys, gates = tokens[:, :, 0], tokens[:, :, 1]
        gates = gates + self.bias
        if self.overlaps:
            overlap = unfinished.overlap
            assert overlap is not None
            # The first halves are for the entry that follows.
            before = tokens[..., :dim][entries.follows.clamp(min=0)]
            kept = entries.follows == -1
            before[kept] = overlap[entries.rows[kept]]
            before_gates = before[:, :, 1] + self.bias[:, :dim]
            before_gates[entries.follows == -2] = float("-inf")
            overlap[entries.rows[entries.last]] = tokens[entries.last][..., :dim]
            before_keys = before[:, :, 0]
            before_keys[entries.follows == -2] = 0
            keys = torch.cat((before_keys, keys[..., dim:]), dim=1)
            gates = torch.cat((before_gates, gates[..., dim:]), dim=1)
        made = self.ops.rms_norm(self.ops.pool_windows(keys, gates), self.norm, self.eps)
        _turn(self.ops, made.unsqueeze(1), self.rope_dim, entries.cos, entries.sin)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Chooses the entries that a token attends to, by small entries of its own."""

    ops: ModuleType
    num_heads: int
    top_k: int
    rope_dim: int
    compressor: Compressor
    q_b: Any
    weights: Any  # a linear in fp32 to a weight a head, scaled already
    turning: Any  # a linear that spreads every element over all, for int8 entries; None for others

    def forward(self, x: torch.Tensor, reduced_q: torch.Tensor, step: Step, view: CompressedView) -> torch.Tensor:
        """x fp32 [T, hidden] normed, reduced_q [T, q_rank] -> int32 [T, k]: entries, then -1."""
        assert view.index is not None
        assert view.index_unfinished is not None
        ops, entries = self.ops, step.entries[SPARSE]
        made = self.compressor.forward(x, entries, view.index_unfinished).to(reduced_q.dtype)
        q = ops.linear(reduced_q, self.q_b).view(len(x), self.num_heads, -1)
        _turn(ops, q, self.rope_dim, *step.turned)
        if self.turning is not None:
            made, q = ops.linear(made, self.turning), ops.linear(q.flatten(0, 1), self.turning).view(q.shape)
        if len(made):
            ops.store_latents(made, made[:, :0], view.index, entries.slots)
        return ops.lightning_indexer(
            q,
            ops.linear(x, self.weights),
            view.index,
            step.batch.block_tables,
            step.batch.query_start,
            entries.visible,
            self.top_k,
        )

    @property
    def packed(self) -> tuple[Any, ...]:
        return self.compressor.keys_gates, self.q_b, self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention:
    """One layer's. compressor: None over the window alone; indexer: None where all entries are attended to."""

    kind: str
    compressed: CompressedConfig
    num_heads: int
    eps: float
    ops: ModuleType
    q_a: Any
    q_a_norm: torch.Tensor
    q_b: Any
    q_norm: torch.Tensor  # ones [head_dim]: the norm of queries has no weights
    kv: Any
    kv_norm: torch.Tensor
    sinks: torch.Tensor  # fp32 [heads]
    compressor: Compressor | None
    indexer: Indexer | None
    output_groups: Any
    output: Any

    def forward(self, x: torch.Tensor, step: Step, view: CompressedView, stored: Callable[[], None]) -> torch.Tensor:
        """x [T, hidden] normed -> [T, hidden]. `stored` is called as soon as the cache holds what the step brings."""
        ops, rope_dim = self.ops, self.compressed.rope_dim
        cos, sin = step.plain if self.kind == WINDOW else step.turned
        reduced_q = ops.rms_norm(ops.linear(x, self.q_a), self.q_a_norm, self.eps)
        q = ops.linear(reduced_q, self.q_b).view(len(x), self.num_heads, -1)
        q = ops.rms_norm(q, self.q_norm, self.eps)
        _turn(ops, q, rope_dim, cos, sin)
        keys = ops.rms_norm(ops.linear(x, self.kv), self.kv_norm, self.eps)
        _turn(ops, keys.unsqueeze(1), rope_dim, cos, sin)

        local = self._store_keys(keys, step, view.window)
        slots = torch.zeros(len(x), 0, dtype=torch.int32)
        if self.compressor is not None:
            assert view.entries is not None
            assert view.unfinished is not None
            entries = step.entries[self.kind]
            precise = x.float()
            made = self.compressor.forward(precise, entries, view.unfinished).to(x.dtype)
            if len(made):
                ops.store_latents(*_split(made, rope_dim), view.entries, entries.slots)
            slots = entries.all_slots
            if self.indexer is not None:
                chosen = self.indexer.forward(precise, reduced_q, step, view)
                slots = _slots(chosen, step, view.entries.block_size)
        stored()
        attended = ops.sparse_attn_sharedkv(
            q, local, step.windows.spans, view.entries, slots, self.sinks, self.compressed.head_dim**-0.5
        )
        _turn(ops, attended, rope_dim, cos, -sin)
        grouped = ops.grouped_linear(attended.view(len(x), self.compressed.output_groups, -1), self.output_groups)
        return ops.linear(grouped.flatten(1), self.output)

    def _store_keys(self, keys: torch.Tensor, step: Step, window: LatentView) -> torch.Tensor:
        """Keeps the newest keys in the windows; returns all that the step attends to, as the windows hold them."""
        ops, windows, rope_dim = self.ops, step.windows, self.compressed.rope_dim
        local = torch.empty(len(windows.read) + len(keys), keys.shape[1], dtype=keys.dtype)
        local[windows.read_to] = ops.gather_items(window, windows.read, keys.dtype)
        local[windows.own_to] = ops.as_stored(*_split(keys, rope_dim), window)
        ops.store_latents(*_split(keys[windows.kept], rope_dim), window, windows.kept_to)
        return local

    @property
    def packed(self) -> tuple[Any, ...]:
        every = [self.q_a, self.q_b, self.kv, self.output_groups, self.output]
        if self.compressor is not None:
            every.append(self.compressor.keys_gates)
        return (*every, *(self.indexer.packed if self.indexer is not None else ()))


def read_compressed_attention(
    reader: Reader, name: str, input_norm: torch.Tensor, kind: str
) -> tuple[CompressedAttention, torch.Tensor]:
    """The attention, and the weights of the norm before it as they then are."""
    config, compressed, ops = reader.config, reader.config.compressed, reader.ops
    assert compressed is not None
    hidden, heads, q_rank = config.hidden_size, config.num_heads, compressed.q_rank
    dim, rope_dim, groups = compressed.head_dim, compressed.rope_dim, compressed.output_groups
    queries, eps = heads * dim, config.rms_norm_eps
    q_a, kv = reader.projection(f"{name}.q_a_proj", q_rank, hidden), reader.projection(f"{name}.kv_proj", dim, hidden)
    q_a, kv, norm = reader.reading(input_norm, q_a, _halves(kv, dim, rope_dim))
    q_b = _halves(reader.projection(f"{name}.q_b_proj", queries, q_rank), dim, rope_dim)
    out = reader.checkpoint.take(
        f"{name}.o_a_proj.weight", (groups * compressed.output_rank, queries // groups), reader.dtype
    )[:, halves_order(queries // groups, dim, rope_dim)]
    compressor = indexer = None
    if kind != WINDOW:
        compressor = _read_compressor(reader, f"{name}.compressor", input_norm, kind, dim)
    if kind == SPARSE:
        indexer = _read_indexer(reader, f"{name}.compressor.indexer", input_norm)
    attention = CompressedAttention(
        kind=kind,
        compressed=compressed,
        num_heads=heads,
        eps=eps,
        ops=ops,
        q_a=reader.pack(q_a),
        q_a_norm=reader.norm(f"{name}.q_a_norm", q_rank, torch.float32),
        q_b=reader.pack(q_b),
        q_norm=torch.ones(dim, dtype=reader.dtype),
        kv=reader.pack(kv),
        kv_norm=reader.norm(f"{name}.kv_norm", dim, torch.float32)[halves_order(dim, dim, rope_dim)],
        sinks=reader.checkpoint.take(f"{name}.sinks", (heads,), torch.float32),
        compressor=compressor,
        indexer=indexer,
        output_groups=ops.pack_groups([ops.pack_linear(part.contiguous(), None) for part in out.chunk(groups)]),
        output=reader.pack(
            reader.writing(reader.projection(f"{name}.o_b_proj", hidden, groups * compressed.output_rank))
        ),
    )
    return attention, norm


def _read_compressor(reader: Reader, name: str, input_norm: torch.Tensor, kind: str, dim: int) -> Compressor:
    """In fp32 throughout: entries are sums over many tokens, and there is little to read."""
    config, compressed = reader.config, reader.config.compressed
    assert compressed is not None
    rope_dim, width = compressed.rope_dim, dim if kind == HEAVY else 2 * dim
    parts = [
        _halves(reader.projection(f"{name}.{part}_proj", width, config.hidden_size, dtype=torch.float32), dim, rope_dim)
        for part in ("kv", "gate")
    ]
    keys, gates, _ = reader.reading(input_norm.float(), *parts)
    bias = reader.checkpoint.take(f"{name}.position_bias", (compressed.rate(kind), width), torch.float32)
    norm = reader.checkpoint.take(f"{name}.kv_norm.weight", (dim,), torch.float32)
    return Compressor(
        ops=reader.ops,
        overlaps=kind == SPARSE,
        rope_dim=rope_dim,
        keys_gates=reader.ops.pack_linear(torch.cat((keys[0], gates[0])), None),
        bias=bias[:, halves_order(width, dim, rope_dim)],
        norm=norm[halves_order(dim, dim, rope_dim)],
        eps=config.rms_norm_eps,
    )


def _read_indexer(reader: Reader, name: str, input_norm: torch.Tensor) -> Indexer:
    config, compressed, ops = reader.config, reader.config.compressed, reader.ops
    assert compressed is not None
    heads, dim, rope_dim = compressed.index_heads, compressed.index_dim, compressed.rope_dim
    q_b = reader.projection(f"{name}.q_b_proj", heads * dim, compressed.q_rank)
    weights = reader.projection(f"{name}.scorer.weights_proj", heads, config.hidden_size, dtype=torch.float32)
    weights, _ = reader.reading(input_norm.float(), weights)
    turning = None
    if reader.int8_cache:
        turning = ops.pack_linear(hadamard(dim, dim).to(reader.dtype), None)
    return Indexer(
        ops=ops,
        num_heads=heads,
        top_k=compressed.index_top_k,
        rope_dim=rope_dim,
        compressor=_read_compressor(reader, name, input_norm, SPARSE, dim),
        q_b=reader.pack(_halves(q_b, dim, rope_dim)),
        weights=ops.pack_linear(weights[0] * (heads * dim) ** -0.5, None),
        turning=turning,
    )


def _halves(projection: Projection, dim: int, rope_dim: int) -> Projection:
    weight, bias = projection
    return weight[halves_order(len(weight), dim, rope_dim)], bias


def _split(x: torch.Tensor, rope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:, :-rope_dim], x[:, -rope_dim:]


def _turn(ops: ModuleType, x: torch.Tensor, rope_dim: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rope over the last rope_dim elements of x [T, N, D], in place."""
    part = x[..., -rope_dim:]
    part.copy_(ops.rope(part, part[:, :0], cos, sin)[0])


def _slots(chosen: torch.Tensor, step: Step, a_row: int) -> torch.Tensor:
    """Where the chosen entries lie: int32 [T, k], then -1. a_row: entries a row holds."""
    index = chosen.clamp(min=0).long()
    rows = step.batch.block_tables[step.sequence_of.unsqueeze(1), index // a_row]
    return torch.where(chosen < 0, -1, rows * a_row + index.int() % a_row)
