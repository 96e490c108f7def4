"""Linear with int8 weights: the kernels against float64 products of the codes, and against torch's own int8 product."""

from __future__ import annotations

import pytest
import torch

from engine import quantization
from engine.ops import cpu, reference
from engine.quantization import W8A8, W8A16, quantize_rows

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("isa")  # on every instruction set
SHAPES = [(576, 1536), (1, 1), (2, 63), (33, 65), (130, 192), (1537, 100), (4864, 70), (96, 64)]  # in, out


@pytest.fixture(autouse=True)
def _same_numbers_every_run() -> None:
    torch.manual_seed(7)


def spread(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers with rows of very different size, as activations and weights have them."""
    return (torch.randn(rows, columns) * 10.0 ** torch.randint(-4, 4, (rows, 1))).to(dtype)


def exact_w8a16(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    codes, scales = quantize_rows(weight)
    return x.double() @ (codes.double() * scales.double().unsqueeze(1)).T + (0 if bias is None else bias.double())


def test_codes_and_scales_follow_the_formula():
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 63.0], [0.0] * 5, [1e-30, 0, 0, 0, -5e-31], [3e38, 1.0, -3e38, 0, 1e37]])
    codes, scales = quantize_rows(x)
    assert codes.tolist() == [[127, 0, 2, -2, 63], [0] * 5, [127, 0, 0, 0, -64], [127, 0, -127, 0, 4]]
    assert torch.equal(scales, x.abs().amax(1) / 127)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_codes_of_zero_and_a_scale_that_says_so(bad):
    codes, scales = quantize_rows(torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]]))
    assert not codes[0].any()
    assert scales.isfinite().tolist() == [False, True]


def test_rounding_costs_at_most_half_a_step():
    weight = spread(50, 300, torch.bfloat16)
    codes, scales = quantize_rows(weight)
    error = (codes * scales.unsqueeze(1) - weight.float()).abs()
    assert (error <= 0.5001 * scales.unsqueeze(1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_w8a16_equals_the_float64_product_with_the_codes(dtype, bias, in_features, out_features):
    weight = spread(out_features, in_features, dtype)
    b = torch.randn(out_features).to(dtype) if bias else None
    packed, plain = cpu.pack_linear(weight, b, W8A16), reference.pack_linear(weight, b, W8A16)
    for rows in (0, 1, 2, 3, 7, 65):
        x = spread(rows, in_features, dtype)
        exact = exact_w8a16(x, weight, b)
        # A sum is good to the rounding of its largest terms.
        size = x.double().abs() @ weight.double().abs().T + 1e-30
        bound = (1e-5 if dtype == torch.float32 else 2**-7) * (size + exact.abs())
        for got in (cpu.linear(x, packed), reference.linear(x, plain)):
            assert got.dtype == dtype
            assert got.shape == exact.shape
            assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_w8a8_equals_the_reference_bit_for_bit(dtype, bias, in_features, out_features):
    """Sums are exact, so there is one right answer; the reference's come from torch's own int8 product."""
    weight = spread(out_features, in_features, dtype)
    b = torch.randn(out_features).to(dtype) if bias else None
    packed, plain = cpu.pack_linear(weight, b, W8A8), reference.pack_linear(weight, b, W8A8)
    for rows in (0, 1, 2, 5, 6, 7, 13, 65, 250):
        x = spread(rows, in_features, dtype)
        assert torch.equal(cpu.linear(x, packed), reference.linear(x, plain)), rows


def test_w8a8_is_near_the_product_that_it_stands_for():
    weight, x = torch.randn(200, 576), torch.randn(30, 576)
    got = cpu.linear(x, cpu.pack_linear(weight, None, W8A8))
    exact = x.double() @ weight.double().T
    assert (got - exact).norm() / exact.norm() < 0.02


def test_w8a8_sums_at_the_ends_of_the_codes_are_exact():
    """All codes at 127 or -127 over as many inputs as int32 holds for sure: sums up to 2 ** 30."""
    in_features = 66_000
    signs = torch.tensor([1.0, -1.0]).repeat(in_features // 2)
    weight, x = torch.stack((signs, torch.ones(in_features))), torch.stack((signs, -signs, torch.ones(in_features)))
    got = cpu.linear(x, cpu.pack_linear(weight, None, W8A8))
    want = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]) * in_features
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_w8a16_keeps_sixteen_bits_of_an_activation():
    """Beside an input 1,000 times as large the others still count, where 8 bits would lose them."""
    x = torch.cat((torch.full((1, 1), 1000.0), torch.randn(1, 575)), 1).bfloat16()
    weight = torch.randn(256, 576).bfloat16()
    weight[:, 0] = 0
    exact = exact_w8a16(x, weight, None)
    w8a16, w8a8 = (cpu.linear(x, cpu.pack_linear(weight, None, weights)) for weights in (W8A16, W8A8))
    assert (w8a16.double() - exact).norm() / exact.norm() < 0.01
    assert (w8a8.double() - exact).norm() / exact.norm() > 0.5


@pytest.mark.parametrize("weights", [W8A16, W8A8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_give_the_bias(weights, dtype):
    bias = torch.randn(70).to(dtype)
    weight = torch.randn(70, 50).to(dtype)
    weight[3] = 0
    packed = cpu.pack_linear(weight, bias, weights)
    assert torch.equal(cpu.linear(torch.zeros(4, 50, dtype=dtype), packed), bias.expand(4, -1))
    assert torch.equal(cpu.linear(torch.randn(4, 50).to(dtype), packed)[:, 3], bias[3].expand(4))


@pytest.mark.parametrize("weights", [W8A16, W8A8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_their_own_row_only(weights, dtype, bad):
    weight, x = torch.randn(70, 50).to(dtype), torch.randn(9, 50).to(dtype)
    packed = cpu.pack_linear(weight, None, weights)
    clean = cpu.linear(x, packed)
    x[4, 17] = bad
    got = cpu.linear(x, packed)
    assert not got[4].isfinite().any()
    assert torch.equal(torch.cat((got[:4], got[5:])), torch.cat((clean[:4], clean[5:])))


@pytest.mark.parametrize("weights", [W8A16, W8A8])
@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_extreme_sizes_keep_their_relative_error(weights, factor):
    weight, x = torch.randn(40, 64), torch.randn(5, 64)
    got = cpu.linear(x * factor, cpu.pack_linear(weight, None, weights))
    want = cpu.linear(x, cpu.pack_linear(weight, None, weights)) * factor
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * factor)


@pytest.mark.parametrize("weights", [W8A16, W8A8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 200), (1537, 64), (2500, 70)])
def test_rows_do_not_depend_on_the_batch_or_the_threads(weights, dtype, in_features, out_features):
    x = torch.randn(300, in_features).to(dtype)
    packed = cpu.pack_linear(
        torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype), weights
    )
    alone = torch.cat([cpu.linear(row[None], packed) for row in x])
    for num_rows in [*range(1, 66), 239, 240, 241, 300]:
        cpu.set_num_threads(1 + num_rows % 3)
        rows = torch.randperm(300)[:num_rows]
        assert torch.equal(cpu.linear(x[rows], packed), alone[rows])
    cpu.set_num_threads(1)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="bf16, w8a16, w8a8"):
        cpu.pack_linear(torch.randn(8, 4), None, "int4")
    with pytest.raises(ValueError, match="exact"):
        cpu.pack_linear(torch.zeros(1, 70_000), None, W8A8)
    assert quantization.WEIGHT_FORMATS == ("bf16", "w8a16", "w8a8")
