"""The plan of the chaos run, and how it judges answers. The run itself: tests/flow/test_chaos.py."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from bench import chaos
from bench.chaos_load import difference
from bench.chaos_plan import Fault, first_workers, plan
from twinpool.results import Choice, TokenLogprob, TopLogprob

COUNTS = {"prefill": 2, "decode": 2}


def test_a_seed_repeats_the_plan() -> None:
    assert plan(300, 7, COUNTS) == plan(300, 7, COUNTS)
    assert plan(300, 7, COUNTS) != plan(300, 8, COUNTS)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_holds_every_fault_and_never_takes_the_last_undisturbed_worker_of_a_pool(seed: int) -> None:
    steps = plan(300, seed, COUNTS)
    assert {step.fault for step in steps} == set(Fault)
    assert all(a.at_s < b.at_s < 300 for a, b in itertools.pairwise(steps))
    living = {name for _, name in first_workers(COUNTS)}
    paused: dict[str, float] = {}
    for step in steps:
        paused = {name: until for name, until in paused.items() if until > step.at_s}
        if step.fault is Fault.ADD:
            assert step.worker not in living
            living.add(step.worker)
            continue
        assert step.worker in living - set(paused)
        if step.fault is Fault.PAUSE:
            paused[step.worker] = step.at_s + step.pause_s
        else:
            living.remove(step.worker)
        assert any(name.startswith(step.pool) for name in living - set(paused))


def choice(**changes: Any) -> Choice:
    logprob = TokenLogprob(token_id=5, logprob=-0.5, top=[TopLogprob(token_id=5, logprob=-0.5, text=b"a")], text=b"a")
    return replace(Choice(index=0, text="ab", token_ids=[5, 6], logprobs=[logprob], finish_reason="length"), **changes)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"token_ids": [5, 7]}, "token_ids of choice 0"),
        ({"token_ids": [5]}, "token_ids of choice 0"),
        ({"text": "a"}, "text of choice 0"),
        ({"finish_reason": "stop"}, "finish_reason of choice 0"),
        ({"logprobs": []}, "tokens with logprobs of choice 0"),
        ({"logprobs": [replace(choice().logprobs[0], logprob=-0.6)]}, "logprobs of choice 0"),
        ({"logprobs": [replace(choice().logprobs[0], top=[])]}, "alternatives of choice 0"),
    ],
)
def test_any_difference_from_the_lone_run_is_seen(changes: dict[str, Any], where: str) -> None:
    assert difference([choice()], [choice(**changes)]) == where
    assert difference([choice()], [choice()]) == ""
    assert difference([choice()], [choice(), choice(index=1)]) == "2 choices rather than 1"


def test_values_that_make_no_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chaos.main(["--seconds", "0"])
    assert "must be over 0" in capsys.readouterr().err
    assert chaos.main(["--model", "/no/such/model"]) == 2
    assert "/no/such/model" in capsys.readouterr().err
