"""What is learnt from observations, against the function that made them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from router.backlog import Backlog
from router.classifier import LONG, SHORT
from router.least_squares import LeastSquares
from router.predictor import DEFAULT_TOKEN_S, Predictor


def seconds(tokens: int, cached: int = 0) -> float:
    fresh = tokens - cached
    return 0.004 + 0.0011 * fresh + 2e-7 * fresh * (cached + fresh / 2)


def test_coefficients_are_found_despite_noise_and_outliers() -> None:
    draw, model = random.Random(3), LeastSquares(2)
    for i in range(60):
        x = draw.uniform(1, 40)
        noise = 10.0 if i % 12 == 5 else draw.uniform(0.97, 1.03)
        model.add((1.0, x), (20 + 3 * x) * noise)
    assert model.predict((1.0, 20.0)) == pytest.approx(80, rel=0.04)
    assert model.coefficients == pytest.approx([20, 3], rel=0.15)


def test_fit_without_outliers_is_that_of_numpy() -> None:
    """Least squares of logarithms: numpy's of the errors, linear around the last solution, until nothing changes."""
    draw, model = random.Random(5), LeastSquares(2)
    points = [(draw.uniform(1, 40), draw.uniform(0.98, 1.02)) for _ in range(12)]
    values = np.array([(5 + 2 * x) * noise for x, noise in points])
    for (x, _), value in zip(points, values, strict=True):
        model.add((1.0, x), float(value))
    rows, expected = np.array([[1.0, x] for x, _ in points]), np.array([1.0, 1.0])
    for _ in range(50):
        guesses = rows @ expected
        change, *_ = np.linalg.lstsq(rows / guesses[:, None], np.log(values / guesses), rcond=None)
        expected = expected + change
    assert np.abs(change).max() < 1e-9
    assert model.coefficients == pytest.approx(list(expected), rel=2e-5)  # two steps, with a slight pull to nothing


def test_the_least_values_do_not_draw_the_fit_to_them() -> None:
    """Tokens that a busy router takes in one go seem to have come at once."""
    model = LeastSquares(2)
    for i in range(60):
        x = 1.0 + i % 7
        model.add((1.0, x), (20 + 3 * x) / (100 if i % 4 == 1 else 1))
    assert model.predict((1.0, 4.0)) == pytest.approx(32, rel=0.05)


@pytest.mark.parametrize("sizes", [[2], [2, 3, 4]])
def test_a_prompt_far_longer_than_any_seen_is_not_taken_for_endless(sizes: list[int]) -> None:
    """200 health checks, then a prompt of 1,200 tokens: at most in proportion, and not by the square."""
    predictor, draw = Predictor(lambda: 0.0), random.Random(4)
    for i in range(200):
        predictor.prefilled("p0", sizes[i % len(sizes)], 0, 0.001 * draw.uniform(0.7, 1.4))
    assert predictor.prefill_s("p0", 1200) <= 0.0015 * 1200 / sizes[-1]
    if sizes == [2]:  # nothing says that more tokens take longer
        assert predictor.prefill_s("p0", 1200) < 0.002


def test_a_long_prompt_is_not_forgotten_over_many_short_ones() -> None:
    predictor, draw = Predictor(lambda: 0.0), random.Random(2)
    for tokens in [1500] * 4 + [300] * 4 + [2] * 500:
        predictor.prefilled("p0", tokens, 0, seconds(tokens) * draw.uniform(0.9, 1.1))
    for tokens in (2, 300, 700, 1500, 3000):
        assert predictor.prefill_s("p0", tokens) == pytest.approx(seconds(tokens), rel=0.2)


def test_more_work_never_takes_less_time() -> None:
    model = LeastSquares(2)
    for x, y in ((1, 10), (2, 9), (3, 8), (4, 7)):
        model.add((1.0, float(x)), float(y))
    assert model.predict((1.0, 1000.0)) == pytest.approx(model.predict((1.0, 1.0)))
    assert 7 <= model.predict((1.0, 1.0)) <= 10


