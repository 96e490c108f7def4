"""Logits and the choice of tokens in one native call, against engine.sampling in plain torch, which follows
transformers (test_sampling.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.ops import cpu, native, reference
from engine.sampling import NOT_DRAWN, Draw, draw_token

ISAS = [name for name in native.ISAS if native.select_isa(name)]
DRAWS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.9, "top_k": 50},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 2.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1e-30},
]


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.select_isa(request.param)
    yield request.param
    native.select_isa(ISAS[-1])


def layers(vocab: int, dtype: torch.dtype, width: int = 24) -> tuple[cpu.OutputLayer, reference.OutputLayer]:
    weight = (torch.randn(vocab, width, generator=torch.Generator().manual_seed(1)) / 2).to(dtype)
    return cpu.OutputLayer(cpu.pack_linear(weight, None)), reference.OutputLayer(reference.pack_linear(weight, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 17, 257, 5000])
def test_tokens_are_those_of_plain_torch(dtype: torch.dtype, vocab: int) -> None:
    """Of bf16 logits many are equal: which of them is kept and drawn is settled too. A point within rounding of a
    border may fall to the neighbour: 1 in 1,000 draws at most."""
    native_layer, _ = layers(vocab, dtype)
    hidden = torch.randn(4, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    points = torch.rand(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64).tolist()
    draws = [Draw(**params, point=point) for params in DRAWS for point in [*points, 0.0, 1 - 2**-53]]
    sources = [i % 4 for i in range(len(draws))]
    tokens, logits = native_layer.tokens(hidden, draws, sources)
    assert logits.shape == (4, vocab)
    want = [draw_token(logits[source], draw) for source, draw in zip(sources, draws, strict=True)]
    differing = [i for i, (mine, theirs) in enumerate(zip(tokens, want, strict=True)) if mine != theirs]
    assert len(differing) <= len(draws) // 1000


@pytest.mark.parametrize("width", [24, 25])
def test_logits_are_those_of_linear_for_every_batch(width: int) -> None:
    weight = torch.randn(130, width).bfloat16()
    packed = cpu.pack_linear(weight, None)
    layer = cpu.OutputLayer(packed)
    for rows in (1, 2, 65, 3):
        hidden = torch.randn(rows, width).bfloat16()
        tokens, logits = layer.tokens(hidden, [Draw()] * rows, range(rows))
        assert torch.equal(logits, cpu.linear(hidden, packed))
        assert tokens == logits.float().argmax(-1).tolist()
        assert layer.from_last_logits([Draw(), None], [rows - 1, 0]) == [tokens[-1], NOT_DRAWN]


def test_the_first_of_equals_is_the_likeliest() -> None:
    layer = cpu.OutputLayer(cpu.pack_linear(torch.ones(600, 4), None))
    assert layer.tokens(torch.ones(1, 4), [Draw(), Draw(1.0, 5, 1.0, 0.0, 0.99)], [0, 0])[0] == [0, 4]


@pytest.mark.parametrize("draw", [Draw(), Draw(1.0), Draw(1.0, 3)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_no_token(draw: Draw, bad: float) -> None:
    weight = torch.ones(70, 4)
    weight[33] = bad
    mine = cpu.OutputLayer(cpu.pack_linear(weight, None))
    plain = reference.OutputLayer(reference.pack_linear(weight, None))
    for layer in (mine, plain):
        assert layer.tokens(torch.ones(2, 4), [draw, None], [1, 0])[0] == [-1, NOT_DRAWN]


def test_tokens_of_no_probability_are_never_drawn() -> None:
    weight = torch.zeros(1000, 4)
    weight[::2] = -float("inf")
    layer = cpu.OutputLayer(cpu.pack_linear(weight, None))
    points = [0.0, 0.25, 0.5, 0.999999, 1 - 2**-53]
    draws = [Draw(1.0, top_k, top_p, 0.0, point) for point in points for top_k in (0, 900) for top_p in (1.0, 0.99)]
    tokens, _ = layer.tokens(torch.ones(1, 4), draws, [0] * len(draws))
    assert all(token % 2 for token in tokens)
