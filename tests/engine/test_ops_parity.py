"""The native kernels against the reference, and the reference against transformers and closed forms.

Every instruction set that this machine has is run.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from engine.kv_cache import KV_DTYPES, KvCache, KvLayout
from engine.ops import cpu, reference
from tests.engine.paged import paged

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("isa")  # on every instruction set


@pytest.fixture(autouse=True)
def _same_numbers_every_run() -> None:
    torch.manual_seed(7)


def assert_close(
    got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, result_dtype: torch.dtype | None = None
) -> None:
    """Within rounding of `dtype`, relative to the tensor's size: `exact` was computed in a wider type."""
    bound = (1e-5 if dtype == torch.float32 else 2**-7) * exact.abs().max().clamp(min=1e-3)
    assert got.dtype == (result_dtype or dtype)
    assert (got.to(exact.dtype) - exact).abs().max() <= bound


# ---- linear ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [(1, 576, 1536), (1, 1, 1), (2, 64, 63), (3, 33, 65), (7, 130, 192), (31, 1537, 100), (250, 96, 64), (0, 8, 8)],
)
def test_linear_equals_float64_product(dtype, bias, rows, in_features, out_features):
    x = torch.randn(rows, in_features).to(dtype)
    weight = torch.randn(out_features, in_features).to(dtype)
    b = torch.randn(out_features).to(dtype) if bias else None
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    got = cpu.linear(x, cpu.pack_linear(weight, b))
    assert got.shape == exact.shape
    if rows:
        assert_close(got, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_takes_strided_rows_and_transposed_weights(dtype):
    x, weight = torch.randn(5, 100).to(dtype), torch.randn(40, 70).to(dtype)
    got = cpu.linear(x[:, 10:50], cpu.pack_linear(weight.T, None))
    assert torch.equal(got, cpu.linear(x[:, 10:50].contiguous(), cpu.pack_linear(weight.T.contiguous(), None)))
    assert_close(got, x[:, 10:50].double() @ weight.double(), dtype)


# ---- norms, rope, activation ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 64, 100, 7])
def test_rms_norm_equals_transformers(dtype, width):
    x, weight = (3 * torch.randn(5, width)).to(dtype), torch.randn(width).to(dtype)
    oracle = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    oracle.weight.data.copy_(weight)
    want = oracle(x)
    assert torch.equal(reference.rms_norm(x, weight, 1e-5), want)
    assert_close(cpu.rms_norm(x, weight, 1e-5), want.double(), dtype)
    heads = x.view(5, 1, width)  # as a norm per head sees it
    assert torch.equal(cpu.rms_norm(heads, weight, 1e-5), cpu.rms_norm(x, weight, 1e-5).view(5, 1, width))


@pytest.mark.parametrize("width", [576, 33])
def test_rms_norm_with_weights_in_fp32_rounds_once_as_transformers_does(width):
    x, weight = (3 * torch.randn(5, width)).bfloat16(), torch.randn(width)
    oracle = DeepseekV4RMSNorm(width, eps=1e-5)
    oracle.weight.data.copy_(weight)
    want = oracle(x)
    assert want.dtype == torch.bfloat16
    assert torch.equal(reference.rms_norm(x, weight, 1e-5), want)
    assert_close(cpu.rms_norm(x, weight, 1e-5), want.double(), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_a_zero_row_is_zero(dtype):
    assert not cpu.rms_norm(torch.zeros(2, 48, dtype=dtype), torch.ones(48, dtype=dtype), 1e-6).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 33])
def test_add_rms_norm_equals_reference(dtype, width):
    x, residual, weight = (torch.randn(9, width).to(dtype) for _ in range(3))
    want, want_total = reference.add_rms_norm(x, residual.clone(), weight[0], 1e-5)
    got, total = cpu.add_rms_norm(x, residual, weight[0].contiguous(), 1e-5)
    assert torch.equal(total, want_total)
    assert_close(got, want.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 6])
