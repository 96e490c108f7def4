"""What the router itself costs: CPU a streamed token, and the time it adds, with fake workers behind it.

    python -m bench.router                      # 64 concurrent streams, then half of that rate, then 10,000 queued
    requests

The router is a process of its own; fake workers (bench/fake_workers.py) and clients are others.

1. `--streams` answers at once, for `--seconds`, a token each `--step-ms`: output tokens by CPU seconds of the router's
   process. In turns with it, what that is at most: a bare grpc.aio server that writes one constant message a token to
   as many streams at the same pace, and does nothing else.
2. At that rate and at half of it: each token's arrival at the client less its sending by the worker, which stamps it
   (one clock: CLOCK_MONOTONIC).
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
from bench.fake_workers import FakeDecode, FakePrefill, Speed, since_s, stamp, tokenizer_folder
from bench.http2_client import Connection
from service.serve import announce_ready
from twinpool import errors
from twinpool.client import AsyncClient
from twinpool.v1 import router_pb2 as v1
from twinpool.v1.router_pb2_grpc import RouterServicer, add_RouterServicer_to_server

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
        self._stamp = stamp()

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            self._stamp = stamp()
            step, self._step = self._step, asyncio.Event()
            step.set()

    async def GenerateStream(self, message: v1.GenerateRequest, context: Any) -> None:
        chunk = v1.GenerateChunk(request_id="0" * 32, choices=[v1.ChoiceDelta(text="ab", token_ids=[0])])
        delta = chunk.choices[0]
        for _ in range(message.sampling.max_tokens - 1):
            await self._step.wait()
            delta.token_ids[0] = self._stamp
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
        """User and system time of all its threads, also those that have ended; in ns, where /proc counts ticks."""
        clock = ~self.process.pid << 3 | 2  # as clock_getcpuclockid makes it, which Python has for threads only
        return time.clock_gettime(clock)

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


async def _stream(
    connection: Connection, answer_tokens: int, first_tokens: int, until: float, delays: list[float]
) -> tuple[int, int]:
    """Answers, one after the other, until the time is up; how many tokens came, and in how many messages.

    The first has `first_tokens`, another number for each stream: so that they do not all end and begin together.
    """
    tokens = messages = 0
    wanted = max(1, first_tokens)

    def on_message(message: bytes) -> None:
        nonlocal tokens
        for choice in v1.GenerateChunk.FromString(message).choices:
            tokens += len(choice.token_ids)
            delays.extend(passed for each in choice.token_ids if (passed := since_s(each)) is not None)

    while time.monotonic() < until:
        before = tokens
        sampling = v1.Sampling(max_tokens=wanted, ignore_eos=True)
        question = v1.GenerateRequest(token_ids=v1.TokenIds(ids=[65] * 16), sampling=sampling)
        call = connection.start("/twinpool.v1.Router/GenerateStream", question.SerializeToString(), on_message)
        async with asyncio.timeout(120):
            await call.ended.wait()
        messages += call.messages
        if tokens != before + wanted:
            raise errors.Internal(f"an answer of {wanted} tokens ended after {tokens - before}")
        wanted = answer_tokens
    return tokens, messages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What came of some streams to one server."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    tokens_per_message: float
    delays_s: list[float]


async def _load(server: _Process, streams: int, answer_tokens: int, seconds: float) -> _Load:
    connection = await Connection.connect(server.address)
    try:
        delays: list[float] = []
        await _stream(connection, 4, 4, time.monotonic() + 0.01, delays)  # what only the first answer meets
        delays.clear()
        begin, cpu_s = time.monotonic(), server.cpu_s
        ends = [
            _stream(connection, answer_tokens, answer_tokens * (i + 1) // streams, begin + seconds, delays)
            for i in range(streams)
        ]
        counts = await asyncio.gather(*ends)
        tokens, messages = (sum(each) for each in zip(*counts, strict=True))
        return _Load(
            tokens_per_s=tokens / (time.monotonic() - begin),
            tokens_per_cpu_s=tokens / (server.cpu_s - cpu_s),
            tokens_per_message=tokens / messages,
            delays_s=delays,
        )
    finally:
        connection.close()


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
        ours: list[_Load] = []
        most: list[_Load] = []
        halves: list[_Load] = []
        bare_halves: list[_Load] = []
        for _ in range(_ROUNDS):
            for server, loads, streams in (
                (router, ours, args.streams),
                (bare, most, args.streams),
                (router, halves, max(1, args.streams // 2)),
                (bare, bare_halves, max(1, args.streams // 2)),
            ):
                loads.append(uvloop.run(_load(server, streams, args.answer_tokens, args.seconds / _ROUNDS)))
        stack.close()
        idle = _router(folder, "idle")
        try:
            queued_bytes = asyncio.run(_queue(idle, args.queued, args.queued_tokens))
        finally:
            idle.close()
    tokens_per_cpu_s = _median([each.tokens_per_cpu_s for each in ours])
    bare_tokens_per_cpu_s = _median([each.tokens_per_cpu_s for each in most])
    p50, p99 = _percentiles(halves)
    bare_p50, bare_p99 = _percentiles(bare_halves)
    full_p50, full_p99 = _percentiles(ours)
    return {
        "streams": args.streams,
        "step_ms": args.step_ms,
        "tokens_per_s": round(_median([each.tokens_per_s for each in ours])),
        "tokens_per_cpu_s": round(tokens_per_cpu_s),
        "tokens_per_message": round(_median([each.tokens_per_message for each in ours]), 2),
        "full_rate_latency_ms_p50": round(full_p50, 2),
        "full_rate_latency_ms_p99": round(full_p99, 2),
        "bare_tokens_per_cpu_s": round(bare_tokens_per_cpu_s),
        "of_bare": round(tokens_per_cpu_s / bare_tokens_per_cpu_s, 3),
        "half_rate_tokens_per_s": round(_median([each.tokens_per_s for each in halves])),
        "added_latency_ms_p50": round(p50, 2),
        "added_latency_ms_p99": round(p99, 2),
        "bare_latency_ms_p50": round(bare_p50, 2),
        "bare_latency_ms_p99": round(bare_p99, 2),
        "queued_requests": args.queued,
        "queued_tokens": args.queued_tokens,
        "queued_bytes_per_request": round(queued_bytes),
    }


def _percentiles(loads: Sequence[_Load]) -> tuple[float, float]:
    """p50 and p99 in ms: of each round, and of these the median."""
    p50, p99 = (_median([1000 * float(np.percentile(each.delays_s, q)) for each in loads]) for q in (50, 99))
    return p50, p99


def _median(figures: Sequence[float]) -> float:
    return float(np.median(figures))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams (default 64)")
    parser.add_argument("--step-ms", type=float, default=5.0, help="between two tokens of an answer (default 5)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each of the two loads (default 15)")
    parser.add_argument("--answer-tokens", type=int, default=200, help="tokens of an answer (default 200)")
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
    counts = (args.streams, args.answer_tokens, args.queued, args.queued_tokens)
    if min(counts) < 1 or min(args.seconds, args.step_ms) <= 0:
        parser.error("--streams, --step-ms, --seconds, --answer-tokens, --queued, --queued-tokens must be over 0")
    result = measure(args)
    for key, value in result.items():
        print(f"{key:>26}  {value}")
    print(json.dumps({"bench": "router", **machine.describe(), **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
