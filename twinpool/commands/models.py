"""twinpool models: what is served; with --known, what can be fetched by name."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from twinpool import model_store
from twinpool.commands.connection import add_router_option, connect
from twinpool.commands.tables import console


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("models", help="what is served", description="The models that the router serves.")
    add_router_option(parser)
    parser.add_argument("--known", action="store_true", help="list the names that `up --model` takes instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    table = Table("name", *(("also", "download") if args.known else ("context", "vocabulary", "architecture")))
    if args.known:
        for known in model_store.KNOWN_MODELS:
            table.add_row(known.name, ", ".join(known.aliases), f"{known.download_bytes / 1e6:.0f} MB")
    else:
        with connect(args, timeout_s=10) as client:
            for model in client.models():
                table.add_row(model.name, str(model.context_length), str(model.vocab_size), model.architecture)
    console().print(table)
    return 0
