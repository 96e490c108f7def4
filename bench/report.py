"""From what happened to each request of an online run to the figures: one table, one JSON object.

TTFT is counted from the time a request was due, not from when it was sent, so that a client or server that falls behind
cannot hide it (coordinated omission). A failed request counts as an error and misses its targets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twinpool.errors import TwinpoolError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a class promises; 0: nothing. A request is good when it keeps both."""

    ttft_ms: float
    tpot_ms: float


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request; times in seconds after the start of the run. Written by the task that sends it."""

    shape: str
    sla_class: str
    due_s: float
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)  # arrival of each output token
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""  # class name; empty when it finished
    failure: TwinpoolError | None = None  # what it stands for

    @property
    def ttft_ms(self) -> float:
        return (self.token_s[0] - self.due_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Mean time between tokens; None with fewer than two."""
        gaps = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) * 1e3 / gaps if gaps > 0 else None

    @property
    def itl_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.token_s, self.token_s[1:], strict=False)]

    def good(self, target: Target) -> bool:
        if self.error or not self.token_s:
            return False
        kept = ((self.ttft_ms, target.ttft_ms), (self.tpot_ms or 0.0, target.tpot_ms))
        return all(limit_ms == 0 or got_ms <= limit_ms for got_ms, limit_ms in kept)


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """p50, p90, p99 with linear interpolation; None when there is no value."""
    got = list(values)
    if not got:
        return {"p50": None, "p90": None, "p99": None}
    return {f"p{q}": round(float(np.percentile(got, q)), 2) for q in (50, 90, 99)}


def latencies(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """ttft_ms, tpot_ms and itl_ms of the requests that finished."""
    done = [o for o in outcomes if not o.error and o.token_s]
    return {
        "ttft_ms": percentiles(o.ttft_ms for o in done),
        "tpot_ms": percentiles(t for o in done if (t := o.tpot_ms) is not None),
        "itl_ms": percentiles(gap for o in done for gap in o.itl_ms),
    }


def summarize(outcomes: Sequence[Outcome], targets: Mapping[str, Target]) -> dict[str, Any]:
    """The run as one JSON-ready object. Rates are over the time from the first due request to the last end."""
    duration_s = max(o.end_s for o in outcomes) - min(o.due_s for o in outcomes)
    done = [o for o in outcomes if not o.error]
    span_s = max(o.sent_s for o in outcomes) - min(o.sent_s for o in outcomes)
    return {
        "requests": len(outcomes),
        "completed": len(done),
        "errors": len(outcomes) - len(done),
        "errors_by_kind": dict(Counter(o.error for o in outcomes if o.error)),
        "duration_s": round(duration_s, 2),
        "rate_achieved_rps": round((len(outcomes) - 1) / span_s, 3) if span_s > 0 else None,
        "send_delay_ms": percentiles((o.sent_s - o.due_s) * 1e3 for o in outcomes),
        **latencies(outcomes),
        "goodput_rps": round(sum(o.good(targets[o.sla_class]) for o in outcomes) / duration_s, 3),
        "output_tokens_per_s": round(sum(len(o.token_s) for o in outcomes) / duration_s, 2),
        "prompt_tokens": sum(o.prompt_tokens for o in outcomes),
        "cached_tokens": sum(o.cached_tokens for o in outcomes),
        "output_tokens": sum(len(o.token_s) for o in outcomes),
        "targets": {name: {"ttft_ms": t.ttft_ms, "tpot_ms": t.tpot_ms} for name, t in targets.items()},
        "by_shape": {
            shape: {
                "requests": len(own := [o for o in outcomes if o.shape == shape]),
                "good": sum(o.good(targets[o.sla_class]) for o in own),
                **latencies(own),
            }
            for shape in sorted({o.shape for o in outcomes})
        },
    }


def table(summary: Mapping[str, Any]) -> str:
    """The same for people: one line a shape, then all together."""
    head = ("", "requests", "good", *(f"{what} {p}" for what in ("TTFT", "TPOT", "ITL") for p in ("p50", "p90", "p99")))
    rows: list[tuple[str, ...]] = [head]
    total_good = sum(part["good"] for part in summary["by_shape"].values())
    for name, part in [*summary["by_shape"].items(), ("all", {**summary, "good": total_good})]:
        figures = [part[f"{what}_ms"][p] for what in ("ttft", "tpot", "itl") for p in ("p50", "p90", "p99")]
        shown = ("-" if figure is None else f"{figure:.1f}" for figure in figures)
        rows.append((name, str(part["requests"]), str(part["good"]), *shown))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
