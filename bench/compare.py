"""The placement policies against each other, in one run, on fake workers that take the time of real ones.

For each policy a new router and new workers (bench/fake_workers.py) see the same arrivals. The workers are about eight
times as fast as one core of a small CPU with the default model, and the targets eight times as tight, so that a run
takes a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from bench import machine, workload
from bench.fake_workers import FakeDecode, FakePrefill, Speed, tokenizer_folder
from bench.report import Outcome, Target, summarize
from bench.workload import Shape
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.policies import POLICIES
from router.router import Router
from twinpool.client import AsyncClient

SCALE = 8.0
CLASSES = ("interactive:ttft_ms=125:tpot_ms=12.5:priority=10:weight=8", "batch:ttft_ms=3750:tpot_ms=0:queue=1024")
TARGETS = {"interactive": Target(ttft_ms=125, tpot_ms=12.5), "batch": Target(ttft_ms=3750, tpot_ms=0)}
_WARMUP = 12


async def run_policy(policy: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One policy's summary over all arrivals."""
    config = RouterConfig(
        tokenizer=str(folder), port=0, policy=policy, sla_classes=CLASSES, heartbeat_ms=250, lease_ms=10000
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
            return await _drive(client, args)
    finally:
        for worker in (*workers, *decodes):
            await worker.stop()
        await router.stop(0)


async def _until_ready(client: AsyncClient, count: int) -> None:
    async with asyncio.timeout(20):
        while sum(worker.state == "ready" for worker in (await client.pools()).workers) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _drive(client: AsyncClient, args: argparse.Namespace) -> dict[str, Any]:
    shapes = (
        Shape(name="short", weight=args.mix[0], prompt_tokens=args.short_tokens, sla_class="interactive"),
        Shape(name="long", weight=args.mix[1], prompt_tokens=args.long_tokens, sla_class="batch"),
    )
    planned = workload.arrivals(args.rate, args.requests, shapes, args.seed)
    outcomes = [Outcome(shape=a.shape.name, sla_class=a.shape.sla_class, due_s=a.at_s) for a in planned]
    for i in range(_WARMUP):
        await client.generate([i + 1] * shapes[i % 2].prompt_tokens, max_tokens=12, ignore_eos=True)
    prompts = [_prompt(number, arrival.shape.prompt_tokens) for number, arrival in enumerate(planned)]
    await workload.send_all(client, prompts, outcomes, args.max_tokens)
    return summarize(outcomes, TARGETS)


def compare(args: argparse.Namespace) -> int:
    """Runs every policy, prints a line each and one JSON object; 0 when predict keeps what it promises."""
    goodput: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = tokenizer_folder(Path(name))
        for policy in POLICIES:
            summary = asyncio.run(run_policy(policy, args, folder))
            goodput[policy] = summary["goodput_rps"]
            by = {shape: (part["good"], part["requests"]) for shape, part in summary["by_shape"].items()}
            short, long = (summary["by_shape"][shape]["ttft_ms"] for shape in ("short", "long"))
            print(
                f"{policy:>12}: goodput {summary['goodput_rps']:.3f}/s, good {by}, errors {summary['errors']}, "
                f"TTFT p50/p90 short {short['p50']}/{short['p90']} ms, long {long['p50']}/{long['p90']} ms",
                flush=True,
            )
    ratios = {policy: round(goodput["predict"] / max(value, 1e-9), 3) for policy, value in goodput.items()}
    asked = {"rate_rps": args.rate, "requests": args.requests, "speeds": list(args.speeds), "seed": args.seed}
    result = {"bench": "online.compare", **machine.describe(), **asked, "goodput_rps": goodput, "predict_over": ratios}
    print(json.dumps(result))
    others = [ratio for policy, ratio in ratios.items() if policy != "predict"]
    return 0 if ratios["round_robin"] >= 1.15 and min(others) >= 1.0 else 1


def _speed(factor: float) -> Speed:
    base = Speed()
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
