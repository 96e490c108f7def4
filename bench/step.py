"""One profiled step: what ran when, the share of each kind in its time, and a trace of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.batch import BatchItem

KINDS = ("attention", "kv_access", "linear", "moe", "sampling", "other")

Event = tuple[str, str, int, int]  # kind, name, begin and end in ns of one clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """events: by begin. chosen_experts: of each layer with experts, those that any token was sent to."""

    items: Sequence[BatchItem]
    events: Sequence[Event]
    seconds: float
    chosen_experts: Sequence[Sequence[int]]

    def shares(self) -> dict[str, float]:
        """Of the step's time, adding up to 1. Where events overlap, the time is of the one that began first; "other"
        is also what no event covers."""
        spent, behind = dict.fromkeys(KINDS, 0), 0
        for kind, _, begin, end in self.events:
            begin = max(begin, behind)
            if end > begin:
                spent[kind] += end - begin
                behind = end
        whole = max(self.seconds * 1e9, sum(spent.values()))
        shares = {kind: each / whole for kind, each in spent.items()}
        shares["other"] += 1 - sum(shares.values())
        return shares


def median_step(steps: Sequence[Step]) -> Step:
    """The one of median time, whose shares add up."""
    return sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]


def write_trace(path: Path, step: Step) -> None:
    """The Chrome trace event format: complete events, in microseconds."""
    first = min(begin for _, _, begin, _ in step.events)
    events = [
        {"ph": "X", "pid": 0, "tid": 0, "cat": kind, "name": f"{kind}: {name}"}
        | {"ts": (begin - first) / 1e3, "dur": (end - begin) / 1e3}
        for kind, name, begin, end in step.events
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
