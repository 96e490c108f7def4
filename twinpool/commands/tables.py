"""How pools and timelines look in a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinpool.results import Pools, Timeline, Usage, Worker

_STATE_STYLES = {"ready": "green", "draining": "yellow", "suspect": "red", "joining": "cyan", "probing": "cyan"}
_MODES = {
    "split": "by a prefill and a decode worker",
    "local": "by a decode worker that computed the prompt too",
    "aggregated": "by one worker, while the other pool was empty",
}


def console(file: TextIO | None = None) -> Console:
    """A console that does not squeeze tables to 80 columns when its output is piped."""
    out = file or sys.stdout
    return Console(file=out, highlight=False, width=None if out.isatty() else 160)


def pools_table(pools: Pools) -> Table:
    caption = f"router: {pools.queued} queued, {pools.running} running"
    if pools.mode == "aggregated":
        caption += "; a pool is empty, the other one serves whole answers"
    for size in pools.sizes:
        caption += f"\n{size.pool}: {size.current} joined, {size.desired} desired ({size.reason})"
    for worker in pools.workers:
        if worker.reason:
            caption += f"\n{worker.worker_id} is {worker.state}: {worker.reason}"
        elif other := _without_partner(worker, pools):
            caption += f"\n{worker.worker_id} fits no {other} worker, and gets nothing while others form pairs: "
            caption += "it has other weights, --dtype, --kv-dtype or another version"
    table = Table(caption=caption, caption_justify="left")
    for name in ("pool", "worker", "state", "address"):
        table.add_column(name)
    for name in ("running", "waiting", "rows free", "rows", "tokens/s", "age"):
        table.add_column(name, justify="right")
    for worker in sorted(pools.workers, key=lambda worker: (worker.pool != "prefill", worker.pool, worker.worker_id)):
        table.add_row(
            worker.pool,
            worker.worker_id,
            Text(worker.state, style=_STATE_STYLES.get(worker.state, "")),
            worker.address,
            str(worker.running),
            str(worker.waiting),
            str(worker.rows_free),
            str(worker.rows_total),
            f"{worker.tokens_per_s:.1f}",
            _age(worker.age_s),
        )
    return table


def _without_partner(worker: Worker, pools: Pools) -> str:
    """The pool in which nobody has this worker's fingerprint, though its neighbours have partners there; else ""."""
    partners = {other.fingerprint for other in pools.workers if other.pool != worker.pool}
    paired = any(other.fingerprint in partners for other in pools.workers if other.pool == worker.pool)
    if not paired or worker.fingerprint in partners:
        return ""
    return "decode" if worker.pool == "prefill" else "prefill"


def timeline_table(timeline: Timeline, usage: Usage) -> Table:
    """Where one request's time went; tokens/s is over the time after the first token."""
    table = Table(show_header=False, title="where the time went", title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    tokens_per_s = 1000.0 / timeline.tpot_ms if timeline.tpot_ms > 0 else 0.0
    rows = [
        ("queued", _ms(timeline.queued_ms), "in the router, until a pair of workers was chosen"),
        ("reserve", _ms(timeline.reserve_ms), f"rows set aside on {timeline.decode_worker}"),
        ("prefill queue", _ms(timeline.prefill_queue_ms), f"on {timeline.prefill_worker}"),
        (
            "prefill",
            _ms(timeline.prefill_ms),
            f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached",
        ),
        ("transfer", _ms(timeline.transfer_ms), f"{timeline.transfer_bytes:,} bytes of KV, while prefill computed"),
        ("  not hidden", _ms(timeline.transfer_wait_ms), "part of it after the first token"),
        ("TTFT", _ms(timeline.ttft_ms), "time to the first token"),
        ("TPOT", _ms(timeline.tpot_ms), f"time per token after it, on {timeline.decode_worker}"),
        ("tokens/s", f"{tokens_per_s:.1f}", f"{usage.completion_tokens} tokens of answer"),
        ("total", _ms(timeline.total_ms), f"{timeline.input_class} input, class {timeline.sla_class}"),
        ("served", timeline.mode, _MODES.get(timeline.mode, "")),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _ms(value: float) -> str:
    return f"{value:.1f} ms"


def _age(seconds: float) -> str:
    minutes, _ = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{int(seconds) % 60:02}s" if minutes else f"{seconds:.0f}s"
