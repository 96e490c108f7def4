"""The --router option that every command which talks to a router has."""

from __future__ import annotations

import argparse
from typing import Any

from twinpool.calls import DEFAULT_ADDRESS
from twinpool.client import Client


def add_router_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router",
        metavar="HOST:PORT,...",
        default=None,
        help=f"router to ask, or several of which any will do [default {DEFAULT_ADDRESS}; env TWINPOOL_ROUTERS]",
    )


def connect(args: argparse.Namespace, **options: Any) -> Client:
    return Client(args.router, **options)
