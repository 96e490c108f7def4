"""The placement policies against each other, in one run, on fake workers that take the time of real ones.

For each policy a new router and new workers (bench/fake_workers.py) see the same arrivals, and all that again with the
next seed. Besides the policies there is `predict` with `--local-prefill-below auto`: decode workers compute a prompt
where that is predicted to be better. The workers are four times as fast as one core of a small CPU with the default
model, and all times that the router is given four times as tight, so that a run takes half a minute. Much faster ones
would be kept waiting by the event loop that they share with router and client.

The class of the long prompts has a target of its own: 5 s where computing 1,500 tokens alone takes 2.6 s. Where no
target is nearer than what any placement keeps (30 s, as the router's own class for batch work), goodput is alike for
all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from prometheus_client import CollectorRegistry

from bench import machine, workload
from bench.fake_workers import TIMES_AS_FAST, FakeDecode, FakePrefill, Speed, tokenizer_folder
from bench.report import Outcome, Target, summarize
from bench.workload import Shape
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.policies import POLICIES
from router.router import Router
from twinpool.client import AsyncClient

SCALE = 4.0
SHORT, LONG = Target(ttft_ms=1000 / SCALE, tpot_ms=100 / SCALE), Target(ttft_ms=5000 / SCALE, tpot_ms=0)
_WARMUP = 12


_AUTO = "predict+local"  # with local prefill where it is predicted to be better; the others without


async def run_policy(variant: str, seed: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The summary of a policy, or of `_AUTO`, over all arrivals."""
    policy, _, local = variant.partition("+")
    classes = (
        f"interactive:ttft_ms={SHORT.ttft_ms}:tpot_ms={SHORT.tpot_ms}:priority=10:weight=8",
        f"batch:ttft_ms={LONG.ttft_ms}:tpot_ms={LONG.tpot_ms}:queue=1024",
    )
    config = RouterConfig(
        tokenizer=str(folder),
        port=0,
        policy=policy,
        sla_classes=classes,
        heartbeat_ms=250,
        lease_ms=10000,
        prefill_lookahead=1 / SCALE,
        local_prefill_below="auto" if local else "off",
    )
    router = Router(config, RouterMetrics(CollectorRegistry()))
    await router.start()
    address = f"127.0.0.1:{router.port}"
    workers = [FakePrefill(f"prefill-{i}", _speed(each)) for i, each in enumerate(args.speeds)]
    decodes = [FakeDecode(f"decode-{i}", _speed(each)) for i, each in enumerate(args.speeds)]
    try:
        for worker in (*workers, *decodes):
            await worker.start([address])
        async with AsyncClient(address, retries=0, timeout_s=args.timeout) as client:
            await _until_ready(client, 2 * len(args.speeds))
            return await _drive(client, seed, args)
    finally:
        for worker in (*workers, *decodes):
            await worker.stop()
        await router.stop(0)


async def _until_ready(client: AsyncClient, count: int) -> None:
    async with asyncio.timeout(20):
        while sum(worker.state == "ready" for worker in (await client.pools()).workers) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _drive(client: AsyncClient, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    shapes = (
        Shape(name="short", weight=args.mix[0], prompt_tokens=args.short_tokens, sla_class="interactive"),
        Shape(name="long", weight=args.mix[1], prompt_tokens=args.long_tokens, sla_class="batch"),
    )
    planned = workload.arrivals(args.rate, args.requests, shapes, seed)
    outcomes = [Outcome(shape=a.shape.name, sla_class=a.shape.sla_class, due_s=a.at_s) for a in planned]
    for i in range(_WARMUP):
        await client.generate([i + 1] * shapes[i % 2].prompt_tokens, max_tokens=12, ignore_eos=True)
    prompts = [_prompt(number, arrival.shape.prompt_tokens) for number, arrival in enumerate(planned)]
    await workload.send_all(client, prompts, outcomes, args.max_tokens)
    return summarize(outcomes, {"interactive": SHORT, "batch": LONG})


def compare(args: argparse.Namespace) -> int:
    """Runs every policy, prints a line each and one JSON object; 0 when predict keeps what it promises."""
    goodput: dict[str, list[float]] = {variant: [] for variant in (*POLICIES, _AUTO)}
    with tempfile.TemporaryDirectory() as name:
        folder = tokenizer_folder(Path(name))
        for seed in range(args.seed, args.seed + args.seeds):
            for policy in goodput:
                summary = asyncio.run(run_policy(policy, seed, args, folder))
                goodput[policy].append(summary["goodput_rps"])
                by = {shape: (part["good"], part["requests"]) for shape, part in summary["by_shape"].items()}
                short, long = (summary["by_shape"][shape]["ttft_ms"] for shape in ("short", "long"))
                print(
                    f"seed {seed} {policy:>13}: goodput {summary['goodput_rps']:.3f}/s, good {by}, errors "
                    f"{summary['errors']}, TTFT p50/p90 short {short['p50']}/{short['p90']} ms, "
                    f"long {long['p50']}/{long['p90']} ms",
                    flush=True,
                )
    ratios = {
        policy: round(
            median(best / max(value, 1e-9) for best, value in zip(goodput["predict"], values, strict=True)), 3
        )
        for policy, values in goodput.items()
    }
    asked = {"rate_rps": args.rate, "requests": args.requests, "speeds": list(args.speeds), "seed": args.seed}
    result = {"bench": "online.compare", **machine.describe(), **asked, "goodput_rps": goodput, "predict_over": ratios}
    print(json.dumps(result))
    others = [ratios[policy] for policy in POLICIES if policy != "predict"]
    return 0 if ratios["round_robin"] >= 1.15 and min(others) >= 1.0 else 1


def _speed(factor: float) -> Speed:
    base = Speed()
    factor *= SCALE / TIMES_AS_FAST
    return Speed(
        step_s=base.step_s / factor,
        tokens_per_s=base.tokens_per_s * factor,
        base_s=base.base_s / factor,
        each_s=base.each_s / factor,
    )


def _prompt(number: int, length: int) -> list[int]:
    """Distinct from its first block on, so that no prefix cache would help."""
    head: Sequence[int] = (number % 251, number // 251 % 251)
    return [*head, *((7 * number + i) % 251 for i in range(length - len(head)))]
