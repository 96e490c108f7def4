"""What the machine can do at most, measured: bytes read a second, and products of bf16 (two operations each) a second.

Of a device, and of the CPU's reference, by torch's own operators; of the native CPU backend by its matrices, which are
faster than torch's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.machine import memory_to_read

_REPEATS = 9
_ROWS, _INPUTS, _OUTPUTS = 240, 576, 512  # a matrix of 0.6 MB, which stays in a cache
_DEVICE_WIDTH, _DEVICE_BYTES = 4096, 1 << 30  # large enough to fill any device


@dataclass(frozen=True, slots=True)
class Limits:
    bytes_per_s: float
    operations_per_s: float


def native_limits(threads: int) -> Limits:
    """Of the native CPU backend on so many threads."""
    from engine.ops import cpu  # only here: it needs the native kernels

    array = memory_to_read(256 << 20)
    torch.set_num_threads(threads)
    read = _median_s(array.sum, lambda: None)
    torch.set_num_threads(1)
    x, weight = torch.randn(_ROWS, _INPUTS).bfloat16(), cpu.pack_linear(torch.randn(_OUTPUTS, _INPUTS).bfloat16(), None)
    multiply = _median_s(lambda: cpu.linear(x, weight), lambda: None)
    return Limits(array.nbytes / read, 2 * _ROWS * _INPUTS * _OUTPUTS / multiply)


def torch_limits(device: str) -> Limits:
    """device: torch's name of its kind."""
    wait = torch.get_device_module(device).synchronize
    num_bytes = 256 << 20 if device == "cpu" else _DEVICE_BYTES
    rows, inputs, outputs = (_ROWS, _INPUTS, _OUTPUTS) if device == "cpu" else (_DEVICE_WIDTH,) * 3
    array = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    x, weight = (torch.randn(n, inputs, dtype=torch.bfloat16, device=device) for n in (rows, outputs))
    read = _median_s(array.sum, wait)
    multiply = _median_s(lambda: torch.nn.functional.linear(x, weight), wait)
    return Limits(array.nbytes / read, 2 * rows * inputs * outputs / multiply)


def _median_s(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds of `work` until `wait` returns."""
    taken = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])
