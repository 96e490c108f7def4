"""What the router itself costs: CPU a streamed token, and the time it adds, with fake workers behind it.

    python -m bench.router                      # 64 concurrent streams, then half of that rate, then 10,000 queued
    requests

The router is a process of its own; fake workers (bench/fake_workers.py) and clients are others.

1. `--streams` answers at once, for `--seconds`, a token each `--step-ms`: output tokens by CPU seconds of the router's
   process. In turns with it, what that is at most: a bare grpc.aio server that writes one constant message a token to
   as many streams at the same pace, and does nothing else.
2. At half that rate: each token's arrival at the client less its sending by the worker, which stamps it (one clock:
   CLOCK_MONOTONIC).
3. No worker has room: memory of the router before and after `--queued` requests of `--queued-tokens` tokens wait in it.

The client is gRPC's own without the SDK, so that it takes as little as possible of the cores that all share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop

from bench import machine
from bench.fake_workers import FakeDecode, FakePrefill, Speed, since_s, tokenizer_folder
from service.serve import announce_ready
from twinpool import errors
from twinpool.client import AsyncClient
from twinpool.v1 import router_pb2 as v1
from twinpool.v1.router_pb2_grpc import RouterServicer, RouterStub, add_RouterServicer_to_server

_TOKENS = 200  # of an answer
_ROUNDS = 3


async def _workers(router: str, prefill: int, decode: int, step_s: float) -> None:
    """The other process: fake workers that stamp their tokens, until killed."""
    quick = Speed(step_s=0.0, tokens_per_s=1e7, base_s=step_s, each_s=0.0)
    for i in range(prefill):
        await FakePrefill(f"prefill-{i}", quick).start([router])
    for i in range(decode):
        await FakeDecode(f"decode-{i}", quick, stamped=True).start([router])
    await asyncio.Event().wait()


class _Bare(RouterServicer):
    """What streaming costs before a router does anything: constant messages at the pace of the fake workers."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._step = asyncio.Event()

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            step, self._step = self._step, asyncio.Event()
            step.set()

    async def GenerateStream(self, message: v1.GenerateRequest, context: Any) -> None:
        delta = v1.ChoiceDelta(text="ab", token_ids=[300])
        chunk = v1.GenerateChunk(request_id="0" * 32, choices=[delta])
        for _ in range(message.sampling.max_tokens - 1):
            await self._step.wait()
            await context.write(chunk)
        delta.finish_reason = v1.FINISH_REASON_LENGTH
        await context.write(
            v1.GenerateChunk(request_id="0" * 32, choices=[delta], usage=v1.Usage(), timeline=v1.Timeline())
        )