def test_rope_equals_transformers_bit_for_bit(dtype, head_dim):
    tokens, num_heads, num_kv_heads = 11, 6, 2
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    q = qkv[:, : num_heads * head_dim].view(tokens, num_heads, head_dim)
    k = qkv[:, num_heads * head_dim : (num_heads + num_kv_heads) * head_dim].view(tokens, num_kv_heads, head_dim)
    angle = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    got = cpu.rope(q, k, angle.cos(), angle.sin())

    full = torch.cat((angle, angle), dim=-1)
    want = apply_rotary_pos_emb(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        full.cos()[None].to(dtype),
        full.sin()[None].to(dtype),
    )
    for x, y, z in zip(got, want, reference.rope(q, k, angle.cos(), angle.sin()), strict=True):
        assert torch.equal(x, y[0].transpose(0, 1))
        assert torch.equal(x, z)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 5])
def test_silu_mul_equals_the_formula(dtype, width):
    gate_up = (4 * torch.randn(6, 2 * width)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(cpu.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_is_right_at_the_ends(dtype):
    gate_up = torch.tensor([[-300.0, -90.0, -20.0, 0.0, 20.0, 90.0, 3e38, float("nan"), *[1.0] * 8]]).to(dtype)
    want = reference.silu_mul(gate_up.float())
    torch.testing.assert_close(cpu.silu_mul(gate_up).float(), want, rtol=1e-2, atol=1e-6, equal_nan=True)


# ---- the cache ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 16), (32, 64), (64, 128), (8, 80), (16, 6)])
def test_stored_rows_equal_the_reference_bit_for_bit(dtype, kv_dtype, block_size, head_dim):
    layout = KvLayout(num_layers=1, num_kv_heads=3, head_dim=head_dim, block_size=block_size, kv_dtype=kv_dtype)
    got, want = KvCache(layout, 5), KvCache(layout, 5)
    kv = torch.randn(37, 6, head_dim) * 10.0 ** torch.randint(-9, 5, (37, 6, 1))
    kv[3] = 0
    k, v = kv.to(dtype).chunk(2, dim=1)
    slots = torch.randperm(5 * block_size)[:37]
    cpu.store_kv(k[: len(slots)], v[: len(slots)], got.views[0], slots)
    reference.store_kv(k[: len(slots)], v[: len(slots)], want.views[0], slots)
    assert torch.equal(got.buffers[0], want.buffers[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_equal_the_reference_on_a_million_values(dtype):
    layout = KvLayout(num_layers=1, num_kv_heads=4, head_dim=64, block_size=64, kv_dtype="int8")
    got, want = KvCache(layout, 64), KvCache(layout, 64)
    k, v = (1.5 * torch.randn(2, 4096, 4, 64)).to(dtype)
    slots = torch.arange(4096)
    cpu.store_kv(k, v, got.views[0], slots)
    reference.store_kv(k, v, want.views[0], slots)
    assert torch.equal(got.buffers[0], want.buffers[0])


def test_codes_round_half_to_even_with_the_rounded_scale():
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=1, kv_dtype="int8")
    view = KvCache(layout, 1).views[0]
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 100.49]).view(1, 1, 8)  # the scale is exactly 1
    cpu.store_kv(x, x * 2, view, torch.tensor([0]))
    assert view.k.flatten().tolist() == [127, 0, 2, 2, 0, -2, -126, 100]
    assert torch.equal(view.v, view.k)
    assert (view.k_scale.item(), view.v_scale.item()) == (1.0, 2.0)


def test_values_beyond_fp16_scales_saturate():
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=1, kv_dtype="int8")
    got, want = KvCache(layout, 1), KvCache(layout, 1)
    x = torch.tensor([3e38, -3e38, 65504.0, float("inf")]).view(1, 1, 4)
    for ops, cache in ((cpu, got), (reference, want)):
        ops.store_kv(x, x, cache.views[0], torch.tensor([0]))
    assert torch.equal(got.buffers[0], want.buffers[0])
    assert got.views[0].k.flatten().tolist() == [127, -127, 1, 127]


def test_nan_is_kept_as_a_nan_scale():
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=32, block_size=1, kv_dtype="int8")
    view = KvCache(layout, 1).views[0]
    x = torch.randn(1, 1, 32)
    x[0, 0, 17] = float("nan")
    cpu.store_kv(x, x, view, torch.tensor([0]))
    assert view.k_scale.isnan().all()


# ---- attention ----


