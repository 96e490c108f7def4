"""From logits to tokens: penalties, temperature, filters, the draw, logprobs, and whether the choice is finished.

The order is transformers': repetition, presence and frequency penalties, min_tokens, temperature, top_k, top_p, min_p.
Every row is treated on its own, so its token does not depend on who shares the batch, and the draw depends only on
(seed, choice, position in the answer): a request that moves to another worker goes on with the same tokens.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twinpool.errors import Internal
from twinpool.sampling import FinishReason, SamplingParams

NOT_DRAWN = -2  # in place of a token, where the output layer was not asked for one
_NOT_FINITE = "the model returned logits that are not finite: its weights or dtype are broken"
TOP_P_CANDIDATES = 1024  # looked at first: a nucleus is rarely larger, and sorting a whole vocabulary is slow


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Whose next token a row of logits is. The token ids are only read during the call."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token; with logprobs asked for, its natural-log probability and the likeliest alternatives, best first."""

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    finish_reason: FinishReason = FinishReason.NONE


@dataclass(frozen=True, slots=True)
class Draw:
    """How a token is drawn from a row of logits on which no history bears: what an output layer does by itself.

    top_k 0: of all tokens; point: in [0, 1), where in the cumulative distribution the token lies.
    """

    temperature: float = 0.0  # 0: the likeliest, the first of equals
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    point: float = 0.0


_LIKELIEST = Draw()


def plain_draw(row: SampleRow) -> Draw | None:
    """The draw of a row without penalties, logprobs and forbidden tokens; None: its logits have to be seen here."""
    params = row.params
    if _has_penalties(params) or params.logprobs is not None or len(row.output_token_ids) < params.min_tokens:
        return None
    if params.temperature == 0:
        return _LIKELIEST
    point = uniform(params.seed, row.choice, len(row.output_token_ids))
    return Draw(params.temperature, params.top_k, params.top_p, params.min_p, point)


def draw_token(logits: torch.Tensor, draw: Draw) -> int:
    """In plain torch: the token of a row of logits [vocab], -1 where the largest is not finite."""
    logits = logits.float()
    best, index = logits.max(dim=-1)
    if not math.isfinite(best):
        return -1
    return int(index) if draw.temperature == 0 else _at_point(*_filtered(logits, draw), draw.point)


def complete(
    logits: torch.Tensor,
    tokens: Sequence[int],
    rows: Sequence[SampleRow],
    sources: Sequence[int],
    *,
    eos_token_ids: Sequence[int],
    max_context: int,
) -> list[Sampled]:
    """What is known of the next tokens: those that an output layer has drawn, and the others from their logits.

    logits: [n, vocab], of which rows[i] has the row sources[i]; tokens: drawn by draw_token's rules, of no meaning
    where plain_draw(row) is None. Raises Internal for logits with NaN.
    """
    sampled = []
    for row, token_id, source in zip(rows, tokens, sources, strict=True):
        if token_id == NOT_DRAWN:
            sampled += sample(
                logits[source : source + 1].float(), [row], eos_token_ids=eos_token_ids, max_context=max_context
            )
        elif token_id < 0:
            raise Internal(_NOT_FINITE)
        else:
            reason = _finish_reason(row, token_id, eos_token_ids, max_context)
            sampled.append(Sampled(token_id, None, None, reason))
    return sampled


def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], *, eos_token_ids: Sequence[int], max_context: int
) -> list[Sampled]:
    """The next token of every row of `logits` [n, vocab] fp32, which is left as it is.

    Logprobs are of the model's own distribution, before penalties and filters. Raises Internal for logits with NaN.
    """
    best_logits, best_ids = logits.max(dim=-1)
    if not torch.isfinite(best_logits).all():
        raise Internal(_NOT_FINITE)
    best = best_ids.tolist()
    sampled = []
    for i, row in enumerate(rows):
        token_id = best[i] if _takes_best(row) else _draw(logits[i], row, eos_token_ids)
        logprob, top = _logprobs(logits[i], token_id, row.params.logprobs)
        sampled.append(Sampled(token_id, logprob, top, _finish_reason(row, token_id, eos_token_ids, max_context)))
    return sampled


