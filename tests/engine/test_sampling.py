"""Sampling against transformers' processors, OpenAI's penalty formula, and its own promises."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampling import SampleRow, distribution, prompt_logprobs, sample, uniform
from twinpool.errors import Internal
from twinpool.sampling import FinishReason, SamplingParams

VOCAB = 5000
EOS = (7,)
MAX_CONTEXT = 1000


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, *rows: SampleRow):
    return sample(logits, rows, eos_token_ids=EOS, max_context=MAX_CONTEXT)


def row(prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (), choice: int = 0, **params) -> SampleRow:
    return SampleRow(SamplingParams(**params), prompt, output, choice)


def oracle_distribution(logits: torch.Tensor, prompt_and_output: list[int], params: SamplingParams) -> torch.Tensor:
    """transformers' processors in the order of its generate()."""
    processors = []
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    scores, input_ids = logits.clone(), torch.tensor([prompt_and_output])
    for processor in processors:
        scores = processor(input_ids, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.9, "top_k": 50},
        {"top_k": VOCAB + 1},
        {"top_p": 0.9},
        {"top_p": 0.05},
        {"temperature": 2.0, "top_p": 0.999},  # more tokens than the first look at the candidates takes
        {"min_p": 0.1},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"temperature": 0.6, "repetition_penalty": 0.7, "top_k": 20, "top_p": 0.8},
    ],
)
def test_filtered_distribution_equals_transformers(params: dict[str, float], seed: int) -> None:
    logits = logits_of(seed)
    prompt, output = (3, 9, 9, 4000), (17, 9, int(logits.argmax()))
    request = row(prompt, output, **params)
    token_ids, probabilities = distribution(logits[0], request, EOS)
    mine = torch.zeros(VOCAB, dtype=torch.float64).scatter(0, token_ids, probabilities)
    expected = oracle_distribution(logits, [*prompt, *output], request.params).double()
    assert torch.equal(mine > 0, expected > 0)
    assert (mine - expected).abs().max() < 1e-5


def test_presence_and_frequency_penalties_follow_openais_formula() -> None:
    """mu[j] -> mu[j] - c[j] * frequency_penalty - (c[j] > 0) * presence_penalty, c counting the output only."""
    logits = logits_of(0)
    output = (5, 5, 5, 11)
    token_ids, probabilities = distribution(
        logits[0], row((5, 100), output, presence_penalty=0.6, frequency_penalty=-0.4), EOS
    )
    counts = torch.zeros(VOCAB)
    counts[5], counts[11] = 3, 1
    expected = (logits[0] - counts * -0.4 - (counts > 0) * 0.6).softmax(-1)
    assert torch.equal(token_ids, torch.arange(VOCAB))
    assert (probabilities - expected).abs().max() < 1e-6


def test_temperature_zero_takes_the_likeliest_token_after_penalties() -> None:
    logits = logits_of(1)
    best, second = logits[0].topk(2).indices.tolist()
    assert draw(logits, row(temperature=0))[0].token_id == best
    assert draw(logits, row(output=(best,) * 20, temperature=0, frequency_penalty=2))[0].token_id == second


def test_tiny_temperature_is_as_good_as_greedy_and_does_not_overflow() -> None:
    logits = logits_of(2) * 1e4
    assert draw(logits, row(temperature=1e-30))[0].token_id == int(logits.argmax())


def test_end_tokens_cannot_occur_before_min_tokens() -> None:
    logits = logits_of(3)
    logits[0, [7, 8]] = 100.0
    for temperature in (0.0, 1.0):
        early = row(output=(1,), temperature=temperature, min_tokens=2, stop_token_ids=(8,))
        late = row(output=(1, 1), temperature=temperature, min_tokens=2, stop_token_ids=(8,))
        assert draw(logits, early)[0].token_id not in (7, 8)
        assert draw(logits, late)[0].token_id in (7, 8)


