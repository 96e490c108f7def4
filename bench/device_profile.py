"""Steps recorded by torch's own profilers: torch.profiler on a CPU and on CUDA, torch_npu.profiler on Ascend.

Both have the same interface: activities, a schedule, a handler that writes what was recorded into a folder. None of it
needs the native CPU library. torch_npu's part is written against its documentation and has not run on an NPU yet
(tests/bench/test_device_profile.py holds the calls to the documented signatures).
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.device_trace import PREFIX, STEP, DeviceOperator, Span, Trace, ascend_operators
from bench.operators import Operators
from bench.step import Event, Step
from engine.batch import BatchItem
from twinpool.errors import ConfigError

TORCH, TORCH_NPU = "torch", "torch_npu"


def record_steps(
    tool: str,
    device: str,
    backend: ModuleType,
    take_step: Callable[[Sequence[BatchItem], Any], None],
    steps: Sequence[Sequence[BatchItem]],
    trace_to: Path,
) -> list[Step]:
    """Runs a step for each list of items, the first for warming up, and writes the trace of all.

    tool: TORCH or TORCH_NPU; device: torch's name of the kind that `backend` computes on; take_step: of the items and
    of what makes a span of a kind and a name. Raises ConfigError where something that `tool` needs is missing.
    """
    profiler = find(tool, device)
    wait = torch.get_device_module(device).synchronize
    operators = Operators(backend, _span)
    chosen = []
    with tempfile.TemporaryDirectory(prefix="twinpool_") as folder:
        try:
            operators.record(True)
            with _open(profiler, tool, device, Path(folder), len(steps) - 1) as recording:
                for items in steps:
                    operators.record(True)
                    with torch.profiler.record_function(STEP):
                        take_step(items, _span)
                        wait()
                    chosen.append(operators.chosen_experts)
                    recording.step()
        finally:
            operators.record(False)
        trace, on_device = _written(tool, device, Path(folder), trace_to)
    if len(trace.steps) != len(steps) - 1:
        raise ConfigError(f"{tool} recorded {len(trace.steps)} of {len(steps) - 1} steps: no table without all of them")
    return [
        Step(
            items=items, events=_events(trace, step, on_device), seconds=(step.end - step.begin) / 1e6, chosen_experts=c
        )
        for items, step, c in zip(steps[1:], trace.steps, chosen[1:], strict=True)
    ]


def _span(kind: str, name: str) -> Any:
    return torch.profiler.record_function(f"{PREFIX}{kind}: {name}")


def find(tool: str, device: str) -> Any:
    """The module of that tool, for that device. Raises ConfigError saying what is missing."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--profiler torch: torch finds no CUDA device")
    if tool == TORCH:
        return torch.profiler
    if importlib.util.find_spec("torch_npu") is None:
        raise ConfigError(
            "--profiler torch_npu: the package torch_npu is not installed; it profiles Ascend NPUs, and needs CANN"
        )
    try:
        torch_npu = importlib.import_module("torch_npu")
    except (ImportError, OSError) as exc:
        raise ConfigError(f"--profiler torch_npu: torch_npu cannot be imported ({exc}); is CANN installed?") from exc
    if not torch_npu.npu.is_available():
        raise ConfigError("--profiler torch_npu: torch_npu finds no Ascend device")
    if device != "npu":
        raise ConfigError(f"--profiler torch_npu: the backend computes on the device {device}, which is no NPU")
    return torch_npu.profiler


def _open(profiler: Any, tool: str, device: str, folder: Path, active: int) -> Any:
    options = {}
    if tool == TORCH_NPU:
        # Level 1 has communication and CANN's launches beside the operators. Text: files that can be read without it.
        options["experimental_config"] = profiler._ExperimentalConfig(
            export_type=profiler.ExportType.Text, profiler_level=profiler.ProfilerLevel.Level1
        )
    on_device = "NPU" if tool == TORCH_NPU else "CUDA" if device == "cuda" else "CPU"
    return profiler.profile(
        activities=[getattr(profiler.ProfilerActivity, name) for name in sorted({"CPU", on_device})],
        schedule=profiler.schedule(wait=0, warmup=1, active=active, repeat=1),
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder)),
        **options,
    )


def _written(tool: str, device: str, folder: Path, trace_to: Path) -> tuple[Trace, list[DeviceOperator] | None]:
    """The trace, which is kept at `trace_to`, and what ran on the device, None: it is the CPU."""
    if tool == TORCH:
        shutil.copyfile(_only(tool, folder, "*.pt.trace.json"), trace_to)
        trace = Trace(trace_to)
        on_device = trace.cuda_operators() if device == "cuda" else None
    else:
        shutil.copyfile(_only(tool, folder, "*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json"), trace_to)
        trace = Trace(trace_to)
        on_device = ascend_operators(_only(tool, folder, "*_ascend_pt/ASCEND_PROFILER_OUTPUT/kernel_details.csv"))
    if on_device == []:
        raise ConfigError(f"{tool} saw no operator on the device {device}: does the backend compute there?")
    return trace, on_device


def _only(tool: str, folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ConfigError(f"{tool} wrote {len(found)} files {pattern}, where there should be one")
    return found[0]


def _events(trace: Trace, step: Span, on_device: list[DeviceOperator] | None) -> list[Event]:
    return trace.on_host(step) if on_device is None else trace.on_device(step, on_device)
