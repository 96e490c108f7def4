"""Makes weights and inputs of linear layers fit int8, by a change of basis that leaves every result what it is.

    x . w  =  (x Q) . (w Q)        for any orthogonal Q

An int8 weight has one scale an output channel and int8 activations one a token, each set by the largest input channel.
Where a few channels are far larger than the rest nearly all of the range is spent on them. In another basis their size
is spread over all channels (QuaRot, arXiv 2404.00456):

1. the stream of residuals: the table of embeddings, and all that writes to the stream, is turned by Q, and all that
   reads from it turned back. Norms between must have no weights for that: they go into the matrices that read. It costs
   nothing at run time.
2. what goes into the down projection is the product of two functions of the stream, so it is turned when it has been
   computed, by a small Hadamard matrix block by block.
"""

from __future__ import annotations

import functools
import math

import torch

Projection = tuple[torch.Tensor, torch.Tensor | None]  # weight [out, in], bias [out]

MOST_GATED = 64  # the largest block that the down projection's inputs are turned in


def hadamard(size: int, most: int) -> torch.Tensor:
    """Orthogonal and symmetric, fp32 [n, n], for the largest power of two n up to `most` that divides `size`."""
    power = min(size & -size, most)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < power:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / math.sqrt(power)).float()


def residual_basis(size: int) -> torch.Tensor:
    """Q fp32 [size, size]: a cosine transform over what is left of `size` without its power of two, and a Hadamard
    matrix over that. No entry stands out."""
    cosine, *hadamards = (factor.double() for factor in _factors(size))
    return functools.reduce(torch.kron, hadamards, cosine).float()


def turn(x: torch.Tensor) -> torch.Tensor:
    """x [..., size] in fp32 times Q, factor by factor: for 7168 channels a hundredth of the whole product."""
    factors = _factors(x.shape[-1])
    turned = x.float().unflatten(-1, tuple(len(factor) for factor in factors))
    for place, factor in enumerate(factors):
        axis = place - len(factors)
        turned = (turned.movedim(axis, -1) @ factor).movedim(-1, axis)
    return turned.flatten(-len(factors))


@functools.cache
def _factors(size: int) -> tuple[torch.Tensor, ...]:
    """Small matrices, fp32, whose Kronecker product is Q."""
    power = size & -size
    odd, half = size // power, 1 << (power.bit_length() // 2)
    index = torch.arange(odd, dtype=torch.float64)
    cosine = torch.cos(math.pi / odd * (index.unsqueeze(1) + 0.5) * index) * math.sqrt(2 / odd)
    cosine[:, 0] /= math.sqrt(2)
    return cosine.float(), hadamard(half, half), hadamard(power // half, power // half)


def read_turned(projection: Projection, norm: torch.Tensor) -> Projection:
    """A projection of norm(x) as one of the turned x, normed without weights."""
    weight, bias = projection
    return turn(weight.float() * norm.float()).to(weight.dtype), bias


def read_rotated(projection: Projection) -> Projection:
    """The down projection for inputs that `hadamard(in, MOST_GATED)` was applied to, block by block."""
    weight, bias = projection
    matrix = hadamard(weight.shape[1], MOST_GATED)
    return (weight.float().unflatten(1, (-1, len(matrix))) @ matrix).flatten(1).to(weight.dtype), bias


def write_turned(projection: Projection) -> Projection:
    """A projection whose outputs are turned."""
    weight, bias = projection
    return turn(weight.T).T.to(weight.dtype).contiguous(), None if bias is None else turn(bias).to(bias.dtype)