def test_prefill_is_learnt_for_each_worker_by_length_and_cached_prefix() -> None:
    predictor, draw = Predictor(lambda: 0.0), random.Random(1)
    assert predictor.prefill_s("p0", 100) == pytest.approx(100 * DEFAULT_TOKEN_S)
    for _ in range(40):
        tokens = draw.choice([64, 300, 1500])
        cached = draw.choice([0, tokens // 2])
        predictor.prefilled("p0", tokens, cached, seconds(tokens, cached))
        predictor.prefilled("p1", tokens, cached, 3 * seconds(tokens, cached))
    for tokens, cached in ((64, 0), (1500, 0), (1500, 750), (700, 0)):
        assert predictor.prefill_s("p0", tokens, cached) == pytest.approx(seconds(tokens, cached), rel=0.2)
        assert predictor.prefill_s("p1", tokens, cached) == pytest.approx(3 * seconds(tokens, cached), rel=0.2)
    stranger = predictor.prefill_s("p2", 1500)
    assert not predictor.knows_prefill("p2")
    assert seconds(1500) < stranger < 3 * seconds(1500)  # as the others are, not as if idle


def test_speed_that_changes_is_followed() -> None:
    predictor = Predictor(lambda: 0.0)
    for requests in [*range(1, 20)] * 4:
        predictor.decoded("d0", requests, 0.010 + 0.001 * requests)
    assert predictor.tpot_s("d0", 10) == pytest.approx(0.020, rel=0.05)
    for requests in [*range(1, 20)] * 4:
        predictor.decoded("d0", requests, 0.030 + 0.003 * requests)
    assert predictor.tpot_s("d0", 10) == pytest.approx(0.060, rel=0.05)


def test_wait_for_rows_fades() -> None:
    now = [0.0]
    predictor = Predictor(lambda: now[0])
    for _ in range(10):
        predictor.reserved("d0", 2.0)
    assert predictor.reserve_s("d0") == pytest.approx(2.0, rel=0.01)
    now[0] = 50.0
    assert predictor.reserve_s("d0") < 0.01


def test_transfer_goes_by_pair_and_bytes() -> None:
    predictor = Predictor(lambda: 0.0)
    for tokens in (100, 200, 400, 800) * 8:
        predictor.transferred("p0", "d0", tokens, 1000 * tokens, 0.001 + 1e-8 * 1000 * tokens)
        predictor.transferred("p0", "d1", tokens, 1000 * tokens, 0.001 + 1e-7 * 1000 * tokens)
    assert predictor.transfer_s("p0", "d0", 1000) == pytest.approx(0.011, rel=0.2)
    assert predictor.transfer_s("p0", "d1", 1000) == pytest.approx(0.101, rel=0.2)


def test_backlog_shares_the_device_as_the_worker_does() -> None:
    now = [0.0]
    backlog = Backlog(lambda: now[0])
    backlog.claim(LONG, 6.0)
    assert backlog.until_done(SHORT, 0.1) == pytest.approx(0.2)  # half speed beside the long one
    assert backlog.until_done(LONG, 1.0) == pytest.approx(7.0)
    assert backlog.until_done(SHORT, 0.1, 0.4) == pytest.approx(0.5)  # steps full of long ones, as they were seen
    assert backlog.until_done(SHORT, 0.1, 40.0) == pytest.approx(6.1)  # until there is none of them left
    backlog.claim(SHORT, 1.0)
    now[0] = 1.0
    # The short one is all there until it is done; half of the time was its own.
    assert (backlog.of(SHORT), backlog.of(LONG)) == (1.0, pytest.approx(5.5))
    backlog.release(SHORT, 1.0)
    now[0] = 2.5
    assert (backlog.of(SHORT), backlog.of(LONG)) == (0.0, pytest.approx(4.0))
    backlog.reported({SHORT: 0.0, LONG: 5.0})
    assert backlog.of(LONG) == pytest.approx(5.0)
    backlog.release(LONG, 6.0)
    assert backlog.total == 0.0
