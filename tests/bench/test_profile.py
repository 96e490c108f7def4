"""The profile of small random models: shares, rates, the trace, and what records them."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import device_profile, profile, random_model
from bench.limits import Limits
from bench.operators import KIND_OF, PARTS, Clock, TimedOperators
from bench.profile_table import figures
from bench.sequences import CachedSequences
from bench.step import KINDS, Step, median_step
from bench.work import work
from engine.engine import Engine
from engine.models.expert_mlp import ExpertMlp
from engine.ops import cpu, reference
from tests import tiny_models
from twinpool.errors import ConfigError

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command with these arguments: its JSON line."""

    def runs(*args: object) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["profile", *map(str, args)])
        cores = os.sched_getaffinity(0)
        try:
            profile.main()
        finally:
            os.sched_setaffinity(0, cores)
        result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return result

    return runs


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "deepseek-v3", "deepseek-v4"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_shares_add_up_every_kind_has_its_work_and_the_trace_is_one(
    tmp_path: Path, run: Run, kind: str, phase: str, backend: str
) -> None:
    model_dir, trace = tiny_models.make(tmp_path / "tiny", kind), tmp_path / "trace.json"
    native_linear = cpu.linear
    sizes = ("--batch", 2, "--length", 70, "--memory", 8 << 20, "--repeats", 3)
    result = run("--model", model_dir, "--phase", phase, *sizes, "--backend", backend, "--trace", trace)
    kinds = result["kinds"]
    assert set(kinds) == set(KINDS)
    assert sum(each["share"] for each in kinds.values()) == pytest.approx(1, abs=0.01)
    busy = {"attention", "kv_access", "linear", "sampling", "other"} | ({"moe"} if kind != "llama" else set())
    assert {name for name, each in kinds.items() if each["share"] > 0} == busy
    assert {name for name, each in kinds.items() if each.get("bytes", 0) > 0} == busy - {"other"}
    computing = busy - {"other", "kv_access"}
    assert {name for name, each in kinds.items() if each.get("operations", 0) > 0} == computing
    assert result["profiler"] == {"cpu": "native", "reference": "torch"}[backend]
    assert len(result["experts_read"]) == {"llama": 0, "qwen3-moe": 2, "deepseek-v3": 2, "deepseek-v4": 5}[kind]
    assert cpu.linear is native_linear
    events = json.loads(trace.read_text())["traceEvents"]
    if backend == "cpu":
        assert {event["ph"] for event in events} == {"X"}
        assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
        assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    else:
        assert any(event.get("name") == "twinpool sampling: sample" for event in events)


def test_both_ways_of_recording_count_the_same_experts_and_operations(tmp_path: Path, run: Run) -> None:
    model_dir = tiny_models.make(tmp_path / "tiny", "qwen3-moe")
    common = ("--model", model_dir, "--batch", 3, "--length", 40, "--memory", 8 << 20, "--repeats", 1)
    common = (*common, "--trace", tmp_path / "trace.json")
    native, torchs = (run(*common, "--backend", backend) for backend in ("cpu", "reference"))
    assert native["experts_read"] == torchs["experts_read"]
    assert all(4 < count <= 12 for count in native["experts_read"])  # more than one token's: tokens differ
    for kind in ("attention", "linear", "moe"):
        assert native["kinds"][kind]["operations"] == torchs["kinds"][kind]["operations"]


def test_models_are_computed_as_the_workers_of_their_phase_do(tmp_path: Path, run: Run) -> None:
    model_dir = tiny_models.make(tmp_path / "tiny", "deepseek-v3")
    common = ("--model", model_dir, "--length", 40, "--memory", 8 << 20, "--repeats", 1, "--trace", tmp_path / "trace")
    for phase, form in (("prefill", "plain"), ("decode", "absorbed")):
        engine = Engine.load(model_dir, latent_form=form, memory_bytes=8 << 20)
        items = profile.plan(CachedSequences(engine, 1, 41), phase, 40, 1)[1]
        expected = work(engine, items, [[0], [0]])["attention"]
        got = run(*common, "--phase", phase)["kinds"]["attention"]
        assert (got["bytes"], got["operations"]) == (expected.num_bytes, expected.operations)


