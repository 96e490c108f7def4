"""twinpool pools: both pools as the router sees them, once or live."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

from rich.live import Live

from twinpool.commands.connection import add_router_option, connect
from twinpool.commands.tables import console, pools_table


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "pools", help="state and load of both pools", description="Every worker: state, load, free rows, tokens/s."
    )
    add_router_option(parser)
    parser.add_argument("--watch", action="store_true", help="keep showing it, until Ctrl-C")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks [default 1]")
    parser.add_argument("--json", action="store_true", help="print it as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with connect(args, timeout_s=10) as client:
        if args.watch:
            with Live(pools_table(client.pools()), console=console(), auto_refresh=False) as live:
                while True:
                    time.sleep(max(0.05, args.interval))
                    live.update(pools_table(client.pools()), refresh=True)
        elif args.json:
            print(json.dumps(dataclasses.asdict(client.pools())))
        else:
            console().print(pools_table(client.pools()))
    return 0
