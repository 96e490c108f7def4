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
from twinpool.errors import ConfigError, DeadlineExceeded, Unavailable

_LONGEST_INTERVAL_S = 86400.0


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
    if not 0 <= args.interval <= _LONGEST_INTERVAL_S:  # nan neither
        raise ConfigError(f"--interval {args.interval:g}: it is 0 to {_LONGEST_INTERVAL_S:g} seconds", field="interval")
    interval_s = max(0.05, args.interval)
    with connect(args, timeout_s=10) as client:
        if args.watch:
            with Live(pools_table(client.pools()), console=console(), auto_refresh=False) as live:
                while True:
                    time.sleep(interval_s)
                    try:
                        shown: Any = pools_table(client.pools())
                    except (Unavailable, DeadlineExceeded) as error:  # it may be back at the next look
                        shown = f"{time.strftime('%H:%M:%S')} {error.message}"
                    live.update(shown, refresh=True)
        elif args.json:
            print(json.dumps(dataclasses.asdict(client.pools())))
        else:
            console().print(pools_table(client.pools()))
    return 0
