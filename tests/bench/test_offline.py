"""The offline benchmark on a small random model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench import offline
from tests import tiny_models


@pytest.mark.parametrize("kind", ["llama", "deepseek-v4"])
def test_it_ends_with_one_json_line_with_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    model_dir = tiny_models.make(tmp_path / "tiny", kind)
    monkeypatch.setattr("sys.argv", ["offline", "--model", str(model_dir), "--quick"])
    monkeypatch.setattr(offline, "MEMORY_BYTES", 64 << 20)
    cores = os.sched_getaffinity(0)
    try:
        offline.main()
    finally:
        os.sched_setaffinity(0, cores)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["decode_tok_s"]) == {"bf16", "w8a16"}
    assert all(set(rates) == {"1", "8", "32"} for rates in result["decode_tok_s"].values())
    assert set(result["prefill_tok_s"]) == {"bf16", "w8a8"}
    assert all(set(rates) == {"8x512", "1x2048"} for rates in result["prefill_tok_s"].values())
    assert all(
        rate > 0
        for kind in ("decode_tok_s", "prefill_tok_s")
        for rates in result[kind].values()
        for rate in rates.values()
    )
    assert result["decode_bandwidth_fraction_bf16"] > 0
    assert result["decode_bandwidth_fraction_w8a16"] > 0
    if kind == "llama":
        assert 0 <= result["step_overhead_fraction"] < 1
    else:
        assert result["step_overhead_fraction"] is None  # its layers are no single call


def test_a_step_reads_the_packed_weights_once_and_the_context(tmp_path: Path) -> None:
    engine = offline.Engine.load(tiny_models.make(tmp_path), memory_bytes=1 << 20)
    config = engine.config
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    weights = 2 * (config.num_layers * layer + config.vocab_size * config.hidden_size)
    kv = 2 * config.num_layers * config.num_kv_heads * (config.head_dim + 2)
    padding = 2 * 64 * config.hidden_size  # the last panel of the output layer may be filled up
    assert weights + 100 * kv <= offline.step_bytes(engine, 100) <= weights + 100 * kv + padding
