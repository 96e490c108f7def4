"""NaN passes through every native operator, to its own row and no other; zeros and rows of every number do no harm."""

from __future__ import annotations

import pytest
import torch

from engine.latent_cache import LatentLayout
from engine.ops import cpu, reference
from engine.quantization import WEIGHT_FORMATS
from tests.engine.paged import paged

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("isa")  # on every instruction set
NAN, BAD = float("nan"), 4  # the row that is not finite


@pytest.fixture(autouse=True)
def _same_numbers_every_run() -> None:
    torch.manual_seed(7)


def others(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[:BAD], x[BAD + 1 :]))


def assert_only_one_row_is_lost(got: torch.Tensor, clean: torch.Tensor) -> None:
    assert not got[BAD].isfinite().any()
    assert others(got).isfinite().all()
    assert torch.equal(others(got), others(clean))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 17, 49])  # 49: behind the last whole vector
@pytest.mark.parametrize("rows", [5, 40])
def test_linear(dtype: torch.dtype, column: int, rows: int) -> None:
    x, packed = torch.randn(rows, 50).to(dtype), cpu.pack_linear(torch.randn(70, 50).to(dtype), None)
    clean = cpu.linear(x, packed)
    x[BAD, column] = NAN
    assert_only_one_row_is_lost(cpu.linear(x, packed), clean)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_over_batches_of_1_to_65_is_the_product(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(67, 97).to(dtype), torch.randn(67).to(dtype)
    packed, x = cpu.pack_linear(weight, bias), torch.randn(65, 97).to(dtype)
    x[1], x[2] = 0, x[2] * 1e18
    exact = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + 1
    for rows in range(1, 66):
        error = (cpu.linear(x[:rows], packed).double() - exact[:rows]).abs()
        assert (error <= (1e-5 if dtype is torch.float32 else 2**-7) * size[:rows]).all(), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 17, 32])
