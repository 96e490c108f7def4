"""Linear layers in plain torch: part of the specification, beside reference.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.quantization import AS_LOADED, W8A8, quantize_rows
from engine.sampling import NOT_DRAWN, Draw, draw_token


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight as this backend wants it: weight [out, in] and bias [out] or None, in the model's dtype.

    In the int8 formats weight holds codes, and scales [out] fp32 what they are multiplied with.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None = None
    quantize_inputs: bool = False  # w8a8

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def num_elements(self) -> int:
        """Products of one row."""
        return self.weight.numel()

    @property
    def nbytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return sum(x.nbytes for x in (self.weight, self.scales, self.bias) if x is not None)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, weights: str = AS_LOADED) -> Linear:
    """Prepares a weight [out, in] once at load, in one of WEIGHT_FORMATS; only good for this backend's `linear`."""
    if weights == AS_LOADED:
        return Linear(weight.contiguous(), bias)
    codes, scales = quantize_rows(weight)
    return Linear(codes, bias, scales, weights == W8A8)


def linear(x: torch.Tensor, packed: Linear) -> torch.Tensor:
    """x [T, in] -> [T, out] in x's dtype. int8 by int8 has exact sums; a row of x that is not finite gives NaN."""
    if packed.scales is None:
        return F.linear(x, packed.weight, packed.bias)
    if packed.quantize_inputs:
        codes, row_scales = quantize_rows(x)
        sums = torch._int_mm(codes, packed.weight.T).float() if len(x) else x.new_zeros(0, len(packed.weight)).float()
        out = sums * row_scales.unsqueeze(1) * packed.scales
    else:
        out = F.linear(x.float(), packed.weight.float()) * packed.scales
    return (out if packed.bias is None else out + packed.bias.float()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """The output layer and the choice of the next tokens."""

    head: Linear

    def tokens(
        self, hidden: torch.Tensor, draws: Sequence[Draw | None], sources: Sequence[int]
    ) -> tuple[list[int], torch.Tensor]:
        """hidden [n, hidden]; draws[i] is from row sources[i] of it -> its token, NOT_DRAWN without a draw, -1 for
        logits that are not finite; and the logits [n, vocab]."""
        logits = linear(hidden, self.head)
        tokens = [
            NOT_DRAWN if draw is None else draw_token(logits[source], draw)
            for draw, source in zip(draws, sources, strict=True)
        ]
        return tokens, logits
