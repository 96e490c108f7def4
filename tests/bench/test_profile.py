"""The profile of a small random model."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from bench import profile
from bench.operators import KIND_OF
from engine.batch import BatchItem
from engine.engine import Engine
from engine.ops import cpu
from tests import tiny_models


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "deepseek-v3", "deepseek-v4"])
def test_shares_add_up_and_the_trace_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, phase: str
) -> None:
    model_dir, trace = tiny_models.make(tmp_path / "tiny", kind), tmp_path / "trace.json"
    native_linear = cpu.linear
    options = {
        "--model": model_dir,
        "--phase": phase,
        "--batch": 2,
        "--length": 70,
        "--memory": 8 << 20,
        "--trace": trace,
    }
    monkeypatch.setattr("sys.argv", ["profile", *(str(part) for pair in options.items() for part in pair)])
    cores = os.sched_getaffinity(0)
    try:
        profile.main()
    finally:
        os.sched_setaffinity(0, cores)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["kinds"]) == set(profile.KINDS)
    assert sum(kind["share"] for kind in result["kinds"].values()) == pytest.approx(1, abs=0.01)
    assert (result["kinds"]["moe"]["share"] > 0) == (kind != "llama")
    assert (result["kinds"]["attention"]["of_read_limit"] > 0) == (kind in ("llama", "qwen3-moe"))
    assert cpu.linear is native_linear
    assert all(result["kinds"][kind]["share"] > 0 for kind in ("attention", "kv_access", "linear", "sampling", "other"))
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)


def test_every_operator_that_models_call_is_timed() -> None:
    called = {
        name for path in Path("engine/models").glob("*.py") for name in re.findall(r"ops\.(\w+)\(", path.read_text())
    }
    not_of_a_step = {"OutputLayer", "pack_linear", "pack_experts", "pack_groups", "decoder"}
    assert called - not_of_a_step == set(KIND_OF)


def test_a_decode_steps_work_is_the_formulas(tmp_path: Path) -> None:
    engine = Engine.load(tiny_models.make(tmp_path), kv_dtype="int8", memory_bytes=1 << 20)
    config = engine.config
    work = profile.work(engine, [BatchItem([1], 99, [0, 1]), BatchItem([2], 9, [2])])
    token_bytes = 2 * config.num_layers * config.num_kv_heads * (config.head_dim + 2)
    assert work["attention"][0] == 110 * token_bytes
    assert work["kv_access"][0] == 2 * token_bytes
    assert work["attention"][1] == 4 * config.num_layers * config.num_heads * config.head_dim * 110


def test_prefill_sees_each_earlier_token_of_its_prompt(tmp_path: Path) -> None:
    engine = Engine.load(tiny_models.make(tmp_path), memory_bytes=1 << 20)
    config = engine.config
    operations = profile.work(engine, [BatchItem(range(10), 5, [0])])["attention"][1]
    assert operations == 4 * config.num_layers * config.num_heads * config.head_dim * sum(range(6, 16))
