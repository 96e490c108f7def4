"""Changes of basis that make linear layers fit int8 leave every result what it is, and spread what stands out."""

from __future__ import annotations

import pytest
import torch

from engine.models.int8_weights import (
    MOST_GATED,
    hadamard,
    read_rotated,
    read_turned,
    residual_basis,
    turn,
    write_turned,
)
from engine.ops import reference
from engine.quantization import quantize_rows


@pytest.fixture(autouse=True)
def _same_numbers_every_run() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("size", [1, 2, 48, 63, 64, 576, 896])
def test_the_basis_is_orthogonal_and_no_entry_stands_out(size):
    basis = residual_basis(size).double()
    torch.testing.assert_close(basis @ basis.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-5)
    assert basis.abs().max() <= 1.42 / size**0.5


@pytest.mark.parametrize("size", [1, 2, 48, 63, 64, 576, 896])
def test_turning_factor_by_factor_is_multiplying_with_the_basis(size):
    x = torch.randn(3, 5, size)
    torch.testing.assert_close(turn(x), x @ residual_basis(size), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "rows"), [(1536, 64), (4864, 64), (96, 32), (7, 1)])
def test_the_rotation_of_gated_values_is_its_own_inverse(size, rows):
    matrix = hadamard(size, MOST_GATED)
    assert matrix.shape == (rows, rows)
    torch.testing.assert_close(matrix @ matrix, torch.eye(rows))
    assert torch.equal(matrix, matrix.T)


def test_reading_from_the_turned_stream_equals_reading_from_the_stream():
    x, norm = torch.randn(5, 96), torch.rand(96) + 0.5
    weight, bias = torch.randn(40, 96), torch.randn(40)
    basis = residual_basis(96)
    turned, same_bias = read_turned((weight, bias), norm)
    want = torch.nn.functional.linear(reference.rms_norm(x, norm, 1e-6), weight, bias)
    got = torch.nn.functional.linear(reference.rms_norm(x @ basis, torch.ones(96), 1e-6), turned, same_bias)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_is_written_is_turned():
    x, weight, bias = torch.randn(5, 40), torch.randn(96, 40), torch.randn(96)
    basis = residual_basis(96)
    want = torch.nn.functional.linear(x, weight, bias) @ basis
    torch.testing.assert_close(torch.nn.functional.linear(x, *write_turned((weight, bias))), want)


def test_the_down_projection_undoes_the_rotation_of_its_inputs():
    x, weight = torch.randn(5, 192), torch.randn(30, 192)
    matrix = hadamard(192, MOST_GATED)
    rotated = (x.view(-1, 64) @ matrix).view(5, 192)
    torch.testing.assert_close(rotated @ read_rotated((weight, None))[0].T, x @ weight.T, rtol=1e-4, atol=1e-4)


def test_a_channel_that_stands_out_costs_less_in_the_turned_basis():
    x = torch.randn(200, 576)
    x[:, 7] *= 100

    def error(values: torch.Tensor) -> float:
        codes, scales = quantize_rows(values)
        return float((codes * scales.unsqueeze(1) - values).norm())

    assert error(x @ residual_basis(576)) < 0.2 * error(x)
