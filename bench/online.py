"""Drives a deployment's public API open-loop and reports latency, goodput and throughput.

    python -m bench.online --address 127.0.0.1:7070 --rate 2 --requests 200 --mix 70:30
    python -m bench.online --local --rate 0.5 --requests 20    # its own deployment: one prefill, one decode worker
    python -m bench.online --policy compare --rate 12 --requests 200    # placement policies, on fake workers

1. Make a distinct prompt of real text for each request (workload.py).
2. Send each at its own time, drawn from a Poisson process, whether earlier ones have ended or not.
3. Note when each token arrives; a request that fails is an error with its class name.
4. Print a table, then one JSON object as the last line (report.py).

Output lengths are exact (greedy, end-of-sequence ignored), and the SDK's retries are off. With --local it also says
what the decode worker held in memory at most (Linux).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from bench import machine, memory, workload
from bench.compare import compare
from bench.report import Outcome, Target, summarize, table
from bench.workload import Arrival, Shape
from decode.config import DecodeConfig
from router.config import RouterConfig
from service.config import load
from twinpool import errors, model_store
from twinpool.client import AsyncClient
from twinpool.deployment import Deployment, DeploymentSpec


async def drive(args: argparse.Namespace, address: str) -> list[Outcome]:
    """The whole run against `address`: prompts, warm-up one by one, then every arrival at its time."""
    shapes = (
        Shape(name="short", weight=args.mix[0], prompt_tokens=args.short_tokens, sla_class=args.sla_short),
        Shape(name="long", weight=args.mix[1], prompt_tokens=args.long_tokens, sla_class=args.sla_long),
    )
    warm = [Arrival(at_s=0.0, shape=shapes[i % len(shapes)]) for i in range(args.warmup)]
    planned = warm + workload.arrivals(args.rate, args.requests, shapes, args.seed)
    outcomes = [Outcome(shape=a.shape.name, sla_class=a.shape.sla_class, due_s=a.at_s) for a in planned]
    async with AsyncClient(address, retries=0, timeout_s=args.timeout) as client:
        lengths = [a.shape.prompt_tokens for a in planned]
        tokenize = partial(client.tokenize, special_tokens=False)
        prompts = await workload.prompts(lengths, secrets.token_hex(4), tokenize, client.detokenize, args.seed)
        for prompt, outcome in zip(prompts[: len(warm)], outcomes, strict=False):
            await workload.send(client, prompt, outcome, args.max_tokens, time.perf_counter())
        await workload.send_all(client, prompts[len(warm) :], outcomes[len(warm) :], args.max_tokens)
    return outcomes[len(warm) :]


def measure(args: argparse.Namespace, address: str, decode_pid: int | None = None) -> int:
    """Drives, prints, and answers with the exit status: 1 when no request finished.

    decode_pid: of a decode worker whose memory is looked at meanwhile.
    """
    with memory.Watch(decode_pid) if decode_pid else nullcontext() as watch:
        outcomes = asyncio.run(drive(args, address))
    held = decode_worker_memory(watch.most) if watch and watch.most else {}
    summary = summarize(outcomes, {**default_targets(), **dict(args.target)})
    print(table(summary))
    print(
        f"{summary['completed']} finished, {summary['errors']} errors {summary['errors_by_kind'] or ''}; "
        f"goodput {summary['goodput_rps']} requests/s of {summary['rate_achieved_rps']} sent, "
        f"{summary['output_tokens_per_s']} output tokens/s, {summary['cached_tokens']} prompt tokens from the cache"
    )
    if held:
        print(
            f"decode worker: {held['decode_worker_memory_mb']} MB beside weights, cache and --swap, and "
            f"{held['decode_worker_libraries_mb']} MB of libraries"
        )
    asked = {
        "rate_rps": args.rate,
        "mix": ":".join(f"{weight:g}" for weight in args.mix),
        "short_tokens": args.short_tokens,
        "long_tokens": args.long_tokens,
        "max_tokens": args.max_tokens,
        "seed": args.seed,
    }
    print(json.dumps({"bench": "online", **machine.describe(), **asked, **summary, **held}))
    return 0 if summary["completed"] else 1


def run_local(args: argparse.Namespace) -> int:
    """Measures a deployment of its own; the cores are split between the two workers."""
    model = args.model or model_store.DEFAULT_MODEL
    spec = DeploymentSpec(
        model=model_store.ensure(model), model_name=model_store.served_name(model), prefill=1, decode=1
    )
    with Deployment(spec, lambda line: print(line, file=sys.stderr)) as deployment:
        deployment.start(timeout_s=300)
        (decode_worker,) = (child for child in deployment.children if child.name == "decode-0")
        return measure(args, deployment.address, decode_worker.pid)


def decode_worker_memory(most: Mapping[str, int]) -> dict[str, float]:
    """Of what it held at most, in MB: its own beside the configured memory for preempted sequences, and the rest."""
    swap = load(DecodeConfig, "decode", ()).swap
    mb = {kind: round(num_bytes / 1e6, 1) for kind, num_bytes in most.items()}
    return {
        "decode_worker_memory_mb": round((most[memory.OWN] - swap) / 1e6, 1),
        "decode_worker_swap_mb": round(swap / 1e6, 1),
        "decode_worker_cache_mb": mb[memory.CACHE],
        "decode_worker_weights_mb": mb[memory.WEIGHTS],
        "decode_worker_libraries_mb": mb[memory.LIBRARIES],
    }


def default_targets() -> dict[str, Target]:
    """What the router promises for its classes unless it is configured otherwise."""
    classes = RouterConfig(tokenizer=os.devnull).parsed_classes()
    return {sla.name: Target(ttft_ms=sla.ttft_ms, tpot_ms=sla.tpot_ms) for sla in classes}


def target(text: str) -> tuple[str, Target]:
    """`"interactive=1000:100"` -> the class and its TTFT and TPOT targets in ms."""
    name, _, limits = text.partition("=")
    ttft, _, tpot = limits.partition(":")
    return name, Target(ttft_ms=float(ttft), tpot_ms=float(tpot))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.online", description=(__doc__ or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--address", metavar="HOST:PORT", help="a running router")
    where.add_argument("--local", action="store_true", help="start one router, one prefill and one decode worker here")
    where.add_argument(
        "--policy", choices=("compare",), help="all placement policies on 2 + 2 fake workers of real timing"
    )
    parser.add_argument(
        "--speeds",
        type=parse_speeds,
        default=(1.0, 1.0),
        help="with --policy: of the workers of a pool (default 1,1)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="with --policy: how many, from --seed on (default 3)")
    parser.add_argument("--model", default="", help="with --local: a directory or known name (default: the demo's)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second, mean (default 1)")
    parser.add_argument("--requests", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--mix", type=workload.parse_mix, default=(70.0, 30.0), help="short:long (default 70:30)")
    parser.add_argument("--short-tokens", type=int, default=64, help="prompt tokens of a short one (default 64)")
    parser.add_argument("--long-tokens", type=int, default=1500, help="prompt tokens of a long one (default 1500)")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens, exact (default 64)")
    parser.add_argument("--sla-short", default="interactive", help="SLA class of short ones (default interactive)")
    parser.add_argument("--sla-long", default="batch", help="SLA class of long ones (default batch)")
    parser.add_argument(
        "--target",
        type=target,
        action="append",
        default=[],
        metavar="CLASS=TTFT:TPOT",
        help="ms a class promises, 0 for nothing; repeatable (default: the router's own defaults)",
    )
    parser.add_argument("--warmup", type=int, default=4, help="requests before the run, one by one (default 4)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a request may take (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, order and text (default 0)")
    args = parser.parse_args(argv)
    if args.rate <= 0 or min(args.seeds, args.requests, args.short_tokens, args.long_tokens, args.max_tokens) < 1:
        parser.error("--rate, --seeds, --requests and the token counts must be over 0")
    known = {*default_targets(), *dict(args.target)}
    for name in (args.sla_short, args.sla_long):
        if name not in known:
            parser.error(f"class {name!r} has no targets: say --target {name}=TTFT:TPOT")
    return args


def parse_speeds(text: str) -> tuple[float, ...]:
    """`"1,0.5"` -> how fast the workers of each pool are, one after the other. Raises ValueError."""
    speeds = tuple(float(part) for part in text.split(","))
    if not speeds or min(speeds) <= 0:
        raise ValueError(f"speeds {text!r}: write numbers over 0, as 1,0.5")
    return speeds


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        if args.policy:
            return compare(args)
        return run_local(args) if args.local else measure(args, args.address)
    except errors.TwinpoolError as error:
        print(f"bench.online: {error.message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