def prompt_logprobs(logits: torch.Tensor, next_token_ids: Sequence[int], top_n: int) -> list[Sampled]:
    """What the model thought of given tokens: logits[i] [n, vocab] fp32 predicts next_token_ids[i].

    The first token of a prompt has no prediction, so n is one less than the tokens of the prompt; long prompts are
    best done in pieces, as logits take 4 bytes a vocabulary entry.
    """
    return [
        Sampled(token_id, *_logprobs(row, token_id, top_n))
        for row, token_id in zip(logits, next_token_ids, strict=True)
    ]


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on the three alone (53 bits of BLAKE2b)."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def distribution(
    logits: torch.Tensor, row: SampleRow, eos_token_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `sample` draws from at a temperature over 0: (token ids int64 [m], probabilities fp64 [m], sum 1)."""
    return _filtered(_filtered_by_history(logits, row, eos_token_ids), row.params)


def _filtered(logits: torch.Tensor, params: SamplingParams | Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """By temperature, top_k, top_p and min_p: ids and probabilities, as `distribution`."""
    scores = (logits - logits.max()) / params.temperature  # the largest is 0: a tiny temperature cannot overflow
    token_ids, weights = _top_k_top_p(scores, params.top_k, params.top_p)
    if params.min_p > 0:
        kept = weights >= params.min_p * weights.max()
        token_ids, weights = token_ids[kept], weights[kept]
    return token_ids, weights / weights.sum()


def _takes_best(row: SampleRow) -> bool:
    """Whether the token is simply the likeliest: the common case, done for the whole batch at once."""
    params = row.params
    return params.temperature == 0 and not _has_penalties(params) and len(row.output_token_ids) >= params.min_tokens


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _draw(logits: torch.Tensor, row: SampleRow, eos_token_ids: Sequence[int]) -> int:
    if row.params.temperature == 0:
        return int(_filtered_by_history(logits, row, eos_token_ids).argmax())
    token_ids, probabilities = distribution(logits, row, eos_token_ids)
    point = uniform(row.params.seed, row.choice, len(row.output_token_ids))
    return _at_point(token_ids, probabilities, point)


def _at_point(token_ids: torch.Tensor, probabilities: torch.Tensor, point: float) -> int:
    cumulative = probabilities.cumsum(0)
    # right=True: the first entry whose cumulative sum exceeds the point, so an entry of probability 0 is never chosen
    index = int(torch.searchsorted(cumulative, point * cumulative[-1], right=True))
    return int(token_ids[min(index, len(token_ids) - 1)])


def _filtered_by_history(logits: torch.Tensor, row: SampleRow, eos_token_ids: Sequence[int]) -> torch.Tensor:
    """Logits after the penalties and min_tokens; a copy when anything changes."""
    params = row.params
    must_go_on = len(row.output_token_ids) < params.min_tokens
    if not _has_penalties(params) and not must_go_on:
        return logits
    scores = logits.clone()
    output_ids = torch.tensor(row.output_token_ids, dtype=torch.int64, device=logits.device)
    if params.repetition_penalty != 1:  # arXiv 1909.05858: towards less likely, whatever the sign
        prompt_ids = torch.tensor(row.prompt_token_ids, dtype=torch.int64, device=logits.device)
        seen = torch.cat((prompt_ids, output_ids)).unique()
        values = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if len(output_ids) and (params.presence_penalty or params.frequency_penalty):  # OpenAI's formula
        seen, counts = output_ids.unique(return_counts=True)
        scores[seen] -= params.presence_penalty + params.frequency_penalty * counts
    if must_go_on:
        scores[[*eos_token_ids, *params.stop_token_ids]] = -torch.inf
    return scores


def _top_k_top_p(scores: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights (exp of the scores, fp64) of the top_k best, then of the fewest that hold top_p of their mass."""
    vocab_size = len(scores)
    keeps_all = not 0 < top_k < vocab_size
    if keeps_all and top_p >= 1:
        return torch.arange(vocab_size, device=scores.device), scores.double().exp()
    values, token_ids = _best(scores, min(TOP_P_CANDIDATES, vocab_size) if keeps_all else top_k)
    weights = values.double().exp()
    if top_p < 1:
        needed = top_p * (scores.double().exp().sum() if keeps_all else weights.sum())
        if keeps_all and weights.sum() < needed:
            values, token_ids = scores.sort(descending=True, stable=True)
            weights = values.double().exp()
        mass_before = weights.cumsum(0) - weights
        num_kept = max(1, int((mass_before < needed).sum()))
        token_ids, weights = token_ids[:num_kept], weights[:num_kept]
    return token_ids, weights


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best scores and their tokens; of equals, which bf16 has many of, the lowest token first. topk takes any."""
    token_ids = (scores >= scores.topk(count).values[-1]).nonzero().squeeze(1)
    values, order = scores[token_ids].sort(descending=True, stable=True)
    return values[:count], token_ids[order][:count]


def _logprobs(
    logits: torch.Tensor, token_id: int, top_n: int | None
) -> tuple[float | None, list[tuple[int, float]] | None]:
    if top_n is None:
        return None, None
    normalizer = logits.logsumexp(0)
    values, token_ids = logits.topk(top_n)
    top = list(zip(token_ids.tolist(), (values - normalizer).tolist(), strict=True))
    return float(logits[token_id] - normalizer), top


def _finish_reason(row: SampleRow, token_id: int, eos_token_ids: Sequence[int], max_context: int) -> FinishReason:
    params = row.params
    if token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos):
        return FinishReason.STOP
    num_outputs = len(row.output_token_ids) + 1
    if num_outputs == params.max_tokens or len(row.prompt_token_ids) + num_outputs >= max_context:
        return FinishReason.LENGTH
    return FinishReason.NONE
