"""What the transfer costs a whole request: a deployment of real processes, prompts of 2,048 tokens, all different.

Requests for one token and for several alternate. The prefill worker answers the former alone; for the latter it pushes
the cache to the decode worker while it computes. The difference of their times to the first token is the transfer's
share. The hand-off, from the prefill worker's last layer to the decode worker's first step, is the sum of what the two
workers count themselves: last layer to first token sampled, from then to the acknowledged commit (which is there a
moment earlier), and from the commit to the step. A client sees it between the first and the second token, together
with that first step; the later tokens give the length of a decode step.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import statistics
import sys
import time
import urllib.request
from functools import partial

from prometheus_client.parser import text_string_to_metric_families

from bench import workload
from twinpool import model_store
from twinpool.client import AsyncClient
from twinpool.deployment import Deployment, DeploymentSpec

PROMPT_TOKENS = 2048
MAX_TOKENS = 8
TIMEOUT_S = 120.0
HANDOFF = (
    ("prefill", "twinpool_prefill_sample_seconds"),
    ("prefill", "twinpool_prefill_transfer_wait_seconds"),
    ("decode", "twinpool_decode_start_seconds"),
)


def measure(pairs: int) -> dict[str, float]:
    """Starts one router, one prefill and one decode worker and sends `pairs` pairs of requests, one by one.

    ttft_transfer_share_2048: of the median TTFT, at least 0; handoff_ms_2048: last layer to first decode step, the mean
    of all; second_token_ms_2048: first to second token, with that step; decode_step_ms; ttft_ms_2048: with transfer.
    """
    spec = DeploymentSpec(
        model=model_store.ensure(model_store.DEFAULT_MODEL),
        model_name=model_store.served_name(model_store.DEFAULT_MODEL),
        prefill=1,
        decode=1,
    )
    with Deployment(spec, lambda line: print(line, file=sys.stderr)) as deployment:
        deployment.start(timeout_s=300)
        alone, moved = asyncio.run(_drive(deployment.address, pairs))
        handoff = sum(_mean(deployment, *each) for each in HANDOFF)
    ttft = statistics.median(times[0] for times in moved)
    second = statistics.median(times[1] - times[0] for times in moved)
    step = statistics.median(b - a for times in moved for a, b in itertools.pairwise(times[1:]))
    return {
        "ttft_transfer_share_2048": round(max(0.0, ttft / statistics.median(times[0] for times in alone) - 1), 4),
        "ttft_ms_2048": round(ttft * 1e3, 1),
        "handoff_ms_2048": round(handoff * 1e3, 1),
        "second_token_ms_2048": round(second * 1e3, 1),
        "decode_step_ms": round(step * 1e3, 1),
    }


def _mean(deployment: Deployment, pool: str, name: str) -> float:
    """Of a histogram of the one worker of a pool, whatever its labels."""
    worker = next(child for child in deployment.children if child.name.startswith(pool))
    assert worker.ready is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{worker.ready.metrics_port}/metrics", timeout=TIMEOUT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [(sample.name, sample.value) for family in families for sample in family.samples]
    total, count = (sum(value for each, value in samples if each == f"{name}_{part}") for part in ("sum", "count"))
    return total / count


async def _drive(address: str, pairs: int) -> tuple[list[list[float]], list[list[float]]]:
    """Token times, from when the request was sent: without transfer, and with."""
    times: dict[int, list[list[float]]] = {1: [], MAX_TOKENS: []}
    async with AsyncClient(address, retries=0, timeout_s=TIMEOUT_S) as client:
        tokenize = partial(client.tokenize, special_tokens=False)
        lengths = [PROMPT_TOKENS] * (2 * pairs + 2)
        prompts = await workload.prompts(lengths, secrets.token_hex(4), tokenize, client.detokenize, 0)
        for index, prompt in enumerate(prompts):
            first = index // 2 % 2 == index % 2  # the two kinds take turns in being first
            max_tokens = 1 if first else MAX_TOKENS
            got = await _send(client, prompt, max_tokens)
            if index >= 2:  # the first of each kind warms up
                times[max_tokens].append(got)
    return times[1], times[MAX_TOKENS]


async def _send(client: AsyncClient, prompt: str, max_tokens: int) -> list[float]:
    begun, times = time.perf_counter(), []
    async with client.stream(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True) as stream:
        async for chunk in stream:
            times += [time.perf_counter() - begun] * len(chunk.token_ids)
    return times
