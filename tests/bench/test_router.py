"""What the router costs: the program runs, and its figures hold together."""

from __future__ import annotations

import json

import pytest

from bench import router


def test_a_short_run_gives_every_figure(capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--streams", "2", "--step-ms", "20", "--seconds", "0.6", "--answer-tokens", "10"]
    small += ["--queued", "20", "--queued-tokens", "50"]
    assert router.main(small) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert 0 < result["half_rate_tokens_per_s"] <= 50 * 1.1  # one stream, a token each 20 ms
    assert 0 < result["tokens_per_s"] <= 2 * 50 * 1.1
    assert result["tokens_per_message"] <= 1.1  # each goes out on its own
    assert result["of_bare"] == pytest.approx(result["tokens_per_cpu_s"] / result["bare_tokens_per_cpu_s"], rel=0.01)
    for path in ("added", "bare", "full_rate"):
        assert 0 < result[f"{path}_latency_ms_p50"] <= result[f"{path}_latency_ms_p99"]
    assert result["queued_requests"] == 20
    assert result["queued_bytes_per_request"] > 0


@pytest.mark.parametrize(
    "argument", ["--streams", "--step-ms", "--seconds", "--answer-tokens", "--queued", "--queued-tokens"]
)
def test_figures_that_make_no_sense_are_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        router.main([argument, "0"])
    assert ended.value.code == 2
    assert "must be over 0" in capsys.readouterr().err
