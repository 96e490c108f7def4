"""Latent attention (MLA): keys and values of all heads are projections of one latent a token, which is what is cached.

Two forms compute the same, but for rounding:

- plain: latents are projected to every head's keys and values (`kv_b`), then attention is as usual. Least arithmetic
  where many queries share the projected tokens: prefill.
- absorbed: the projection of the keys goes to the queries and that of the values to the sums, so that all heads attend
  to the latents themselves. Reads least: decode.

Each gives a row the same bits whatever shares the batch and however a prompt is cut; one form from end to end gives
the same bits from prefill and from decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from engine.batch import Batch
from engine.kv_cache import KvView
from engine.latent_cache import LatentView
from engine.latent_config import LatentConfig
from engine.models.int8_weights import Projection
from engine.models.projections import Reader
from engine.rope import halves_order

FORMS = ("absorbed", "plain")
_NORM_EPS = 1e-6  # of the norms of latents, whatever the config says for the others
_MOST_HEADS = 16  # whose keys and values are held at a time in the plain form


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """One layer's. Either key_up and value_up (absorbed), one matrix a head, or kv_b (plain), one for some heads."""

    latent: LatentConfig
    num_heads: int
    norm_eps: float  # of the norms of latents
    ops: ModuleType
    q_a: Any  # None: q_b projects at once
    q_a_norm: torch.Tensor | None
    q_b: Any
    kv_a: Any
    kv_a_norm: torch.Tensor
    key_up: Any  # q without rope [nope_dim] -> [kv_rank]
    value_up: Any  # [kv_rank] -> [v_dim]
    kv_b: Sequence[Any]
    output: Any

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        view: LatentView,
        stored: Callable[[], None],
    ) -> torch.Tensor:
        """x [T, hidden] normed -> [T, hidden]. `stored` is called as soon as the cache holds the batch's latents."""
        ops, latent = self.ops, self.latent
        reduced = x if self.q_a is None else ops.rms_norm(ops.linear(x, self.q_a), self.q_a_norm, self.norm_eps)
        q = ops.linear(reduced, self.q_b).view(len(x), self.num_heads, latent.qk_dim)
        q_nope, q_rope = q.split((latent.nope_dim, latent.rope_dim), dim=2)
        latents, k_rope = ops.linear(x, self.kv_a).split((latent.kv_rank, latent.rope_dim), dim=1)
        latents = ops.rms_norm(latents, self.kv_a_norm, self.norm_eps)
        q_rope, k_rope = ops.rope(q_rope, k_rope.unsqueeze(1), cos, sin)
        ops.store_latents(latents, k_rope.squeeze(1), view, batch.slots)
        stored()
        attend = self._attend_plain if self.kv_b else self._attend_absorbed
        return ops.linear(attend(q_nope, q_rope, view, batch).flatten(1), self.output)

    @property
    def packed(self) -> tuple[Any, ...]:
        every = (self.q_a, self.q_b, self.kv_a, self.key_up, self.value_up, *self.kv_b, self.output)
        return tuple(each for each in every if each is not None)

    def _attend_absorbed(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, view: LatentView, batch: Batch
    ) -> torch.Tensor:
        """[T, heads, v_dim]"""
        q = torch.cat((self.ops.grouped_linear(q_nope, self.key_up), q_rope), dim=2)
        sums = self.ops.latent_attention(
            q, view, batch.block_tables, batch.query_start, batch.context_lens, self.latent.scale
        )
        return self.ops.grouped_linear(sums, self.value_up)

    def _attend_plain(self, q_nope: torch.Tensor, q_rope: torch.Tensor, view: LatentView, batch: Batch) -> torch.Tensor:
        """[T, heads, v_dim]"""
        q = torch.cat((q_nope, q_rope), dim=2)
        out = torch.empty(*q.shape[:2], self.latent.v_dim, dtype=q.dtype)
        for s, length in enumerate(batch.context_lens):
            rows = slice(batch.query_start[s], batch.query_start[s + 1])
            block_ids = batch.block_tables[s, : -(-length // view.block_size)].long()
            cached = self.ops.gather_latents(view, block_ids, q.dtype).flatten(0, 1)[:length]
            for group, kv_b in enumerate(self.kv_b):
                heads = slice(group * _MOST_HEADS, min((group + 1) * _MOST_HEADS, self.num_heads))
                out[rows, heads] = self._attend_projected(q[rows, heads], cached, kv_b)
        return out

    def _attend_projected(self, q: torch.Tensor, cached: torch.Tensor, kv_b: Any) -> torch.Tensor:
        """Queries [n, heads, qk_dim] of one sequence over its tokens [length, kv_rank + rope_dim]."""
        latent, (count, num_heads, _), length = self.latent, q.shape, len(cached)
        projected = self.ops.linear(cached[:, : latent.kv_rank], kv_b).view(length, num_heads, -1).transpose(0, 1)
        width = max(latent.qk_dim, latent.v_dim)  # keys and values of one width, as the operator wants them
        k, v = torch.zeros(2, 1, num_heads, length, width, dtype=q.dtype)
        k[0, ..., : latent.nope_dim], v[0, ..., : latent.v_dim] = projected.split(
            (latent.nope_dim, latent.v_dim), dim=2
        )
        k[0, ..., latent.nope_dim : latent.qk_dim] = cached[:, latent.kv_rank :]
        q = F.pad(q, (0, width - latent.qk_dim))
        as_block = KvView(k=k, v=v, k_scale=None, v_scale=None)
        table = torch.zeros(1, 1, dtype=torch.int32)
        attended = self.ops.prefill_attention(q, as_block, table, [0, count], [length], latent.scale)
        return attended.view(count, num_heads, width)[..., : latent.v_dim]


def read_latent_attention(
    reader: Reader, name: str, input_norm: torch.Tensor, form: str
) -> tuple[LatentAttention, torch.Tensor]:
    """The attention, and the weights of the norm before it as they then are. form: one of FORMS."""
    config, latent, ops = reader.config, reader.config.latent, reader.ops
    assert latent is not None
    hidden, heads, has_bias = config.hidden_size, config.num_heads, config.qkv_bias
    queries = heads * latent.qk_dim
    kv_a = reader.projection(f"{name}.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, hidden, has_bias)
    kv_a = _halves(kv_a, latent.kv_rank, latent)
    q_a_norm = None
    if latent.q_rank is None:
        q_b = _halves(reader.projection(f"{name}.q_proj", queries, hidden), latent.nope_dim, latent)
        q_b, kv_a, input_norm = reader.reading(input_norm, q_b, kv_a)
        q_a = None
    else:
        q_a = reader.projection(f"{name}.q_a_proj", latent.q_rank, hidden, has_bias)
        q_a, kv_a, input_norm = reader.reading(input_norm, q_a, kv_a)
        q_a, q_a_norm = reader.pack(q_a), reader.norm(f"{name}.q_a_layernorm", latent.q_rank)
        q_b = reader.projection(f"{name}.q_b_proj", queries, latent.q_rank)
        q_b = _halves(q_b, latent.nope_dim, latent)
    kv_b, _ = reader.projection(f"{name}.kv_b_proj", heads * (latent.nope_dim + latent.v_dim), latent.kv_rank)
    up = kv_b.view(heads, -1, latent.kv_rank)
    key_up = value_up = None
    parts: list[Any] = []
    if form == "absorbed":
        keys, values = up.split((latent.nope_dim, latent.v_dim), dim=1)
        key_up = ops.pack_groups([ops.pack_linear(each.T.contiguous(), None) for each in keys])
        value_up = ops.pack_groups([ops.pack_linear(each.contiguous(), None) for each in values])
    else:
        parts = [ops.pack_linear(some.flatten(0, 1), None) for some in up.split(_MOST_HEADS)]
    attention = LatentAttention(
        latent=latent,
        num_heads=heads,
        norm_eps=_NORM_EPS,
        ops=ops,
        q_a=q_a,
        q_a_norm=q_a_norm,
        q_b=reader.pack(q_b),
        kv_a=reader.pack(kv_a),
        kv_a_norm=reader.norm(f"{name}.kv_a_layernorm", latent.kv_rank),
        key_up=key_up,
        value_up=value_up,
        kv_b=parts,
        output=reader.pack(
            reader.writing(reader.projection(f"{name}.o_proj", hidden, heads * latent.v_dim, config.o_bias))
        ),
    )
    return attention, input_norm


def _halves(projection: Projection, before: int, latent: LatentConfig) -> Projection:
    """Orders the outputs that rope turns, which in each head follow `before` others, for rope over halves."""
    if not latent.interleaved:
        return projection
    weight, bias = projection
    rows = halves_order(len(weight), before + latent.rope_dim, latent.rope_dim)
    return weight[rows], None if bias is None else bias[rows]
