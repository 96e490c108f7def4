"""Attention over windows and entries, and streams of residuals: the native operators against the reference, those
against plain formulas, and every instruction set."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from engine.latent_cache import LatentView, item_bytes, view_items
from engine.ops import cpu, reference

DTYPES = [torch.float32, torch.bfloat16]
SPREAD = {torch.float32: 3e-5, torch.bfloat16: 0.04}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def entries(rank: int, rope_dim: int, kv_dtype: str, rows: int = 7, a_row: int = 8) -> LatentView:
    """Random entries in rows that lie apart, among bytes that are no numbers."""
    size = a_row * sum(item_bytes(rank, rope_dim, kv_dtype))
    buffer = torch.full((rows, size + 12), 0xFF, dtype=torch.uint8)
    view = view_items(buffer[:, 4 : 4 + size], a_row, rank, rope_dim, kv_dtype)
    count = (rows - 1) * a_row  # the last row stays what it is
    reference.store_latents(normal(count, rank, seed=1), normal(count, rope_dim, seed=2), view, torch.arange(count))
    return view


@pytest.mark.parametrize("rope_dim", [12, 0])
@pytest.mark.parametrize("kv_dtype", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_storing_writes_the_bytes_of_the_reference_and_no_others(
    isa: str, dtype: torch.dtype, kv_dtype: str, rope_dim: int
) -> None:
    """Latents of zeros, of one large number, and of numbers that int8 cannot hold apart are among them."""
    tokens, a_row, rank = 20, 8, 52
    both = torch.cat([normal(tokens, rank), normal(tokens, rope_dim, seed=1)], dim=1).to(dtype)
    both[3], both[4, 7], both[5] = 0, 7e4, both[5] * 1e-7
    size = a_row * sum(item_bytes(rank, rope_dim, kv_dtype))
    slots = torch.randperm(7 * a_row, generator=torch.Generator().manual_seed(0))[:tokens]
    buffers = []
    for backend in (cpu, reference):
        buffer = torch.full((7, size + 12), 0x5A, dtype=torch.uint8)
        view = view_items(buffer[:, 4 : 4 + size], a_row, rank, rope_dim, kv_dtype)
        backend.store_latents(both[:, :rank], both[:, rank:], view, slots)
        buffers.append(buffer)
    assert torch.equal(*buffers)


def attention_case(dtype: torch.dtype, kv_dtype: str, tokens: int = 9) -> tuple[torch.Tensor | LatentView | float, ...]:
    q, local = normal(tokens, 5, 72, seed=3).to(dtype), normal(300, 72, seed=4).to(dtype)
    spans = torch.tensor([[0, 1], [0, 64], [3, 70], [5, 133], [170, 298], [299, 300], [10, 30], [20, 149], [0, 128]])
    slots = torch.full((9, 40), -1, dtype=torch.int32)
    for token, count in enumerate((0, 1, 40, 7, 40, 33, 0, 12, 25)):
        chosen = torch.randperm(48, generator=torch.Generator().manual_seed(token))[:count]
        slots[token, :count] = chosen.sort().values.int()
    return q, local, spans[:tokens], entries(56, 16, kv_dtype), slots[:tokens], normal(5, seed=5), 72**-0.5


@pytest.mark.parametrize("kv_dtype", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_windows_and_entries_is_the_reference(isa: str, dtype: torch.dtype, kv_dtype: str) -> None:
    case = attention_case(dtype, kv_dtype)
    got, want = cpu.sparse_attn_sharedkv(*case), reference.sparse_attn_sharedkv(*case)
    assert got.isfinite().all()
    assert (got.float() - want.float()).abs().max() < SPREAD[dtype]


def test_attention_is_a_softmax_over_all_keys_and_a_sink_without_value() -> None:
    q, local, spans, view, slots, sinks, scale = attention_case(torch.float32, "fp32")
    got = reference.sparse_attn_sharedkv(q, local, spans, view, slots, sinks, scale)
    items = reference.gather_items(view, torch.arange(48), torch.float32)
    for token in range(9):
        keys = torch.cat((local[spans[token, 0] : spans[token, 1]], items[slots[token][slots[token] >= 0].long()]))
        for head in range(5):
            scores = (keys @ q[token, head] * scale).exp()
            expected = scores @ keys / (scores.sum() + sinks[head].exp())
            torch.testing.assert_close(got[token, head], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_attention_is_the_same_bits_wherever_its_keys_lie(isa: str, dtype: torch.dtype, kv_dtype: str) -> None:
    q, local, spans, view, slots, sinks, scale = attention_case(dtype, kv_dtype)
    together = cpu.sparse_attn_sharedkv(q, local, spans, view, slots, sinks, scale)
    for token in range(9):
        own = local[spans[token, 0] : spans[token, 1]].clone()
        chosen = slots[token : token + 1][:, slots[token] >= 0]
        at = torch.tensor([[0, len(own)]])
        alone = cpu.sparse_attn_sharedkv(q[token : token + 1], own, at, view, chosen, sinks, scale)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("kv_dtype", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_indexer_chooses_as_the_reference(isa: str, dtype: torch.dtype, kv_dtype: str) -> None:
    view = entries(32, 0, kv_dtype, rows=20)
    tables = torch.randperm(19, generator=torch.Generator().manual_seed(6))[:18].view(2, 9).int()
    q, weights = normal(6, 64, 32, seed=7).to(dtype), normal(6, 64, seed=8)
    visible = [3, 12, 72, 0, 13, 70]
    case = (q, weights, view, tables, [0, 2, 6], visible, 12)
    got, want = cpu.lightning_indexer(*case), reference.lightning_indexer(*case)
    assert got.dtype == torch.int32
    assert torch.equal(got, want)
    for token, row in enumerate(got):
        chosen = row[row >= 0].tolist()
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(12, visible[token])
        row = slice(token, token + 1)
        table = tables[:1] if token < 2 else tables[1:]
        alone = cpu.lightning_indexer(q[row], weights[row], view, table, [0, 1], [visible[token]], 12)
        assert alone[0].tolist() == chosen


def test_among_equals_the_indexer_takes_the_first() -> None:
    view = entries(32, 0, "fp32")
    for ops in (cpu, reference):
        chosen = ops.lightning_indexer(
            torch.zeros(1, 4, 32), torch.ones(1, 4), view, torch.arange(6).int()[None], [0, 1], [40], 5
        )
        assert chosen.tolist() == [[0, 1, 2, 3, 4]]


def test_pooled_windows_are_the_reference_and_a_softmax(isa: str) -> None:
    keys, gates = normal(5, 9, 37), normal(5, 9, 37, seed=1)
    gates[0, :4] = float("-inf")
    got = cpu.pool_windows(keys, gates)
    torch.testing.assert_close(got, (keys * gates.softmax(1)).sum(1))
    torch.testing.assert_close(got, reference.pool_windows(keys, gates))
    assert torch.equal(cpu.pool_windows(keys[3:4], gates[3:4])[0], got[3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_streams_are_mixed_as_in_transformers(isa: str, dtype: torch.dtype) -> None:
    config = DeepseekV4Config(hidden_size=52, hc_mult=4, num_hidden_layers=1)
    theirs, head = DeepseekV4HyperConnection(config), DeepseekV4HyperHead(config)
    for seed, parameter in enumerate((*theirs.parameters(), *head.parameters())):
        parameter.data = normal(*parameter.shape, seed=seed) * (0.05 if parameter.dim() == 2 else 1)
    x, y = normal(1, 7, 4, 52).to(dtype), normal(7, 52, seed=1).to(dtype)
    with torch.no_grad():
        post, comb, collapsed = theirs(x)
        merged = head(x)[0]
        mixed = post.unsqueeze(-1) * y.float().unsqueeze(-2) + comb.transpose(-1, -2) @ x.float()
        normed = theirs.input_norm(x.flatten(2).float())[0]
        mixes, head_mixes = normed @ theirs.fn.T, normed @ head.hc_fn.T
    streams = x[0]
    for ops in (cpu, reference):
        got = ops.hc_pre(streams, mixes, theirs.scale.data, theirs.base.data, 20, 1e-6)
        bound = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(got[0], collapsed[0], **bound)
        torch.testing.assert_close(got[1], post[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[2], comb[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ops.hc_post(y, streams, got[1], got[2]).float(), mixed[0].float(), **bound)
        got_merged = ops.hc_head(streams, head_mixes, head.hc_scale.data, head.hc_base.data, 1e-6)
        torch.testing.assert_close(got_merged, merged, **bound)
        assert (got[2].sum(1) - 1).abs().max() < 1e-4  # doubly stochastic
        assert (got[2].sum(2) - 1).abs().max() < 1e-4


def test_arguments_that_do_not_fit_are_refused() -> None:
    q, local, spans, view, slots, sinks, scale = attention_case(torch.float32, "fp32")
    with pytest.raises(ValueError, match="no keys of"):
        cpu.sparse_attn_sharedkv(q, local, spans, entries(32, 16, "fp32"), slots, sinks, scale)
    with pytest.raises(ValueError, match="slots need the view"):
        cpu.sparse_attn_sharedkv(q, local, spans, None, slots, sinks, scale)
    with pytest.raises(TypeError, match="sinks"):
        cpu.sparse_attn_sharedkv(q, local, spans, view, slots, sinks.bfloat16(), scale)
    with pytest.raises(ValueError, match="do not fit in 1 blocks"):
        cpu.lightning_indexer(
            torch.zeros(1, 4, 32), torch.ones(1, 4), entries(32, 0, "fp32"), torch.zeros(1, 1).int(), [0, 1], [9], 5
        )