def test_norms(dtype: torch.dtype, column: int) -> None:
    x, residual, weight = torch.randn(9, 33).to(dtype), torch.randn(9, 33).to(dtype), torch.ones(33, dtype=dtype)
    clean, (added, total) = cpu.rms_norm(x, weight, 1e-5), cpu.add_rms_norm(x, residual.clone(), weight, 1e-5)
    x[BAD, column] = NAN
    assert_only_one_row_is_lost(cpu.rms_norm(x, weight, 1e-5), clean)
    got, got_total = cpu.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert_only_one_row_is_lost(got, added)
    assert got_total[BAD].isnan().nonzero().flatten().tolist() == [column]
    assert torch.equal(others(got_total), others(total))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_activation_lose_the_element_and_its_partner(dtype: torch.dtype) -> None:
    x, angle = torch.randn(9, 2, 34).to(dtype), torch.randn(9, 17)
    x[BAD, 1, 16] = NAN
    for got in cpu.rope(x, x, angle.cos(), angle.sin()):
        assert got.isnan().nonzero().tolist() == [[BAD, 1, 16], [BAD, 1, 33]]
    gate_up = torch.randn(9, 34).to(dtype)
    gate_up[BAD, 16], gate_up[BAD, 17] = NAN, NAN  # the last gate, the first up
    assert cpu.silu_mul(gate_up).isnan().nonzero().tolist() == [[BAD, 0], [BAD, 16]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
def test_attention(dtype: torch.dtype, kv_dtype: str) -> None:
    """A query, or a cached token, that is no number: who sees it is none either, and nobody else."""
    lengths = [9, 65, 70]
    case = paged(lengths, dtype=dtype, kv_dtype=kv_dtype, heads=(4, 2), head_dim=16)
    last = torch.stack([q[-1] for q in case.q])
    clean = cpu.decode_attention(last, case.view, case.block_tables, lengths, case.scale)
    last[1] = NAN
    got = cpu.decode_attention(last, case.view, case.block_tables, lengths, case.scale)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    row, slot = case.block_tables[2, 4].item(), 69 % 16
    bad = torch.full((1, 2, 16), NAN, dtype=dtype)
    cpu.store_kv(bad, bad, case.view, torch.tensor([row * 16 + slot]))
    last[1] = case.q[1][-1]
    got = cpu.decode_attention(last, case.view, case.block_tables, lengths, case.scale)
    assert got[2].isnan().all()
    assert torch.equal(got[:2], clean[:2])
    before = cpu.prefill_attention(case.q[2], case.view, case.block_tables[2:], [0, 70], [70], case.scale)
    assert before[:64].isfinite().all()  # the next five have weights of zero for it, and zero times NaN is NaN
    assert before[69].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
def test_latent_attention(dtype: torch.dtype, kv_dtype: str) -> None:
    layout = LatentLayout(num_layers=1, rank=36, rope_dim=12, block_size=16, kv_dtype=kv_dtype)
    view = layout.view(0, [torch.zeros(10, layout.row_bytes, dtype=torch.uint8)])
    cached, slots = torch.randn(80, 48).to(dtype), torch.arange(80)
    table, q = torch.arange(5).int()[None].repeat(2, 1), torch.randn(2, 3, 48).to(dtype)
    case = (table, [0, 1, 2], [70, 69], 48**-0.5)
    cpu.store_latents(cached[:, :36], cached[:, 36:], view, slots)
    clean = cpu.latent_attention(q, view, *case)
    cached[69, :36] = NAN  # the last token of the first sequence, which the second does not see
    cpu.store_latents(cached[:, :36], cached[:, 36:], view, slots)
    got = cpu.latent_attention(q, view, *case)
    assert got[0].isnan().all()
    assert torch.equal(got[1], clean[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_experts(dtype: torch.dtype, weights: str) -> None:
    gate_up, down = torch.randn(6, 40, 48).to(dtype) / 7, torch.randn(6, 48, 20).to(dtype) / 4
    experts = cpu.pack_experts(*([cpu.pack_linear(each, None, weights) for each in kind] for kind in (gate_up, down)))
    x, (w, chosen) = torch.randn(33, 48).to(dtype), reference.moe_gating_top_k(torch.randn(33, 6), 2)
    clean = cpu.moe_experts(x, experts, w, chosen)
    x[BAD, 47] = NAN
    assert_only_one_row_is_lost(cpu.moe_experts(x, experts, w, chosen), clean)
    assert not cpu.moe_experts(torch.zeros(3, 48, dtype=dtype), experts, w[:3], chosen[:3]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_a_window_and_entries(dtype: torch.dtype) -> None:
    q, local = torch.randn(9, 5, 44).to(dtype), torch.randn(40, 44).to(dtype)
    spans = torch.stack((torch.arange(9), torch.arange(9) + 20), dim=1)
    slots, sinks = torch.full((9, 0), -1, dtype=torch.int32), torch.randn(5)
    clean = cpu.sparse_attn_sharedkv(q, local, spans, None, slots, sinks, 0.2)
    q[BAD] = NAN
    assert_only_one_row_is_lost(cpu.sparse_attn_sharedkv(q, local, spans, None, slots, sinks, 0.2), clean)
    local[27] = NAN  # the last token's own
    got = cpu.sparse_attn_sharedkv(q, local, spans, None, slots, sinks, 0.2)
    assert got[8].isnan().all()
    assert torch.equal(got[:BAD], clean[:BAD])


@pytest.mark.parametrize("dtype", DTYPES)
def test_streams_and_pooling(dtype: torch.dtype) -> None:
    x, y = torch.randn(9, 4, 52).to(dtype), torch.randn(9, 52).to(dtype)
    mixes, scale, base = torch.randn(9, 24), torch.ones(3), torch.randn(24)
    clean, post, comb = cpu.hc_pre(x, mixes, scale, base, 20, 1e-6)
    mixed, merged = cpu.hc_post(y, x, post, comb), cpu.hc_head(x, mixes[:, :4].contiguous(), scale[:1], base[:4], 1e-6)
    x[BAD] = NAN
    assert_only_one_row_is_lost(cpu.hc_pre(x, mixes, scale, base, 20, 1e-6)[0], clean)
    assert_only_one_row_is_lost(cpu.hc_post(y, x, post, comb), mixed)
    assert_only_one_row_is_lost(cpu.hc_head(x, mixes[:, :4].contiguous(), scale[:1], base[:4], 1e-6), merged)
    mixes[BAD] = NAN
    for got in cpu.hc_pre(others(x), others(mixes), scale, base, 20, 1e-6):
        assert got.isfinite().all()
    for got in cpu.hc_pre(x, mixes, scale, base, 20, 1e-6):
        assert got[BAD].isnan().all()
    keys, gates = torch.randn(9, 5, 37), torch.randn(9, 5, 37)
    pooled = cpu.pool_windows(keys, gates)
    gates[BAD, 2] = NAN
    assert_only_one_row_is_lost(cpu.pool_windows(keys, gates), pooled)
