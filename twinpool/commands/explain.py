"""twinpool explain: why a request went to the workers it went to."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from rich.table import Table

from twinpool.commands.connection import add_router_option, connect
from twinpool.commands.tables import console
from twinpool.results import Decision


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="why a request went where it went",
        description="For each attempt: the class, the pairs of workers that had room, what was predicted of each, the "
        "choice. A router remembers the last 1,000 requests that it placed.",
    )
    parser.add_argument(
        "request_id", metavar="REQUEST_ID", help="as chosen by the client, or from the answer or the log"
    )
    add_router_option(parser)
    parser.add_argument("--json", action="store_true", help="print it as one JSON array")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with connect(args, timeout_s=10) as client:
        decisions = client.explain(args.request_id)
    if args.json:
        print(json.dumps([dataclasses.asdict(decision) for decision in decisions]))
        return 0
    for decision in decisions:
        console().print(_table(decision))
    return 0


def _table(decision: Decision) -> Table:
    title = (
        f"attempt {decision.attempt}: {decision.sla_class}, {decision.input_class} "
        f"({decision.prompt_tokens} tokens), policy {decision.policy}, placed after {decision.queued_ms:.1f} ms"
    )
    table = Table(title=title, title_justify="left", caption=decision.reason, caption_justify="left")
    for name in ("", "prefill", "decode"):
        table.add_column(name)
    for name in ("cached", "reserve", "queue", "prefill", "TTFT", "transfer", "TPOT", "cost"):
        table.add_column(name, justify="right")
    for i, pair in enumerate(decision.candidates):
        times = (pair.reserve_ms, pair.queue_ms, pair.prefill_ms, pair.ttft_ms, pair.transfer_ms, pair.tpot_ms)
        table.add_row(
            "chosen" if i == 0 else "" if pair.known else "new",
            pair.prefill_worker,
            pair.decode_worker or "-",
            str(pair.cached_tokens),
            *(f"{value:.1f} ms" for value in times),
            f"{pair.cost:.3g}",
        )
    return table