async def _serve_bare(ready: Path, step_s: float) -> None:
    """Another process: serves `_Bare` until killed."""
    bare = _Bare(step_s)
    server = grpc.aio.server()
    add_RouterServicer_to_server(bare, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    announce_ready(f"127.0.0.1:{port}", -1, str(ready))
    await bare.tick()


class _Process:
    """A server's process, and what it uses."""

    def __init__(self, command: Sequence[str], ready: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", *command])
        end = time.monotonic() + 60
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise errors.ConfigError(f"{command[0]} did not start; its error is above")
            time.sleep(0.05)
        self.address = str(json.loads(ready.read_text())["address"])

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def _router(folder: Path, name: str) -> _Process:
    ready = folder / f"{name}.ready"
    command = ["router", "--tokenizer", str(folder / "fake"), "--port", "0"]
    command += ["--metrics-port", "-1", "--ready-file", str(ready), "--log-level", "warning"]
    command += ["--sla-classes", "all:queue=1000000", "--default-sla-class", "all", "--max-queued", "1000000"]
    command += ["--heartbeat-ms", "500", "--lease-ms", "20000", "--pool-wait", "3600", "--decode-slots", "1024"]
    return _Process(command, ready)


async def _stream(start: Any, until: float, delays: list[float]) -> tuple[int, int]:
    """Answers, one after the other, until the time is up; how many tokens came, and in how many messages."""
    sampling = v1.Sampling(max_tokens=_TOKENS, ignore_eos=True)
    question = v1.GenerateRequest(token_ids=v1.TokenIds(ids=[65] * 16), sampling=sampling)
    tokens = messages = 0
    while time.monotonic() < until:
        call = start(question, timeout=120)
        while (chunk := await call.read()) is not grpc.aio.EOF:
            for choice in chunk.choices:
                tokens += len(choice.token_ids)
                delays += [passed for each in choice.token_ids if (passed := since_s(each)) is not None]
            messages += 1
    return tokens, messages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What came of some streams to one server."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    tokens_per_message: float
    delays_s: list[float]


async def _load(server: _Process, streams: int, seconds: float) -> _Load:
    async with grpc.aio.insecure_channel(server.address) as channel:
        start = RouterStub(channel).GenerateStream
        delays: list[float] = []
        await _stream(start, time.monotonic() + 0.01, delays)  # connects, and ends the first answer
        delays.clear()
        begin, cpu_s = time.monotonic(), server.cpu_s
        counts = await asyncio.gather(*(_stream(start, begin + seconds, delays) for _ in range(streams)))
        tokens, messages = (sum(each) for each in zip(*counts, strict=True))
        return _Load(
            tokens_per_s=tokens / (time.monotonic() - begin),
            tokens_per_cpu_s=tokens / (server.cpu_s - cpu_s),
            tokens_per_message=tokens / messages,
            delays_s=delays,
        )


async def _queue(router: _Process, requests: int, tokens: int) -> float:
    """Bytes of the router's memory for each of `requests` that wait in it."""
    async with AsyncClient(router.address, timeout_s=300, retries=0) as client:
        before = router.memory_bytes
        prompt = [200 + i % 50 for i in range(tokens)]
        waiting = [asyncio.ensure_future(client.generate(prompt, max_tokens=4)) for _ in range(requests)]
        async with asyncio.timeout(200):
            while (await client.pools()).queued < requests:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        used = router.memory_bytes - before
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return used / requests


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        tokenizer_folder(folder)
        router = _router(folder, "router")
        stack.callback(router.close)
        paced = ["--step-ms", str(args.step_ms)]
        bare = _Process(["bench.router", "--bare", str(folder / "bare.ready"), *paced], folder / "bare.ready")
        stack.callback(bare.close)
        command = [sys.executable, "-m", "bench.router", "--workers-of", router.address, *paced]
        workers = subprocess.Popen(command)
        stack.callback(workers.wait)
        stack.callback(workers.kill)
        ours, most = [], []
        for _ in range(_ROUNDS):
            ours.append(asyncio.run(_load(router, args.streams, args.seconds / _ROUNDS)))
            most.append(asyncio.run(_load(bare, args.streams, args.seconds / _ROUNDS)))
        half = asyncio.run(_load(router, max(1, args.streams // 2), args.seconds))
        stack.close()
        idle = _router(folder, "idle")
        try:
            queued_bytes = asyncio.run(_queue(idle, args.queued, args.queued_tokens))
        finally:
            idle.close()
    tokens_per_cpu_s = _median([each.tokens_per_cpu_s for each in ours])
    bare_tokens_per_cpu_s = _median([each.tokens_per_cpu_s for each in most])
    p50, p99 = (1000 * float(np.percentile(half.delays_s, q)) for q in (50, 99))
    return {
        "streams": args.streams,
        "step_ms": args.step_ms,
        "tokens_per_s": round(_median([each.tokens_per_s for each in ours])),
        "tokens_per_cpu_s": round(tokens_per_cpu_s),
        "tokens_per_message": round(_median([each.tokens_per_message for each in ours]), 2),
        "bare_tokens_per_cpu_s": round(bare_tokens_per_cpu_s),
        "of_bare": round(tokens_per_cpu_s / bare_tokens_per_cpu_s, 3),
        "half_rate_tokens_per_s": round(half.tokens_per_s),
        "added_latency_ms_p50": round(p50, 2),
        "added_latency_ms_p99": round(p99, 2),
        "queued_requests": args.queued,
        "queued_tokens": args.queued_tokens,
        "queued_bytes_per_request": round(queued_bytes),
    }


def _median(figures: Sequence[float]) -> float:
    return float(np.median(figures))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams (default 64)")
    parser.add_argument("--step-ms", type=float, default=5.0, help="between two tokens of an answer (default 5)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each of the two loads (default 15)")
    parser.add_argument("--queued", type=int, default=10000, help="requests that wait at once (default 10000)")
    parser.add_argument("--queued-tokens", type=int, default=1500, help="prompt tokens of each (default 1500)")
    parser.add_argument("--bare", default="", metavar="READY_FILE", help=argparse.SUPPRESS)
    parser.add_argument("--workers-of", default="", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.workers_of:
        asyncio.run(_workers(args.workers_of, 2, 2, args.step_ms / 1000))
        return 0
    if args.bare:
        uvloop.run(_serve_bare(Path(args.bare), args.step_ms / 1000))
        return 0
    if min(args.streams, args.queued, args.queued_tokens) < 1 or min(args.seconds, args.step_ms) <= 0:
        parser.error("--streams, --step-ms, --seconds, --queued and --queued-tokens must be over 0")
    result = measure(args)
    for key, value in result.items():
        print(f"{key:>26}  {value}")
    print(json.dumps({"bench": "router", **machine.describe(), **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
