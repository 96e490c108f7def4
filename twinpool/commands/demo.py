"""twinpool demo: fetches the default model, starts all of it, asks one question, shows where the time went."""

from __future__ import annotations

import argparse
from typing import Any

from twinpool.client import Client
from twinpool.commands.tables import console, timeline_table
from twinpool.commands.up import add_deployment_flags, ended_by_signals, open_deployment

QUESTION = "What is the capital of France?"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="start all of it, ask a question, stop",
        description="Fetches the default model once, starts one router, one prefill and one decode worker on free "
        "ports, asks a question through the SDK, streams the answer, prints where the time went, and stops them.",
    )
    add_deployment_flags(parser)
    parser.add_argument("--question", default=QUESTION, help=f"[default: {QUESTION}]")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with ended_by_signals(), open_deployment(args, prefill=1, decode=1) as deployment:
        with Client(deployment.address, timeout_s=120) as client:
            print(f"\n> {args.question}", flush=True)
            with client.stream_chat(args.question, temperature=0, max_tokens=128) as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
                answer = stream.read()
            print("\n", flush=True)
            console().print(timeline_table(answer.timeline, answer.usage))
    return 0
