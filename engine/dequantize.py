"""Weights of quantized checkpoints as what their codes and scales stand for. Everything is dequantized at load.

- fp8 e4m3 with one scale a square block of 128: `X.weight_scale_inv` (DeepSeek-V3) or `X.scale` (DeepSeek-V4, whose
  scales are powers of two, e8m0). Either is what the codes are multiplied with.
- MXFP4 (OCP Microscaling Formats 1.0): two e2m1 codes a byte, the low half first, with one e8m0 scale every 32 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FP8_BLOCK = 128  # rows and columns that share a scale
MXFP4_BLOCK = 32  # columns that share a scale
SCALE_DTYPES = {"F32", "BF16", "F16", "F8_E8M0"}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp8_scales_shape(shape: Sequence[int]) -> list[int]:
    return [-(-size // FP8_BLOCK) for size in shape]


def from_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes float8_e4m3fn [rows, columns], scales [blocks of rows, blocks of columns] -> fp32."""
    rows, columns = (torch.arange(size) // FP8_BLOCK for size in codes.shape)
    return codes.float() * scales.float()[rows][:, columns]


def mxfp4_shapes(shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of the bytes and of the scales of a matrix [rows, columns]."""
    rows, columns = shape
    return [rows, columns // 2], [rows, columns // MXFP4_BLOCK]


def from_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes 8-bit integers [rows, columns / 2], scales [rows, columns / 32] -> fp32 [rows, columns]."""
    values = torch.tensor([*_E2M1, *(-each for each in _E2M1)])
    packed = codes.view(torch.uint8).int()
    pairs = torch.stack((values[packed & 15], values[packed >> 4]), dim=-1).flatten(1)
    return (pairs.unflatten(1, (-1, MXFP4_BLOCK)) * scales.float().unsqueeze(-1)).flatten(1)
