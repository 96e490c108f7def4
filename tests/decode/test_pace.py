from __future__ import annotations

import random

import pytest

from decode.pace import Pace


def test_knows_no_limit_before_the_first_step_or_without_a_target() -> None:
    pace = Pace()
    assert pace.limit(0.05, most=64) == 64
    pace.observe(8, 1.0)
    assert pace.limit(0.0, most=64) == 64


def test_finds_the_batch_whose_step_meets_the_target() -> None:
    pace, draw = Pace(), random.Random(3)
    for _ in range(300):  # 10 ms and 2 ms a sequence
        size = draw.randrange(1, 33)
        pace.observe(size, (0.010 + 0.002 * size) * draw.uniform(0.9, 1.1))
    assert pace.predict(16) == pytest.approx(0.042, rel=0.1)
    assert pace.limit(0.050, most=64) in (19, 20, 21)
    assert pace.limit(0.001, most=64) == 1
    assert pace.limit(10.0, most=64) == 64


def test_steps_of_one_size_over_the_target_make_the_batch_smaller() -> None:
    pace = Pace()
    for _ in range(10):
        pace.observe(16, 0.1)
    assert pace.limit(0.05, most=64) == 8
    assert pace.limit(0.2, most=64) == 64  # larger ones are tried before they are judged


def test_follows_a_machine_that_became_slower() -> None:
    pace, draw = Pace(), random.Random(4)
    for speed in (1, 3):
        for _ in range(400):
            size = draw.randrange(1, 17)
            pace.observe(size, speed * (0.010 + 0.001 * size))
    assert pace.limit(0.060, most=64) == 10


def test_one_stalled_step_does_not_stop_the_batch() -> None:
    pace, draw = Pace(), random.Random(5)
    for _ in range(100):
        size = draw.randrange(1, 17)
        pace.observe(size, 0.010 + 0.001 * size)
    pace.observe(8, 5.0)
    assert pace.limit(0.030, most=64) >= 8
