"""The benchmarks with fake workers, on very small loads: they run, and say what they are to say."""

from __future__ import annotations

import json

import pytest

from bench import online
from bench.fake_workers import FakePrefill, Speed, _Prompt


def test_compare_drives_every_policy_and_reports_their_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rate", "60", "--requests", "12", "--short-tokens", "32", "--long-tokens", "600", "--max-tokens", "4"]
    online.main(["--policy", "compare", "--seeds", "1", *options])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["goodput_rps"]) == {"round_robin", "least_loaded", "prefix", "predict", "predict+local"}
    assert all(len(runs) == 1 and runs[0] > 0 for runs in result["goodput_rps"].values())
    ours, theirs = (result["goodput_rps"][policy] for policy in ("predict", "round_robin"))
    assert result["predict_over"]["round_robin"] == pytest.approx(ours[0] / theirs[0], abs=0.01)


def test_fake_prefill_halves_a_step_between_short_and_long_prompts() -> None:
    worker = FakePrefill("p", Speed())
    short, long = _Prompt(64), _Prompt(1500)
    worker._waiting["long"].append(long)
    assert worker._step(0.0) == {long: 256}
    worker._waiting["short"].append(short)
    assert worker._step(0.0) == {short: 64, long: 192}
