"""Attention over a window and compressed entries (DeepSeek-V4) in plain torch: the specification of these operators.

Names follow those of Ascend's operators for the same model, as far as there are such.
"""

from __future__ import annotations

import torch

from engine.latent_cache import LatentView
from engine.ops.reference_latent import gather_items, gather_latents

_MOST_ELEMENTS = 1 << 24  # of keys that are copied at a time


def pool_windows(keys: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """keys, gates fp32 [N, M, D] -> [N, D]: for each channel the mean of M keys, weighted by the softmax of M gates.

    A gate of -inf leaves its key out. Sums run over M in order.
    """
    weights = (gates - gates.amax(1, keepdim=True)).exp()
    total, norm = keys[:, 0] * weights[:, 0], weights[:, 0]
    for slot in range(1, keys.shape[1]):
        total, norm = total + keys[:, slot] * weights[:, slot], norm + weights[:, slot]
    return total / norm


def lightning_indexer(
    q: torch.Tensor,
    weights: torch.Tensor,
    view: LatentView,
    block_tables: torch.Tensor,
    query_start: list[int],
    visible: list[int],
    k: int,
) -> torch.Tensor:
    """Which entries each token attends to: int32 [T, k'], ascending, then -1; k' = min(k, most of `visible`).

    q [T, N, D]: queries of N heads, in the model's dtype; weights fp32 [T, N]; view: index entries of rank D, no rope;
    block_tables int32 [S, max_blocks]; sequence s owns queries query_start[s] : query_start[s + 1]; visible: of each
    token, how many entries of its sequence it may choose among, the first ones. A token that sees at most k gets all;
    else those k for which the sum over heads of weight * relu(query . entry) is largest, among equals the first.
    """
    count = min(k, max(visible, default=0))
    chosen = torch.full((len(q), count), -1, dtype=torch.int32)
    places = torch.arange(count, dtype=torch.int32)
    for s in range(len(query_start) - 1):
        rows = range(query_start[s], query_start[s + 1])
        if not rows:
            continue
        for t in rows:
            chosen[t, : min(visible[t], count)] = places[: visible[t]]
        choosing = [t for t in rows if visible[t] > k]
        if not choosing:
            continue
        num_blocks = -(-max(visible[t] for t in choosing) // view.block_size)
        keys = gather_latents(view, block_tables[s, :num_blocks].long(), q.dtype).flatten(0, 1).float()
        for t in choosing:
            products = (q[t].float() @ keys[: visible[t]].T).relu()
            scores = (products * weights[t].unsqueeze(1)).sum(0)
            best = scores.argsort(descending=True, stable=True)[:k]
            chosen[t] = best.sort().values.int()
    return chosen


def sparse_attn_sharedkv(
    q: torch.Tensor,
    local: torch.Tensor,
    spans: torch.Tensor,
    view: LatentView | None,
    slots: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of every token over keys of its window and over chosen entries, all heads over the same: [T, H, D].

    q [T, H, D]; local [R, D] in q's dtype: keys of the windows, which are their values as well; spans int64 [T, 2]:
    token t attends to local[spans[t, 0] : spans[t, 1]] and to the entries at slots int32 [T, K] (row * block_size +
    place in `view`; -1: none, behind all others). sinks fp32 [H]: a score that takes part in the softmax and has no
    value.
    """
    tokens, _, dim = q.shape
    out = torch.empty_like(q)
    width = int((spans[:, 1] - spans[:, 0]).max()) if tokens else 0
    at_once = max(1, _MOST_ELEMENTS // ((width + slots.shape[1]) * dim))
    for begin in range(0, tokens, at_once):
        rows = slice(begin, begin + at_once)
        index = spans[rows, :1] + torch.arange(width)
        hidden = index >= spans[rows, 1:]
        keys = local[index.clamp(max=len(local) - 1)]
        if view is not None and slots.shape[1]:
            absent = slots[rows] < 0
            found = slots[rows].clamp(min=0).long()
            items = gather_items(view, found, q.dtype)
            keys, hidden = torch.cat((keys, items), dim=1), torch.cat((hidden, absent), dim=1)
        scores = torch.einsum("thd,tkd->thk", q[rows].float(), keys.float()) * scale
        scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
        sink = sinks.view(1, -1, 1).expand(len(scores), -1, 1)
        weights = torch.cat((scores, sink), dim=2).softmax(-1)[..., :-1]
        out[rows] = torch.einsum("thk,tkd->thd", weights, keys.float()).to(q.dtype)
    return out
