"""Mixed load on a deployment whose workers are killed, drained, paused and added at random: nothing may be lost.

    python -m bench.chaos --seconds 300 --seed 0
    python -m bench.chaos --seconds 60 --model MODEL_DIR

1. Start a router and 2 + 2 workers, each a process; ask every question of the catalogue once, alone (chaos_load.py).
2. For --seconds, clients ask those questions in every way, while the plan (chaos_plan.py) is carried out. A step that
   takes a worker away waits until another of its pool is ready; what is left of the plan at the end is left out.
3. Let everything end and wait until nothing is held anywhere. What still is has leaked.
4. Print what happened, then one JSON object as the last line. failed, wrong and leaked_rows must be 0, as the exit
   status says; a worker that ended in another way than the plan says counts as a failure too.

The SDK's retries are off: what a client sees is what the router did. Options of the workers come from the environment
(TWINPOOL_MEMORY, TWINPOOL_DTYPE...).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench import machine
from bench.chaos_load import Tally, ask_on, catalogue
from bench.chaos_plan import POOLS, Fault, Step, first_workers, plan
from twinpool import errors, model_store
from twinpool.child import Child, wait_ready
from twinpool.client import AsyncClient

READY_TIMEOUT_S = 60.0
BASELINE_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 60.0
_HELD = {  # gauges that are 0 when a worker has nothing to do; those in rows, and requests that hold some
    "prefill": ("rows_used", "running", "waiting"),
    "decode": ("rows_used", "swap_rows_used", "reservations", "running", "waiting"),
}


class Targets:
    """The processes that the plan is carried out on. One task does that; `stop` ends all of them."""

    def __init__(self, model: Path, folder: Path, counts: dict[str, int], transport: str) -> None:
        self._model = model
        self._folder = folder
        self._counts = counts
        self._transport = transport
        self._children: dict[str, Child] = {}  # those that are to live
        self._leaving: list[Child] = []
        self._metrics: dict[str, int] = {}  # port of each worker's
        self._paused: dict[str, asyncio.TimerHandle] = {}
        self.address = ""
        self.done: dict[str, int] = {fault.value: 0 for fault in Fault}
        self.faults: list[str] = []  # what went against the plan

    def start(self) -> None:
        router = self._children["router"] = Child(
            "router",
            "router",
            ["--port", "0", "--metrics-port", "0", "--tokenizer", str(self._model), "--model", "chaos"],
            self._folder,
            {},
        )
        router.start()
        wait_ready([router], READY_TIMEOUT_S)
        assert router.ready is not None
        self.address = router.ready.address
        for pool, name in first_workers(self._counts):
            self._add(pool, name)

    async def carry_out(self, steps: Sequence[Step], client: AsyncClient) -> None:
        """Raises Unavailable when a pool does not come back so that the plan could go on."""
        start = time.monotonic()
        for step in steps:
            await asyncio.sleep(max(0.0, start + step.at_s - time.monotonic()))
            if step.fault is not Fault.ADD:
                await self.wait_ready(client, step.pool, others=step.worker)
            print(f"{time.monotonic() - start:6.1f} s  {step.fault.value} {step.worker}", file=sys.stderr)
            self.done[step.fault.value] += 1
            self._do(step)

    async def wait_ready(self, client: AsyncClient, pool: str, others: str = "", at_least: int = 1) -> None:
        """Until the router counts a worker of `pool`, other than `others`, as ready that nothing happens to."""
        end = time.monotonic() + READY_TIMEOUT_S
        while True:
            ready = {worker.worker_id for worker in (await client.pools()).workers if worker.state == "ready"}
            usable = {
                name for name in ready & set(self._children) if name.startswith(pool) and name not in self._paused
            }
            if len(usable - {others}) >= at_least and (not others or others in usable):
                return
            if time.monotonic() > end:
                raise errors.Unavailable(f"in {READY_TIMEOUT_S:g} s no more {pool} workers became ready than {usable}")
            await asyncio.sleep(0.1)

    async def settle(self, client: AsyncClient) -> int:
        """Lets all workers go on and all requests end; the rows that are still held then."""
        for name in list(self._paused):
            self._resume(name)
        for pool in POOLS:
            living = sum(name.startswith(pool) for name in self._children)
            await self.wait_ready(client, pool, at_least=living)
        await asyncio.gather(*(asyncio.to_thread(child.wait, DRAIN_TIMEOUT_S) for child in self._leaving))
        self._check_ends()
        end = time.monotonic() + BASELINE_TIMEOUT_S
        while True:
            held = {name: rows for name in self._metrics if (rows := await asyncio.to_thread(self._held, name))}
            pools = await client.pools()
            if not held and not pools.queued and not pools.running:
                return 0
            if time.monotonic() > end:
                self.faults.append(f"still held: {held}, {pools.queued} queued, {pools.running} running in the router")
                return sum(held.values())
            await asyncio.sleep(0.25)

    def stop(self) -> None:
        for name in list(self._paused):
            self._resume(name)
        children = [*self._children.values(), *self._leaving]
        for child in children:
            child.terminate()
        for child in children:
            child.wait(15.0)
            child.kill()

    def _add(self, pool: str, name: str) -> None:
        options = ["--port", "0", "--metrics-port", "0", *(["--kv-port", "0"] if pool == "decode" else [])]
        options += ["--model", str(self._model), "--model-name", "chaos", "--worker-id", name]
        options += ["--routers", self.address, "--kv-transport", self._transport]
        child = self._children[name] = Child(name, pool, options, self._folder, {})
        child.start()

    def _do(self, step: Step) -> None:
        if step.fault is Fault.ADD:
            self._add(step.pool, step.worker)
            return
        child = self._children[step.worker]
        if not child.running:
            self.faults.append(child.death().message)
        elif step.fault is Fault.PAUSE:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGSTOP)
            self._paused[step.worker] = asyncio.get_running_loop().call_later(step.pause_s, self._resume, step.worker)
        else:
            del self._children[step.worker]
            if step.fault is Fault.KILL:
                child.kill()
            else:
                child.terminate()
                self._leaving.append(child)

    def _resume(self, name: str) -> None:
        self._paused.pop(name).cancel()
        child = self._children[name]
        if child.pid is not None and child.running:
            os.kill(child.pid, signal.SIGCONT)

    def _check_ends(self) -> None:
        """Notes who did not live, or leave, as planned, and where the metrics of those who live are."""
        for child in self._leaving:
            if child.running or child.status != 0:
                how = "did not leave" if child.running else f"left with status {child.status}"
                self.faults.append(f"{child.name} was drained and {how} (log: {child.log_file})")
        for name, child in self._children.items():
            if not child.running:
                self.faults.append(child.death().message)
            elif child.ready is not None and name != "router":
                self._metrics[name] = child.ready.metrics_port

    def _held(self, name: str) -> int:
        pool = name.partition("-")[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics[name]}/metrics", timeout=5) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        wanted = {f"twinpool_{pool}_{gauge}" for gauge in _HELD[pool]}
        return int(sum(sample.value for family in families for sample in family.samples if sample.name in wanted))


async def run(args: argparse.Namespace, targets: Targets) -> tuple[Tally, int]:
    """The load with its faults; the tally, and the rows that leaked."""
    counts, tally, over = {"prefill": args.prefill, "decode": args.decode}, Tally(), asyncio.Event()
    async with AsyncClient(targets.address, retries=0, timeout_s=args.timeout) as client:
        for pool in POOLS:
            await targets.wait_ready(client, pool, at_least=counts[pool])
        questions = await catalogue(client, args.questions, args.seed)
        print(f"{len(questions)} questions asked alone; now {args.clients} clients and the faults", file=sys.stderr)
        steps = plan(args.seconds, args.seed, counts, pace_s=args.pace)
        async with asyncio.TaskGroup() as tasks:
            for i in range(args.clients):
                draw = random.Random(f"{args.seed}/{i}")
                tasks.create_task(ask_on(client, questions, draw, over, tally))
            faults = tasks.create_task(targets.carry_out(steps, client))
            try:
                await asyncio.sleep(args.seconds)
            finally:
                over.set()
                faults.cancel()
        return tally, await targets.settle(client)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of load (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the load and of the faults (default 0)")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers at the start (default 2)")
    parser.add_argument("--decode", type=int, default=2, help="decode workers at the start (default 2)")
    parser.add_argument("--clients", type=int, default=6, help="that ask, one request at a time each (default 6)")
    parser.add_argument("--questions", type=int, default=24, help="different ones (default 24)")
    parser.add_argument("--pace", type=float, default=4.0, help="seconds between faults, on average (default 4)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a request may take (default 60)")
    parser.add_argument("--model", default=model_store.DEFAULT_MODEL, help="a directory or a known name")
    parser.add_argument("--kv-transport", default="auto", help="of the workers (default auto)")
    args = parser.parse_args(argv)
    if min(args.prefill, args.decode, args.clients, args.questions) < 1 or min(args.seconds, args.pace) <= 0:
        parser.error("--seconds, --pace, --clients, --questions and the numbers of workers must be over 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    folder = Path(tempfile.mkdtemp(prefix="twinpool-chaos-"))
    good = False
    try:
        targets = Targets(
            model_store.ensure(args.model), folder, {"prefill": args.prefill, "decode": args.decode}, args.kv_transport
        )
        try:
            targets.start()
            tally, leaked_rows = asyncio.run(run(args, targets))
        finally:
            targets.stop()
        for reason, count in tally.errors.most_common(20):
            print(f"{count} x {reason}")
        for fault in targets.faults:
            print(fault)
        print(
            f"{tally.sent} sent: {tally.finished} finished ({tally.moved} after another attempt), {tally.left} left by "
            f"the client, {tally.expired} ran into a short deadline, {tally.refused} refused, {tally.failed} failed"
        )
        figures = {name: value for name, value in asdict(tally).items() if name != "errors"}
        figures["failed"] += len(targets.faults)
        good = not (figures["failed"] or figures["wrong"] or leaked_rows)
        asked = {"seconds": args.seconds, "seed": args.seed, "clients": args.clients, "faults": targets.done}
        print(json.dumps({"bench": "chaos", **machine.describe(), **asked, **figures, "leaked_rows": leaked_rows}))
        return 0 if good else 1
    except errors.TwinpoolError as error:
        print(f"bench.chaos: {error.message}", file=sys.stderr)
        return 2
    finally:
        if good:
            shutil.rmtree(folder)
        else:
            print(f"logs: {folder}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
