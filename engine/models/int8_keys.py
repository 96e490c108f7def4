"""Makes keys fit int8, by changes to queries and keys that leave every attention score what it is.

    q . k  =  (s q) . (k / s)  =  (H s q) . (H k / s)        for any diagonal s and orthogonal H

An int8 key has one scale a token and head, which its largest channel sets. Where some channels are far larger than the
rest (key biases of Qwen2 reach hundreds) nearly all of the range is spent on them. So, for int8 caches only:

1. balance: channel c of the keys is divided, and of the queries multiplied, by s_c = sqrt(rms k_c / rms q_c), which
   minimizes |k / s| |s q| and with it the error of a score. The rms come from the weights alone, as the inputs are
   normed. One s a rope pair, so that it commutes with rope; a power of two, so that folding it into weights is exact.
2. rotate: a Hadamard matrix after rope spreads what still stands out over all channels (QuaRot, arXiv 2404.00456).

bench/quality.py measures what it is worth.
"""

from __future__ import annotations

import torch

_LARGEST_EXPONENT = 12  # bounds s for channels that are (nearly) always zero


def balance_factors(query_rms: torch.Tensor, key_rms: torch.Tensor) -> torch.Tensor:
    """rms of channels before rope, fp64 [..., head_dim] -> s [..., head_dim], powers of two, equal in a rope pair."""
    exponents = (_pair_rms(key_rms) / _pair_rms(query_rms)).sqrt().log2().round()
    return torch.exp2(exponents.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT))


def projection_rms(weight: torch.Tensor, bias: torch.Tensor | None, input_norm: torch.Tensor) -> torch.Tensor:
    """Expected rms fp64 [out] of a projection of normed inputs: weight [out, in], bias [out], input_norm [in]."""
    rms = torch.linalg.vector_norm(weight.float() * input_norm.float(), dim=1, dtype=torch.float64)
    return rms if bias is None else torch.hypot(rms, bias.double())


def rotations(head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices [head_dim, head_dim] for queries and for keys whose product is the identity.

    Each is a Hadamard matrix (block by block where head_dim is no power of two) times a power of two, exact in `dtype`.
    """
    size = head_dim & -head_dim
    block = torch.ones(1, 1, dtype=dtype)
    while len(block) < size:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    matrix = torch.block_diag(*[block] * (head_dim // size))
    key_scale = 2.0 ** -((size.bit_length() - 1) // 2)  # 1 / sqrt(size), or the power of two next to it
    return matrix * (1 / (size * key_scale)), matrix * key_scale


def _pair_rms(rms: torch.Tensor) -> torch.Tensor:
    first, second = rms.clamp(min=1e-30).chunk(2, dim=-1)
    return torch.hypot(first, second).repeat(*[1] * (rms.dim() - 1), 2)
