"""A profiled step in figures: by kind its share of the time, and its work against the limits of the machine."""

from __future__ import annotations

from rich.table import Table

from bench.limits import Limits
from bench.step import KINDS, Step
from bench.work import Work, work
from engine.engine import Engine


def figures(engine: Engine, step: Step, limits: Limits) -> dict[str, dict[str, float]]:
    """By kind: share of the step's time, and bytes, operations and their rates where they are counted."""
    needed, kinds = work(engine, step.items, step.chosen_experts), {}
    for kind, share in step.shares().items():
        kinds[kind] = {"share": round(share, 4), "ms": round(share * step.seconds * 1e3, 4)}
        if kind in needed and share:
            kinds[kind] |= _rates(needed[kind], share * step.seconds, limits)
    return kinds


def _rates(needed: Work, seconds: float, limits: Limits) -> dict[str, float]:
    return {
        "bytes": needed.num_bytes,
        "operations": needed.operations,
        "gb_s": round(needed.num_bytes / seconds / 1e9, 3),
        "gop_s": round(needed.operations / seconds / 1e9, 3),
        "of_read_limit": round(needed.num_bytes / seconds / limits.bytes_per_s, 3),
        "of_multiply_limit": round(needed.operations / seconds / limits.operations_per_s, 3),
    }


def table(kinds: dict[str, dict[str, float]], seconds: float, limits: Limits) -> Table:
    read, multiply = limits.bytes_per_s / 1e9, limits.operations_per_s / 1e9
    shown = Table(title=f"step of {seconds * 1e3:.2f} ms; limits {read:.1f} GB/s, {multiply:.0f} Gop/s")
    shown.add_column("kind", no_wrap=True)
    for column in ("share", "ms", "MB", "GB/s", "of limit", "Gop", "Gop/s", "of limit"):
        shown.add_column(column, justify="right")
    for kind in KINDS:
        each = kinds[kind]
        cells = [kind, f"{each['share']:.1%}", _short(each["ms"])]
        if "bytes" in each:
            cells += [_short(each["bytes"] / 1e6), _short(each["gb_s"]), f"{each['of_read_limit']:.2f}"]
            cells += [_short(each["operations"] / 1e9), _short(each["gop_s"]), f"{each['of_multiply_limit']:.2f}"]
        shown.add_row(*cells)
    return shown


def _short(number: float) -> str:
    """Three digits or all before the point."""
    return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2 if number >= 1 else 3}f}"
