"""Several streams of residuals, mixed token by token (manifold-constrained hyper-connections, arXiv 2512.24880).

Every sum has a fixed order and no operation here looks at more than one token, so backends may share these.
"""

from __future__ import annotations

import torch


def hc_pre(
    x: torch.Tensor, mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a block reads of n streams, and how its output and the streams become the next streams.

    x [T, n, H]; mixes fp32 [T, n * (2 + n)]: projections of the normed streams; scale fp32 [3] and base fp32
    [n * (2 + n)] turn them into weights of reading, of writing, and into a matrix, which `iterations` steps of
    Sinkhorn and Knopp make doubly stochastic. Returns the input [T, H] in x's dtype, post fp32 [T, n] and
    comb fp32 [T, n, n].
    """
    n = x.shape[1]
    pre, post, comb = mixes.split((n, n, n * n), dim=1)
    pre_base, post_base, comb_base = base.split((n, n, n * n))
    pre = (pre * scale[0] + pre_base).sigmoid() + eps
    post = 2 * (post * scale[1] + post_base).sigmoid()
    comb = (comb * scale[2] + comb_base).unflatten(1, (n, n))
    comb = (comb - comb.amax(2, keepdim=True)).exp()
    comb = comb / _row_sums(comb) + eps
    comb = comb / (_column_sums(comb) + eps)
    for _ in range(iterations - 1):
        comb = comb / (_row_sums(comb) + eps)
        comb = comb / (_column_sums(comb) + eps)
    return _weighted(x, pre).to(x.dtype), post, comb


def hc_post(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """A block's output y [T, H] and the streams x [T, n, H] that it read from -> the next streams [T, n, H]:
    stream j is post[j] * y + sum over k of comb[k, j] * x[k]."""
    y32, x32 = y.float(), x.float()
    streams = []
    for j in range(x.shape[1]):
        total = post[:, j : j + 1] * y32
        for k in range(x.shape[1]):
            total = total + comb[:, k, j].unsqueeze(1) * x32[:, k]
        streams.append(total.to(x.dtype))
    return torch.stack(streams, dim=1)


def hc_head(x: torch.Tensor, mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float) -> torch.Tensor:
    """The streams x [T, n, H] as one, [T, H]: mixes fp32 [T, n], scale fp32 [1], base fp32 [n]."""
    return _weighted(x, (mixes * scale + base).sigmoid() + eps).to(x.dtype)


def _weighted(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """fp32 [T, H]: the sum over n of weights [T, n] times x [T, n, H]."""
    total = weights[:, :1] * x[:, 0].float()
    for k in range(1, x.shape[1]):
        total = total + weights[:, k : k + 1] * x[:, k].float()
    return total


def _row_sums(x: torch.Tensor) -> torch.Tensor:
    total = x[:, :, :1]
    for k in range(1, x.shape[2]):
        total = total + x[:, :, k : k + 1]
    return total


def _column_sums(x: torch.Tensor) -> torch.Tensor:
    total = x[:, :1]
    for k in range(1, x.shape[1]):
        total = total + x[:, k : k + 1]
    return total
