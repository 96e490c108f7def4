"""Progress bars on stderr, one for each thing that goes on, in the form that `model_store.ensure` reports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from twinpool.commands.tables import console
from twinpool.model_store import Progress as Report


@contextmanager
def progress_bars() -> Iterator[Report]:
    """Yields the function to report to. A bar is taken off the screen's live part as soon as it is full, so that
    another process (the converter) can draw its own."""
    shown: list[tuple[str, Progress]] = []

    def finish() -> None:
        while shown:
            shown.pop()[1].stop()

    def report(what: str, fraction: float) -> None:
        if not shown or shown[0][0] != what:
            finish()
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            bar = Progress(*columns, console=console(sys.stderr))
            bar.add_task(what, total=1.0)
            bar.start()
            shown.append((what, bar))
        bar = shown[0][1]
        bar.update(bar.task_ids[0], completed=fraction)
        if fraction >= 1.0:
            finish()

    try:
        yield report
    finally:
        finish()
