"""The quality benchmark on a small random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import quality
from tests import tiny_models


@pytest.mark.parametrize(("kind", "limit"), [("llama", 1e-3), ("deepseek-v3", 0.1), ("deepseek-v4", 0.1)])
def test_it_ends_with_one_json_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, limit: float
) -> None:
    model_dir = tiny_models.make(tmp_path / "tiny", kind)
    monkeypatch.setattr("sys.argv", ["quality", "--model", str(model_dir), "--tokens", "300", "--window", "128"])
    quality.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["tokens"] == 300
    assert 0 < result["kv_int8_mean_kl"] < limit
    assert abs(result["kv_int8_ppl_delta"]) < 0.05


@pytest.mark.parametrize(("kind", "limit"), [("llama", 0.1), ("deepseek-v4", 1.0)])
def test_formats_of_weights_are_measured_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, limit: float
) -> None:
    model_dir = tiny_models.make(tmp_path / "tiny", kind)
    monkeypatch.setattr(quality, "ANSWER_TOKENS", 16)
    command = ["quality", "--model", str(model_dir), "--tokens", "300", "--window", "128", "--weights"]
    monkeypatch.setattr("sys.argv", command)
    quality.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["tokens"] == 300
    for name in ("w8a16", "w8a8"):
        assert 0 < result[f"weights_{name}_mean_kl"] < limit
        assert 0 <= result[f"weights_{name}_greedy_agreement"] <= 1
    assert result["weights_w8a16_mean_kl"] < result["weights_w8a8_mean_kl"]


def test_agreement_counts_up_to_the_first_token_that_differs() -> None:
    assert quality.agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 0.75


def test_every_token_but_a_windows_first_is_predicted_once() -> None:
    windows = [list(range(300)), list(range(1000, 1010))]
    packed = windows[0] + windows[1]
    pairs = [
        (packed[row], next_id)
        for rows, next_ids in quality.predictions(windows)
        for row, next_id in zip(range(rows.start, rows.stop), next_ids.tolist(), strict=True)
    ]
    assert pairs == [(i, i + 1) for i in range(299)] + [(i, i + 1) for i in range(1000, 1009)]
