"""Reads what torch.profiler and torch_npu.profiler leave: steps, and in each what ran, as events of our kinds.

Both write Chrome traces with our spans of the host (bench/operators.py) by name, and arrows (flows) from where the host
launched an operator to where the device began it. On a CPU the spans themselves are the events. What ran on a CUDA
device are the trace's events of kernels and copies; what ran on an Ascend NPU are the rows of kernel_details.csv, as
documented for the "Ascend PyTorch Profiler", which has no rows for what only waits.
"""

from __future__ import annotations

import bisect
import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.operator_kinds import kind_of
from bench.step import Event

PREFIX = "twinpool "  # of the names of our spans: "twinpool KIND: NAME"
STEP = f"{PREFIX}step"
_LAUNCHES = ("ac2g", "async_npu")  # categories of arrows from host to device: CUDA's, Ascend's
_ON_CUDA = ("kernel", "gpu_memcpy", "gpu_memset")
_SHADOWS = ("gpu_user_annotation",)  # spans of the host drawn once more above the kernels
_SAME_US = 0.5  # times since 1970 in us are no more exact than this as floats


@dataclass(frozen=True, slots=True)
class Span:
    """begin and end in us; thread: (pid, tid)."""

    name: str
    thread: tuple[Any, Any]
    begin: float
    end: float

    @property
    def kind(self) -> str:
        return self.name.removeprefix(PREFIX).partition(":")[0]


@dataclass(frozen=True, slots=True)
class DeviceOperator:
    """begin and end in us, on the trace's clock."""

    name: str
    begin: float
    end: float


class Trace:
    """Our spans and the arrows of a Chrome trace."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text(encoding="utf-8"))
        self.events: list[dict[str, Any]] = content if isinstance(content, list) else content["traceEvents"]
        spans = [
            Span(each["name"], _thread(each), float(each["ts"]), float(each["ts"]) + float(each["dur"]))
            for each in self.events
            if each.get("ph") == "X" and each["name"].startswith(PREFIX) and each.get("cat") not in _SHADOWS
        ]
        spans.sort(key=lambda span: (span.begin, -span.end))
        self.steps = [span for span in spans if span.name == STEP]
        self.spans = [span for span in spans if span.name != STEP]
        self._begins = [span.begin for span in self.spans]
        self._launches = self._read_launches()

    def on_host(self, step: Span) -> list[Event]:
        """Our spans of a step; the time of those within others is theirs alone."""
        events: list[Event] = []
        open_spans: list[Span] = []
        since = step.begin

        def cut(now: float) -> None:
            nonlocal since
            if open_spans and now > since:
                span = open_spans[-1]
                events.append((span.kind, span.name.partition(": ")[2], _ns(since), _ns(now)))
            since = now

        for span in self.spans:
            if span.thread != step.thread or span.begin < step.begin or span.end > step.end:
                continue
            while open_spans and open_spans[-1].end <= span.begin:
                cut(open_spans[-1].end)
                open_spans.pop()
            cut(span.begin)
            open_spans.append(span)
        while open_spans:
            cut(open_spans[-1].end)
            open_spans.pop()
        return events

    def on_device(self, step: Span, operators: Iterable[DeviceOperator]) -> list[Event]:
        """What began on the device within a step."""
        return sorted(
            (
                (kind_of(each.name, self._launched_in(each)), each.name, _ns(each.begin), _ns(each.end))
                for each in operators
                if step.begin <= each.begin <= step.end
            ),
            key=lambda event: event[2],
        )

    def cuda_operators(self) -> list[DeviceOperator]:
        return [
            DeviceOperator(each["name"], float(each["ts"]), float(each["ts"]) + float(each["dur"]))
            for each in self.events
            if each.get("ph") == "X" and each.get("cat") in _ON_CUDA
        ]

    def _read_launches(self) -> list[tuple[float, tuple[Any, Any], float]]:
        """(begin on the device, thread and time of the launch), by the former."""
        starts = {}
        for each in self.events:
            if each.get("ph") == "s" and each.get("cat") in _LAUNCHES:
                starts[each["cat"], each["id"]] = (_thread(each), float(each["ts"]))
        launches = [
            (float(each["ts"]), *starts[each["cat"], each["id"]])
            for each in self.events
            if each.get("ph") == "f" and (each.get("cat"), each.get("id")) in starts
        ]
        return sorted(launches, key=lambda launch: launch[0])

    def _launched_in(self, operator: DeviceOperator) -> str | None:
        """The kind of the innermost span that was open on the launching thread."""
        place = bisect.bisect_left(self._launches, operator.begin - _SAME_US, key=lambda launch: launch[0])
        if place == len(self._launches) or self._launches[place][0] > operator.begin + _SAME_US:
            return None
        _, thread, launched = self._launches[place]
        for span in reversed(self.spans[: bisect.bisect_right(self._begins, launched)]):
            if span.thread == thread and launched <= span.end:
                return span.kind
        return None


def ascend_operators(path: Path) -> list[DeviceOperator]:
    """The rows of a kernel_details.csv. Numbers there may have tabs around them."""
    found = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            begin = float(row["Start Time(us)"])
            name = row["Type"] if row["Type"] not in ("", "N/A") else row["Name"]
            found.append(DeviceOperator(name.strip(), begin, begin + float(row["Duration(us)"])))
    return found


def _thread(event: dict[str, Any]) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _ns(microseconds: float) -> int:
    return round(microseconds * 1e3)