def assert_attention_equals_reference(case, dtype, query_start, context_lens, q):
    got = cpu.prefill_attention(q, case.view, case.block_tables, query_start, context_lens, case.scale)
    want = reference.prefill_attention(q.float(), case.view, case.block_tables, query_start, context_lens, case.scale)
    assert_close(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((9, 3), 64, 16), ((9, 3), 64, 64), ((4, 4), 16, 32), ((14, 2), 32, 16), ((8, 1), 128, 64), ((2, 2), 80, 32)],
)
def test_attention_equals_reference(dtype, kv_dtype, heads, head_dim, block_size):
    lengths = [1, 2, 63, 64, 65, 131]
    case = paged(lengths, dtype=dtype, kv_dtype=kv_dtype, block_size=block_size, heads=heads, head_dim=head_dim)
    q, starts = case.all_queries()
    assert_attention_equals_reference(case, dtype, starts, lengths, q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 7, 16, 128])
def test_attention_of_the_last_tokens_of_long_contexts_equals_reference(dtype, block_size):
    lengths, num_queries = [700, 3, 129], [33, 3, 1]
    case = paged(lengths, dtype=dtype, block_size=block_size, heads=(6, 2), head_dim=64)
    q = torch.cat([x[-n:] for x, n in zip(case.q, num_queries, strict=True)])
    assert_attention_equals_reference(case, dtype, [0, 33, 36, 37], lengths, q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0.0, 1e-20, 20.0, 1e6])
def test_attention_survives_scores_of_any_size(dtype, factor):
    case = paged([100], dtype=dtype, heads=(2, 1), head_dim=16)
    q = (case.q[0].double() * factor).to(dtype)
    got = cpu.prefill_attention(q, case.view, case.block_tables, [0, 100], [100], case.scale)
    want = reference.prefill_attention(q.double(), case.view, case.block_tables, [0, 100], [100], case.scale)
    # The scores themselves are only good to fp32: one of 10,000 is off by a thousandth.
    assert_close(got, want, torch.bfloat16 if factor > 1 else dtype, result_dtype=dtype)


def test_a_nan_in_the_visible_context_reaches_the_result():
    case = paged([80], dtype=torch.float32, kv_dtype="fp32", heads=(2, 2), head_dim=16, block_size=16)
    case.view.v[case.block_tables[0, 4].item(), 0, 6, 3] = float("nan")  # token 70 of KV head 0
    out = cpu.prefill_attention(case.q[0], case.view, case.block_tables, [0, 80], [80], case.scale).view(80, 2, 16)
    assert out[70:, 0, 3].isnan().all()
    assert out[70:, 0, 4:].isfinite().all()
    assert out[:, 1].isfinite().all()


# ---- wrong arguments ----


def test_arguments_that_do_not_fit_are_refused():
    packed = cpu.pack_linear(torch.randn(8, 4), None)
    with pytest.raises(ValueError, match=r"operator rms_norm: weight must be \[4\], not \[5\]"):
        cpu.rms_norm(torch.randn(2, 4), torch.randn(5), 1e-5)
    with pytest.raises(TypeError, match="operator linear: x must be bfloat16 or float32 on the CPU, not "):
        cpu.linear(torch.randn(2, 4).half(), packed)
    with pytest.raises(ValueError, match=r"operator pool_windows: .* must be \[2, 4, 5\]"):
        cpu.pool_windows(torch.zeros(2, 4, 5), torch.zeros(2, 4, 6))
    with pytest.raises(TypeError, match="bfloat16"):
        cpu.linear(torch.randn(2, 4, dtype=torch.bfloat16), packed)
    with pytest.raises(TypeError, match="float16"):
        cpu.silu_mul(torch.zeros(2, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"\[T, 4\]"):
        cpu.linear(torch.randn(2, 5), packed)
    with pytest.raises(ValueError, match="bias"):
        cpu.pack_linear(torch.randn(8, 4), torch.randn(4))
    case = paged([20], dtype=torch.float32)
    with pytest.raises(ValueError, match="query_start"):
        cpu.prefill_attention(case.q[0], case.view, case.block_tables, [0, 19], [20], case.scale)
    with pytest.raises(ValueError, match="does not fit"):
        cpu.prefill_attention(case.q[0], case.view, case.block_tables, [0, 20], [900], case.scale)
    with pytest.raises(ValueError, match="KV heads"):
        cpu.decode_attention(case.q[0][:1, :5], case.view, case.block_tables, [20], case.scale)
    with pytest.raises(ValueError, match="slots"):
        cpu.store_kv(torch.zeros(2, 2, 32), torch.zeros(2, 2, 32), case.view, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="threads"):
        cpu.set_num_threads(0)
