"""What a number was measured on and with: for the JSON line of every benchmark."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from engine.ops.cpu_pages import LargePages


def describe() -> dict[str, object]:
    """commit ("-dirty" when the tree differs from it; "" outside a checkout), CPU model, and cores we may use."""
    return {"commit": _commit(), "cpu": _cpu(), "cores": len(os.sched_getaffinity(0))}


def memory_to_read(num_bytes: int) -> torch.Tensor:
    """int64 array for measuring the read bandwidth, in large pages as weights are: in small ones less is possible."""
    return LargePages().take(num_bytes).fill_(1).view(torch.int64)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        got = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return got.stdout.strip()


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