def test_draw_depends_on_seed_choice_and_position_only() -> None:
    logits = logits_of(4, rows=3)
    mine = row(output=(4, 5), choice=1, seed=2**64 - 1, top_p=0.9)
    alone = draw(logits[1:2], mine)[0]
    among_others = draw(logits, row(seed=5), mine, row(temperature=0))[1]
    assert among_others == alone
    points = {
        uniform(1, 0, 0),
        uniform(2, 0, 0),
        uniform(1, 1, 0),
        uniform(1, 0, 1),
        uniform(2**63 + 1, 0, 0),
    }
    assert len(points) == 5
    assert uniform(1, 2, 3) == uniform(1, 2, 3)


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over 16 outcomes: 37.7 is its 0.999 quantile with 15 degrees of freedom."""
    logits = logits_of(5, vocab=16) / 3
    count = 4000
    drawn = Counter(
        draw(logits, row(output=(0,) * (i % 10), choice=i % 4, seed=i // 40, ignore_eos=True))[0].token_id
        for i in range(count)
    )
    expected = logits[0].softmax(-1) * count
    chi_squared = sum((drawn[i] - float(expected[i])) ** 2 / float(expected[i]) for i in range(16))
    assert chi_squared < 37.7


def test_uniform_points_are_uniform() -> None:
    points = torch.tensor([uniform(seed, 0, position) for seed in range(40) for position in range(100)])
    assert points.min() >= 0
    assert points.max() < 1
    assert abs(float(points.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 4000)


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = logits_of(6)
    expected = logits[0].log_softmax(-1)
    best = logits[0].topk(5)
    request = row(output=(int(best.indices[0]),) * 3, temperature=0.3, top_k=2, frequency_penalty=2.0, logprobs=5)
    sampled = draw(logits, request)[0]
    assert sampled.logprob == pytest.approx(float(expected[sampled.token_id]), abs=1e-5)
    assert [token_id for token_id, _ in sampled.top] == best.indices.tolist()
    assert [logprob for _, logprob in sampled.top] == pytest.approx(expected[best.indices].tolist(), abs=1e-5)
    assert draw(logits, row(temperature=0))[0].logprob is None
    assert draw(logits, row(temperature=0, logprobs=0))[0].top == []


def test_prompt_logprobs_score_the_given_tokens() -> None:
    logits = logits_of(7, rows=3)
    scored = prompt_logprobs(logits, [10, 20, 30], 2)
    expected = logits.log_softmax(-1)
    assert [s.token_id for s in scored] == [10, 20, 30]
    assert [s.logprob for s in scored] == pytest.approx([float(expected[i, t]) for i, t in enumerate((10, 20, 30))])
    assert all(len(s.top) == 2 for s in scored)


@pytest.mark.parametrize(
    ("token_id", "request_row", "reason"),
    [
        (7, row(), FinishReason.STOP),
        (7, row(ignore_eos=True), FinishReason.NONE),
        (7, row(ignore_eos=True, stop_token_ids=(7,)), FinishReason.STOP),
        (9, row(stop_token_ids=(8, 9)), FinishReason.STOP),
        (9, row(max_tokens=1), FinishReason.LENGTH),
        (7, row(max_tokens=1), FinishReason.STOP),
        (9, row(output=(1,), max_tokens=3), FinishReason.NONE),
        (9, row(prompt=(1,) * 997, output=(1, 1)), FinishReason.LENGTH),
        (9, row(prompt=(1,) * 997, output=(1,)), FinishReason.NONE),
    ],
)
def test_finish_reasons(token_id: int, request_row: SampleRow, reason: FinishReason) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, token_id] = 50.0
    greedy_row = replace(request_row, params=replace(request_row.params, temperature=0))
    assert draw(logits, greedy_row)[0].finish_reason is reason


def test_logits_that_are_not_finite_are_an_error_and_are_left_untouched() -> None:
    logits = logits_of(8, rows=2)
    before = logits.clone()
    draw(logits, row(repetition_penalty=2.0, min_tokens=5), row(frequency_penalty=1.0, output=(1,)))
    assert torch.equal(logits, before)
    logits[1, 3] = float("nan")
    with pytest.raises(Internal, match="not finite"):
        draw(logits, row(), row())
