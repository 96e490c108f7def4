"""What the predictor learns from one attempt: times by the workers' own clocks where they tell them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from router.classifier import LONG, SHORT
from router.lesson import Lesson
from router.predictor import TRUST_AFTER, Predictor
from router.wire import FirstTokens, Token


def pair(**prefill: Any) -> Any:
    option = SimpleNamespace(**{"input_class": SHORT, "compute_s": 0.01, "delays_s": 0.0} | prefill)
    worker = {name: SimpleNamespace(info=SimpleNamespace(worker_id=name), requests=2) for name in ("p0", "d0")}
    choice = SimpleNamespace(chosen=SimpleNamespace(prefill=option))
    return SimpleNamespace(prefill=worker["p0"], decode=worker["d0"], is_local=False, choice=choice)


def tpot_s(told_s: float | None) -> float:
    """Learnt from answers of 21 tokens of the decode worker, all but the first of which came at once."""
    predictor = Predictor(lambda: 0.0)
    for _ in range(TRUST_AFTER):
        lesson = Lesson(pair(), 100, predictor)
        lesson.tokens(0, 1, 0.0)
        lesson.tokens(0, 20, 0.002)
        if told_s is not None:
            lesson.decoded(told_s)
        lesson.ended()
    return predictor.tpot_s("d0", 2)


def test_tpot_is_the_decode_workers_own_and_what_was_seen_where_it_tells_none() -> None:
    assert tpot_s(0.42) == pytest.approx(0.020, rel=0.01)  # whatever a busy router saw
    assert tpot_s(None) == pytest.approx(0.0001, rel=0.01)


@pytest.mark.parametrize(
    ("option", "seconds"),
    [
        ({"delays_s": 0.01}, 0.06),  # 25 ms of the step that ran, 35 ms of others in its own
        ({"delays_s": 0.001}, 0.0),  # hardly anything long was there
        ({"delays_s": 0.01, "input_class": LONG}, 0.0),
    ],
)
def test_wait_beside_long_prompts_is_learnt_from_short_ones_that_met_some(
    option: dict[str, Any], seconds: float
) -> None:
    predictor = Predictor(lambda: 0.0)
    first = FirstTokens(tokens=(Token(1),), cached_tokens=0, queue_ms=25.0, prefill_ms=45.0, compute_ms=10.0, prompt=())
    Lesson(pair(**option), 64, predictor).prefilled(first)
    assert predictor.beside_long_s("p0") == pytest.approx(seconds)