@pytest.mark.parametrize("kind", random_model.CONFIGS)
def test_random_weights_need_a_config_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, kind: str
) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "moe_intermediate_size": 16}
    config = random_model.CONFIGS[kind] | small | {"vocab_size": 64, "compress_ratios": [0, 4, 128]}
    if config["intermediate_size"]:
        config["intermediate_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ("--random-weights", "--length", 200, "--memory", 8 << 20, "--repeats", 1, "--trace", tmp_path / "trace")
    from_file = run("--model", tmp_path, *given)
    monkeypatch.setitem(random_model.CONFIGS, kind, config)
    by_name = run("--model", kind, *given)
    assert by_name["model"] == kind
    for name in ("attention", "linear", "moe"):
        assert by_name["kinds"][name]["operations"] == from_file["kinds"][name]["operations"]


def test_every_operator_that_models_call_is_timed() -> None:
    called = {
        name for path in Path("engine/models").glob("*.py") for name in re.findall(r"ops\.(\w+)\(", path.read_text())
    }
    not_of_a_step = {"OutputLayer", "pack_linear", "pack_experts", "pack_groups", "decoder"}
    assert called - not_of_a_step == set(KIND_OF)


def test_what_is_timed_is_put_back(tmp_path: Path) -> None:
    engine = Engine.load(tiny_models.make(tmp_path, "deepseek-v4"), memory_bytes=8 << 20)
    before = [getattr(cpu, name) for name in KIND_OF] + [getattr(owner, name) for owner, name, _ in PARTS]
    sequences = CachedSequences(engine, 1, 4)
    recorder = TimedOperators(cpu)
    recorder.record(True)
    engine.forward(sequences.batch(sequences.items([1, 2, 3], 0)))
    recorder.record(True)
    assert recorder.events == recorder.chosen_experts == []
    recorder.record(False)
    assert before == [getattr(cpu, name) for name in KIND_OF] + [getattr(owner, name) for owner, name, _ in PARTS]


def test_a_router_and_what_stands_beside_experts_are_of_their_kind(tmp_path: Path) -> None:
    """The one dense layer of DeepSeek-V3 has linears after attention; the others have none."""
    engine = Engine.load(tiny_models.make(tmp_path, "deepseek-v3"), memory_bytes=8 << 20, latent_form="plain")
    sequences = CachedSequences(engine, 1, 4)
    recorder = TimedOperators(cpu)
    recorder.record(True)
    try:
        engine.forward(sequences.batch(sequences.items([1, 2, 3], 0)))
        events = recorder.events
    finally:
        recorder.record(False)
    linears = [kind for kind, name, _, _ in events if name == "linear"]
    attention = ["linear"] * 5  # q_a, q_b, kv_a, keys and values of the heads, output
    experts = ["moe"] * 3  # router, gate and up, down
    assert linears == attention + ["linear"] * 2 + (attention + experts) * 2
    assert {kind for kind, name, _, _ in events if name == ExpertMlp.__name__} == {"moe"}
    assert all(a[3] <= b[2] for a, b in itertools.pairwise(events))


def test_a_span_within_another_interrupts_it() -> None:
    clock = Clock()
    with clock.span("moe", "outer"):
        with clock.span("linear", "inner"):
            pass
    assert [event[:2] for event in clock.events] == [("moe", "outer"), ("linear", "inner"), ("moe", "outer")]
    assert [event[3] for event in clock.events[:2]] == [event[2] for event in clock.events[1:]]


def step_of(*events: tuple[str, int, int], seconds: float) -> Step:
    placed = [(kind, "", begin, end) for kind, begin, end in events]
    return Step(items=[], events=placed, seconds=seconds, chosen_experts=[])


def test_time_that_two_events_share_is_of_the_first() -> None:
    step = step_of(("linear", 0, 40), ("moe", 20, 60), ("attention", 30, 35), ("moe", 70, 80), seconds=100e-9)
    shares = step.shares()
    assert shares == pytest.approx(
        {"linear": 0.4, "moe": 0.3, "attention": 0, "kv_access": 0, "sampling": 0, "other": 0.3}
    )


def test_the_step_of_median_time_is_the_one_that_counts() -> None:
    steps = [step_of(seconds=seconds) for seconds in (5.0, 1.0, 3.0, 2.0)]
    assert median_step(steps) is steps[3]


def test_rates_are_held_against_both_limits(tmp_path: Path) -> None:
    """10 ms of which linear takes half; the limits are 1 GB/s and 1 Gop/s."""
    engine = Engine.load(tiny_models.make(tmp_path), memory_bytes=1 << 20)
    items = CachedSequences(engine, 2, 9).items([1], 8)
    step = Step(items=items, events=[("linear", "", 0, 5_000_000)], seconds=0.01, chosen_experts=[])
    got = figures(engine, step, Limits(1e9, 1e9))["linear"]
    needed = work(engine, items, [])["linear"]
    assert (got["share"], got["ms"]) == (0.5, 5)
    assert got["gb_s"] == got["of_read_limit"] == round(needed.num_bytes / 5e6, 3)
    assert got["gop_s"] == got["of_multiply_limit"] == round(needed.operations / 5e6, 3)


def test_without_the_native_library_torch_records(tmp_path: Path) -> None:
    model_dir, root = tiny_models.make(tmp_path / "tiny", "qwen3-moe"), Path(__file__).parents[2]
    program = (
        "import sys; from engine.ops import native; native.library = lambda: None\n"
        "from bench import profile\n"
        f"sys.argv = 'profile --model {model_dir} --length 8 --repeats 1 --memory 8000000 "
        f"--trace {tmp_path / 'trace.json'}'.split()\n"
        "profile.main(); print('engine.ops.cpu' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=root)
    assert done.returncode == 0, done.stderr
    *_, result, has_native = done.stdout.splitlines()
    assert has_native == "False"
    assert json.loads(result)["profiler"] == "torch"
    assert json.loads(result)["backend"] == "reference"


def test_a_profiler_is_refused_that_does_not_see_the_backend() -> None:
    with pytest.raises(ConfigError, match="native CPU backend only, not reference"):
        profile.choose_profiler("native", reference)
    with pytest.raises(ConfigError, match="take --backend reference"):
        profile.choose_profiler("torch", cpu)
    assert profile.choose_profiler("auto", reference) == "torch"
    assert profile.choose_profiler("auto", cpu) == "native"


def test_an_ascend_backend_is_recorded_by_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "DEVICE", "npu")
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(device_profile, "find", lambda tool, device: asked.append((tool, device)))
    assert profile.choose_profiler("auto", reference) == "torch_npu"
    assert asked == [("torch_npu", "npu")]


def test_without_torch_npu_the_command_says_so_before_it_loads(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--model", "no-such-model", "--profiler", "torch_npu")
    assert "torch_npu: the package torch_npu is not installed" in capsys.readouterr().err
