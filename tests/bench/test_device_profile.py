"""torch's profilers: the calls that torch_npu documents, and what is made of the files that either leaves."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import device_profile
from bench.device_trace import Trace, ascend_operators
from bench.operator_kinds import kind_of
from engine.ops import reference
from twinpool.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "launched_in", "kind"),
    [
        # names of torch_npu's functions, and CANN's types of the same operators
        ("npu_fused_infer_attention_score", None, "attention"),
        ("FusedInferAttentionScore", "linear", "attention"),
        ("PagedAttentionOperation", None, "attention"),
        ("SparseFlashAttention", None, "attention"),
        ("LightningIndexer", None, "attention"),
        ("_npu_reshape_and_cache", None, "kv_access"),
        ("ReshapeAndCacheOperation", None, "kv_access"),
        ("KvRmsNormRopeCache", None, "kv_access"),
        ("ScatterPaKvCache", None, "kv_access"),
        ("RotaryMul", None, "kv_access"),
        ("InterleaveRope", "attention", "kv_access"),
        ("npu_moe_gating_top_k", None, "moe"),
        ("MoeGatingTopK", None, "moe"),
        ("MoeInitRoutingV2", None, "moe"),
        ("MoeDistributeDispatchV2", None, "moe"),
        ("MoeTokenUnpermute", None, "moe"),
        ("GroupedMatmul", None, "moe"),
        ("GroupedMatmulSwigluQuant", None, "moe"),
        ("hcom_alltoallv_", None, "moe"),
        ("hcom_allReduce__123_0_1", "linear", "moe"),
        ("ncclDevKernel_AllGather_RING_LL", None, "moe"),
        ("MatMulV3", None, "linear"),
        ("MatMulV3", "moe", "moe"),  # a router
        ("QuantBatchMatmulV3", "linear", "linear"),
        ("WeightQuantBatchMatmulV2", None, "linear"),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_tn", None, "linear"),
        ("MlaPrologV3", None, "linear"),
        ("ArgMaxV2", None, "sampling"),
        ("TopKV2", None, "sampling"),
        ("TopKV2", "moe", "moe"),
        ("SoftmaxV2", None, "attention"),
        ("SoftmaxV2", "moe", "moe"),
        ("ScatterNdUpdate", None, "kv_access"),
        ("cutlass::epilogue::LinearCombination", "moe", "moe"),
        ("AddRmsNorm", None, "other"),
        ("SwiGlu", "other", "other"),
        ("DynamicQuant", "linear", "linear"),
    ],
)
def test_names_of_operators_have_kinds(name: str, launched_in: str | None, kind: str) -> None:
    assert kind_of(name, launched_in) == kind


def host(name: str, begin: float, end: float, tid: int = 7, cat: str = "user_annotation") -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 1, "tid": tid, "ts": begin, "dur": end - begin, "cat": cat}


def launch(number: int, launched: float, begins: float, cat: str, tid: int = 7) -> list[dict[str, Any]]:
    """An arrow from the host to a device."""
    common = {"id": number, "cat": cat, "name": cat}
    return [
        common | {"ph": "s", "pid": 1, "tid": tid, "ts": launched},
        common | {"ph": "f", "pid": 2, "tid": 3, "ts": begins, "bp": "e"},
    ]


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


SPANS = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    host("twinpool step", 100, 200),
    host("twinpool moe: ExpertMlp", 110, 150),
    host("twinpool moe: linear", 115, 120),
    host("twinpool linear: linear", 160, 170),
    host("aten::mm", 161, 169, cat="cpu_op"),
    host("twinpool linear: linear", 300, 310),  # of no step
]


def test_spans_within_others_interrupt_them_on_the_host(tmp_path: Path) -> None:
    trace = Trace(written(tmp_path / "trace.json", {"traceEvents": SPANS}))
    assert trace.on_host(trace.steps[0]) == [
        ("moe", "ExpertMlp", 110_000, 115_000),
        ("moe", "linear", 115_000, 120_000),
        ("moe", "ExpertMlp", 120_000, 150_000),
        ("linear", "linear", 160_000, 170_000),
    ]


def test_kernels_of_cuda_are_of_the_kind_of_the_span_that_launched_them(tmp_path: Path) -> None:
    """As torch.profiler writes: arrows "ac2g", spans once more above the kernels."""
    kernels = [
        host("nvjet_tst_128x8", 130, 140, tid=3, cat="kernel"),
        host("nvjet_tst_128x8", 175, 180, tid=3, cat="kernel"),
        host("flash_fwd_splitkv_kernel", 181, 190, tid=3, cat="kernel"),
        host("vectorized_elementwise_kernel", 191, 192, tid=3, cat="kernel"),
        host("Memcpy DtoH", 193, 194, tid=3, cat="gpu_memcpy"),
        host("nvjet_tst_128x8", 400, 410, tid=3, cat="kernel"),
        host("twinpool moe: linear", 130, 140, tid=3, cat="gpu_user_annotation"),
    ]
    arrows = launch(1, 116, 130, "ac2g") + launch(2, 165, 175, "ac2g") + launch(3, 166, 181, "ac2g")
    trace = Trace(written(tmp_path / "trace.json", {"traceEvents": [*SPANS, *kernels, *arrows]}))
    (step,) = trace.steps
    events = trace.on_device(step, trace.cuda_operators())
    assert [(kind, begin) for kind, _, begin, _ in events] == [
        ("moe", 130_000),
        ("linear", 175_000),
        ("attention", 181_000),
        ("other", 191_000),
        ("other", 193_000),
    ]


def write_kernels(path: Path, rows: Sequence[tuple[str, str, float, float]]) -> None:
    """kernel_details.csv with the columns that are documented: name, type, start and duration in us."""
    names = ("Step Id", "Device_id", "Name", "Type", "Accelerator Core", "Start Time(us)", "Duration(us)")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "Wait Time(us)", "Block Dim"])
        for name, kind, start, duration in rows:
            writer.writerow([1, 0, name, kind, "AI_CORE", f"{start}\t", duration, 0, 24])


def test_operators_of_an_npu_come_from_its_table_and_arrows_from_its_trace(tmp_path: Path) -> None:
    """Times since 1970, as numbers and as texts; a list instead of an object."""
    since = 1_780_000_000_000_000.0
    spans = [each | {"ts": str(each["ts"] + since)} if "ts" in each else each for each in SPANS]
    arrows = launch(1, since + 116, since + 130, "async_npu") + launch(2, since + 165, since + 175, "async_npu")
    arrows += launch(3, since + 165, since + 176, "HostToDevice")
    trace = Trace(written(tmp_path / "trace_view.json", [*spans, *arrows]))
    table = tmp_path / "kernel_details.csv"
    write_kernels(
        table,
        [
            ("aclnnMatmul_MatMulV3", "MatMulV3", since + 130.25, 5),
            ("aclnnMatmul_MatMulV3", "MatMulV3", since + 175, 5),
            ("aclnnMm_MatMulV3", "MatMulV3", since + 182, 2),
            ("FusedInferAttentionScore", "N/A", since + 185, 2),
            ("hcom_allReduce_", "hcom_allReduce_", since + 188, 2),
            ("late", "MatMulV3", since + 500, 2),
        ],
    )
    (step,) = trace.steps
    kinds = [kind for kind, *_ in trace.on_device(step, ascend_operators(table))]
    assert kinds == ["moe", "linear", "linear", "attention", "moe"]


# ---- torch_npu as it documents itself, around torch's own profiler of the CPU ----


class ExperimentalConfig:
    def __init__(
        self,
        profiler_level: str = "Level0",
        aic_metrics: str = "ACL_AICORE_NONE",
        l2_cache: bool = False,
        msprof_tx: bool = False,
        data_simplification: bool = True,
        record_op_args: bool = False,
        op_attr: bool = False,
        gc_detect_threshold: float | None = None,
        export_type: str = "text",
    ) -> None:
        self.level, self.export_type = profiler_level, export_type


def trace_handler(
    dir_name: str | None = None,
    worker_name: str | None = None,
    analyse_flag: bool = True,
    async_mode: bool = False,
) -> Callable[[Any], None]:
    """Writes into dir_name/WORKER_TIME_ascend_pt: every span of ours has an operator on the device."""
    assert dir_name is not None
    assert set(dir_name.replace("/", "")) <= set("abcdefghijklmnopqrstuvwxyz0123456789_")  # as it demands
    folder = Path(dir_name) / "host_1_20260101_ascend_pt" / "ASCEND_PROFILER_OUTPUT"

    def write(recording: Any) -> None:
        folder.mkdir(parents=True)
        recording.export_chrome_trace(str(folder / "torch.json"))
        events = json.loads((folder / "torch.json").read_text())["traceEvents"]
        spans = [each for each in events if each.get("ph") == "X" and str(each["name"]).startswith("twinpool ")]
        arrows, rows = [], []
        for number, span in enumerate(each for each in spans if each["name"] != "twinpool step"):
            begin = span["ts"] + span["dur"] / 2
            arrows += launch(number, span["ts"] + span["dur"] / 4, begin, "async_npu", span["tid"])
            arrows[-2]["pid"] = span["pid"]
            rows.append(("aclnn", "DynamicQuant", begin, span["dur"] / 4))
        (folder / "trace_view.json").write_text(json.dumps(spans + arrows))
        if not recording.has_no_device:
            write_kernels(folder / "kernel_details.csv", rows)

    return write


def npu_schedule(*, wait: int, active: int, warmup: int = 0, repeat: int = 0, skip_first: int = 0) -> Any:
    return torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)


class StandIn:
    """torch_npu, whose devices are the host."""

    def __init__(self, *, has_no_device: bool = False) -> None:
        self.opened: list[dict[str, Any]] = []
        self.npu = SimpleNamespace(is_available=lambda: True)
        self._has_no_device = has_no_device
        self.profiler = SimpleNamespace(
            profile=self.profile,
            ProfilerActivity=SimpleNamespace(CPU="cpu", NPU="npu"),
            ProfilerLevel=SimpleNamespace(Level0="Level0", Level1="Level1", Level2="Level2"),
            ExportType=SimpleNamespace(Text="text", Db="db"),
            _ExperimentalConfig=ExperimentalConfig,
            schedule=npu_schedule,
            tensorboard_trace_handler=trace_handler,
        )

    @contextlib.contextmanager
    def profile(
        self,
        *,
        activities: Any = None,
        schedule: Any = None,
        on_trace_ready: Any = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        experimental_config: Any = None,
    ) -> Iterator[Any]:
        self.opened.append({"activities": activities, "config": experimental_config})
        only_cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=only_cpu, schedule=schedule, on_trace_ready=on_trace_ready) as recording:
            recording.has_no_device = self._has_no_device
            yield recording


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandIn]:
    def install(**options: Any) -> StandIn:
        stand_in = StandIn(**options)
        monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torch_npu" or find_spec(name))
        module = SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        return stand_in

    return install


def two_linears(items: Any, span: Any) -> None:
    packed = reference.pack_linear(torch.ones(8, 8), None)
    with span("moe", "gating"):
        torch.ones(8).topk(2)
    reference.linear(torch.ones(2, 8), packed)
    reference.linear(torch.ones(2, 8), packed)
    with span("sampling", "sample"):
        torch.ones(8).argmax()


def test_torch_npu_is_called_as_it_documents(tmp_path: Path, npu: Callable[..., StandIn]) -> None:
    stand_in, trace = npu(), tmp_path / "trace.json"
    steps = device_profile.record_steps("torch_npu", "npu", reference, two_linears, [[], [], []], trace)
    (opened,) = stand_in.opened
    assert opened["activities"] == ["cpu", "npu"]
    assert (opened["config"].level, opened["config"].export_type) == ("Level1", "text")
    assert len(steps) == 2
    for step in steps:
        assert {name for _, name, _, _ in step.events} == {"DynamicQuant"}
        assert sorted(kind for kind, *_ in step.events) == ["linear", "linear", "moe", "sampling"]
        assert sum(step.shares().values()) == pytest.approx(1)
    assert any(each["name"] == "twinpool step" for each in json.loads(trace.read_text()))


def test_an_npu_that_ran_nothing_is_an_error(tmp_path: Path, npu: Callable[..., StandIn]) -> None:
    npu(has_no_device=True)
    with pytest.raises(ConfigError, match=r"wrote 0 files .*kernel_details.csv"):
        device_profile.record_steps("torch_npu", "npu", reference, two_linears, [[], []], tmp_path / "trace.json")


def test_a_missing_torch_npu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record() -> None:
        device_profile.record_steps("torch_npu", "npu", reference, two_linears, [[], []], tmp_path / "trace.json")

    with pytest.raises(ConfigError, match="the package torch_npu is not installed"):
        record()
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be imported \(libascendcl.so.*is CANN installed"):
        record()
    (tmp_path / "torch_npu.py").write_text("class npu:\n    is_available = staticmethod(lambda: False)\n")
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="finds no Ascend device"):
        record()
    del sys.modules["torch_npu"]


def test_torch_npu_is_refused_for_what_computes_elsewhere(npu: Callable[..., StandIn]) -> None:
    npu()
    with pytest.raises(ConfigError, match="computes on the device cpu, which is no NPU"):
        device_profile.find("torch_npu", "cpu")


def test_a_missing_cuda_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        device_profile.record_steps("torch", "cuda", reference, two_linears, [[], []], tmp_path / "trace.json")


def test_operators_are_put_back_when_a_step_fails(tmp_path: Path) -> None:
    before = reference.linear

    def fail(items: Any, span: Any) -> None:
        raise ValueError("no step")

    with pytest.raises(ValueError, match="no step"):
        device_profile.record_steps("torch", "cpu", reference, fail, [[], []], tmp_path / "trace.json")
    assert reference.linear is before
