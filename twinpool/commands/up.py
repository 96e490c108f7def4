"""twinpool up: a whole deployment on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from twinpool import model_store
from twinpool.commands.progress import progress_bars
from twinpool.deployment import Deployment, DeploymentSpec, parse_cores
from twinpool.errors import ConfigError

# Passed on to every worker when given; `python -m decode --help` says more.
_WORKER_FLAGS = {
    "memory": 'KV cache of each worker, such as 512MiB, or a fraction of the memory ("0.2")',
    "dtype": "of weights and activations: bf16 or fp32",
    "kv-dtype": "what the cache stores and ships: int8, bf16 or fp32",
    "block-size": "tokens in one cache row",
    "backend": "operators to run on: cpu or reference",
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "up",
        help="start a router, prefill and decode workers here",
        description="Starts one router, prefill and decode workers as processes on this machine, looks after them, and "
        "stops them at Ctrl-C. Options not listed here reach the processes as TWINPOOL_* environment variables.",
    )
    add_deployment_flags(parser)
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill workers [default 1]")
    parser.add_argument("--decode", type=int, default=1, metavar="M", help="decode workers [default 1]")
    parser.add_argument("--host", default="127.0.0.1", help="address the router listens on [default 127.0.0.1]")
    parser.add_argument("--port", type=int, default=7070, help="the router's port; 0 picks a free one [default 7070]")
    parser.add_argument(
        "--metrics-port", type=int, default=9070, help="its /metrics; 0 picks a free one, -1 is off [default 9070]"
    )
    parser.add_argument(
        "--log-mib",
        type=float,
        default=64,
        metavar="MIB",
        help="size at which the log of a process becomes NAME.log.1, in place of the one before; 0: never [default 64]",
    )
    parser.set_defaults(run=run)


def add_deployment_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `up` and `demo` share."""
    names = ", ".join(model.name for model in model_store.KNOWN_MODELS)
    parser.add_argument(
        "--model",
        default=model_store.DEFAULT_MODEL,
        metavar="PATH_OR_NAME",
        help=f"Hugging Face directory, .gguf file, or one of: {names} [default {model_store.DEFAULT_MODEL}]",
    )
    parser.add_argument("--model-name", default="", help="what clients call it [default: the name or file's name]")
    parser.add_argument("--cores", default="", help='CPU cores to split over the workers, as in "0-3,8" [default: all]')
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="S", help="seconds [default 300]")
    for name, help_text in _WORKER_FLAGS.items():
        parser.add_argument(f"--{name}", help=help_text, default=None)


def run(args: argparse.Namespace) -> int:
    for pool in ("prefill", "decode"):
        if not 0 <= getattr(args, pool) <= 1024:
            raise ConfigError(f"--{pool} {getattr(args, pool)}: the number of workers is from 0 to 1024", field=pool)
    if not 0 <= args.log_mib < math.inf:  # nan neither
        raise ConfigError(f"--log-mib {args.log_mib:g}: it is a number of MiB, 0 or more", field="log_mib")
    with (
        ended_by_signals(),
        open_deployment(
            args,
            prefill=args.prefill,
            decode=args.decode,
            host=args.host,
            port=args.port,
            metrics_port=args.metrics_port,
            log_bytes=math.ceil(args.log_mib * (1 << 20)),
        ) as deployment,
    ):
        spec = deployment.spec
        say(
            f"{spec.model_name} is served at {deployment.address}: {spec.prefill} prefill, {spec.decode} decode workers"
        )
        if not spec.prefill and not spec.decode:
            say(f"  it answers nothing until workers join it: python -m prefill --routers {deployment.address} ...")
        say(f"  talk     twinpool chat --router {deployment.address}")
        say(f"  watch    twinpool pools --watch --router {deployment.address}")
        if deployment.metrics_url:
            say(f"  metrics  {deployment.metrics_url}")
        say("Ctrl-C stops all of it")
        deployment.watch()
    return 0


@contextmanager
def open_deployment(args: argparse.Namespace, **values: Any) -> Iterator[Deployment]:
    """A started deployment; stopped at the end, whatever happens."""
    if not 0 < args.start_timeout < math.inf:  # nan neither
        raise ConfigError(f"--start-timeout {args.start_timeout:g}: it is a number of seconds over 0", field="timeout")
    with progress_bars() as progress:
        model = model_store.ensure(args.model, progress)
    spec = DeploymentSpec(
        model=model,
        model_name=args.model_name or model_store.served_name(args.model),
        cores=parse_cores(args.cores) if args.cores else (),
        worker_options={name: value for name in _WORKER_FLAGS if (value := getattr(args, name.replace("-", "_")))},
        **values,
    )
    with Deployment(spec, say) as deployment:
        say(f"logs: {deployment.log_folder}")
        deployment.start(args.start_timeout)
        yield deployment


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that what it started is stopped."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
