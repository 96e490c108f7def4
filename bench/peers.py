"""Compares deployments of ours with other servers, by their public endpoints, in turns within one run.

    python -m bench.peers --local --peer vllm=http://127.0.0.1:8001/v1 --pause vllm=4711,4712
    python -m bench.peers --local --weights bf16 w8a16 --peer vllm=http://127.0.0.1:8001/v1 --only decode
    python -m bench.peers --ours 127.0.0.1:7070 --peer vllm=http://127.0.0.1:8001/v1 --only mixed --saturation 1.2

decode   tokens/s while 1, 8 or 32 requests decode at the same time (260 tokens in, 128 out)
prefill  prompt tokens/s until the last of 8 x 512 or 1 x 2,048 tokens has its first token (one token out)
mixed    a Poisson load of short and long prompts at 60% and 100% of what the best peer saturates at: TTFT and ITL
goodput  the largest rate of that load with 90% of requests under TTFT 1 s and TPOT 50 ms, by halving

1. Every side gets the same prompts, which no side has seen before, and gives answers of exactly the same length.
2. Rounds take the sides in turns; the others idle meanwhile, and stand still if --pause names their processes.
3. Print a table of medians and ratios, then one JSON object as the last line.

With --local both workers have all cores for decode and prefill, where only one of them has work; for mixed and goodput
the cores are split between them. A deployment given by --ours is measured as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from bench import machine, peer_measures, workload
from bench.openai_client import OpenAIClient
from bench.peer_measures import Load, Prompts, Search, Side, Sizes, alone, median
from engine.quantization import WEIGHT_FORMATS
from twinpool import errors, model_store
from twinpool.client import AsyncClient
from twinpool.commands.up import ended_by_signals
from twinpool.deployment import Deployment, DeploymentSpec, usable_cores

SPEEDS, LOADS = ("decode", "prefill"), ("mixed", "goodput")
SIZES = Sizes()
Figures = dict[str, dict[str, Any]]  # measure -> side -> figure or summary


@dataclass(slots=True)
class Run:
    """One set of sides, and what has been measured of them."""

    args: argparse.Namespace
    sides: list[Side]
    prompts: Prompts
    figures: Figures

    def turns(self, round_number: int) -> list[Side]:
        """The sides, another one first in each round."""
        first = round_number % len(self.sides)
        return self.sides[first:] + self.sides[:first]

    async def decode(self) -> None:
        for batch in self.args.batches:
            got: dict[str, list[float | None]] = {side.name: [] for side in self.sides}
            for number in range(self.args.rounds):
                prompts = await self.prompts.take([SIZES.decode_prompt] * batch)
                for side in self.turns(number):
                    if batch > 1 and side.one_at_a_time:
                        continue
                    with alone(side, self.sides):
                        got[side.name].append(await peer_measures.decode_speed(side, prompts, SIZES))
            self.figures[f"decode_tok_s_{batch}"] = {name: median(values) for name, values in got.items()}

    async def prefill(self) -> None:
        for count, length in SIZES.prefills:
            got: dict[str, list[float | None]] = {side.name: [] for side in self.sides}
            for number in range(self.args.rounds):
                prompts = await self.prompts.take([length] * count)
                for side in self.turns(number):
                    with alone(side, self.sides):
                        got[side.name].append(await peer_measures.prefill_speed(side, prompts, length))
            self.figures[f"prefill_tok_s_{count}x{length}"] = {name: median(values) for name, values in got.items()}

    async def mixed(self) -> None:
        load = self.load()
        rate = self.args.saturation or await self.peers_saturation(load)
        for fraction in self.args.fractions:
            arrivals = load.arrivals(fraction * rate, load.requests)
            prompts = await self.prompts.take([arrival.shape.prompt_tokens for arrival in arrivals])
            figures: dict[str, Any] = {"rate_rps": round(fraction * rate, 3)}
            for side in self.sides:
                with alone(side, self.sides):
                    outcomes = await peer_measures.mixed(side, arrivals, prompts, SIZES)
                figures[side.name] = peer_measures.summary(outcomes)
            self.figures[f"mixed_{fraction:g}"] = figures

    async def peers_saturation(self, load: Load) -> float:
        """The best peer's, which sets the rates for all."""
        rates: dict[str, float] = {}
        for side in self.sides:
            with alone(side, self.sides):
                rates[side.name] = round(await peer_measures.saturation(side, self.prompts, load), 3)
        self.figures["saturation_rps"] = dict(rates)
        return max(rates[side.name] for side in self.sides if not side.ours)

    async def goodput(self) -> None:
        load = self.load()
        if "saturation_rps" not in self.figures:
            await self.peers_saturation(load)
        searches = {side.name: Search(most=self.figures["saturation_rps"][side.name]) for side in self.sides}
        trials: dict[str, list[dict[str, Any]]] = {side.name: [] for side in self.sides}
        for number in range(self.args.trials):
            for side in self.turns(number):
                search = searches[side.name]
                requests = max(10, min(load.requests, round(search.rate * self.args.seconds)))
                arrivals = load.arrivals(search.rate, requests)
                prompts = await self.prompts.take([arrival.shape.prompt_tokens for arrival in arrivals])
                with alone(side, self.sides):
                    got = peer_measures.summary(await peer_measures.mixed(side, arrivals, prompts, SIZES))
                trials[side.name].append({"rate_rps": round(search.rate, 3), **got})
                search.note(got["in_target"])
        self.figures["goodput_rps"] = {name: round(search.kept, 3) for name, search in searches.items()}
        self.figures["goodput_trials"] = dict(trials)

    def load(self) -> Load:
        return Load(requests=self.args.requests, mix=self.args.mix, sizes=SIZES, seed=self.args.seed)


async def drive(args: argparse.Namespace, ours: dict[str, str], measures: Sequence[str], figures: Figures) -> None:
    """Measures `measures` of our deployments (name -> address) and of all peers into `figures`."""
    async with AsyncExitStack() as stack:
        sides: list[Side] = []
        for name, address in ours.items():
            client = await stack.enter_async_context(AsyncClient(address, retries=0, timeout_s=args.timeout))
            sides.append(Side(name=name, client=client, ours=True))
        for name, url in args.peer:
            body = dict(args.peer_body).get(name, {})
            model = dict(args.peer_model).get(name, "")
            peer = OpenAIClient(name, url, model=model, body=body, timeout_s=args.timeout)
            await stack.enter_async_context(peer)
            await peer.connect()
            pids, one = dict(args.pause).get(name, ()), name in args.one_at_a_time
            sides.append(Side(name=name, client=peer, ours=False, pids=pids, one_at_a_time=one))
        first = sides[0].client
        assert isinstance(first, AsyncClient)
        run = Run(args, sides, Prompts(first, args.seed), figures)
        await peer_measures.warm_up(sides, run.prompts, SIZES)
        for measure in measures:
            await getattr(run, measure)()


@contextmanager
def local(args: argparse.Namespace, *, split: bool) -> Iterator[dict[str, str]]:
    """A deployment for each weight format, name -> address; its two workers split the cores, or both have all."""
    model = args.model or model_store.DEFAULT_MODEL
    cores = usable_cores()
    all_cores = {"cores": ",".join(map(str, cores)), "threads": str(len(cores))}
    running: list[Deployment] = []
    try:
        for weights in args.weights:
            options = {"weights": weights, **({} if split else all_cores)}
            spec = DeploymentSpec(
                model=model_store.ensure(model), model_name=model_store.served_name(model), worker_options=options
            )
            running.append(Deployment(spec, lambda line: print(line, file=sys.stderr)))
            running[-1].start(timeout_s=300)
        yield {f"ours-{weights}": each.address for weights, each in zip(args.weights, running, strict=True)}
    finally:
        for each in running:
            each.stop()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything asked for: figures, and ours over every peer's where both have one."""
    figures: Figures = {}
    if args.ours:
        ours = {f"ours-{number}" if number else "ours": address for number, address in enumerate(args.ours)}
        asyncio.run(drive(args, ours, args.only, figures))
    else:
        for group, split in ((SPEEDS, False), (LOADS, True)):
            measures = [name for name in args.only if name in group]
            if measures:
                with local(args, split=split) as ours:
                    asyncio.run(drive(args, ours, measures, figures))
    return {"figures": figures, "of_peers": ratios(figures, [name for name, _ in args.peer])}


def ratios(figures: Figures, peers: Sequence[str]) -> Figures:
    """measure -> our side -> peer -> ours over the peer's. Of a mixed load: the ITL p99, where less is better."""
    found: Figures = {}
    for name, by_side in figures.items():
        if name == "goodput_trials":
            continue
        mixed = name.startswith("mixed")
        plain = {side: each["itl_ms"]["p99"] if mixed else each for side, each in by_side.items() if side != "rate_rps"}
        theirs = {side: figure for side, figure in plain.items() if side in peers and figure}
        ours = {side: figure for side, figure in plain.items() if side not in peers and figure is not None}
        if theirs:
            found[f"{name}_itl_p99" if mixed else name] = {
                side: {peer: round(figure / theirs[peer], 3) for peer in theirs} for side, figure in ours.items()
            }
    return found


def table(result: dict[str, Any]) -> str:
    """One line a measure: every side's figure, then ours over each peer's."""
    lines = []
    for name, by_side in result["figures"].items():
        if name == "goodput_trials":
            lines += [
                f"  {side} at {trial['rate_rps']}/s: {trial['in_target']:.0%} in target, {trial['goodput_rps']}/s good"
                for side, trials in by_side.items()
                for trial in trials
            ]
            continue
        lines.append(f"{name:24} " + "  ".join(f"{side} {_shown(figure)}" for side, figure in by_side.items()))
        over = result["of_peers"].get(name) or result["of_peers"].get(f"{name}_itl_p99") or {}
        lines += [
            f"{'':24} {side}: " + ", ".join(f"{ratio} x {peer}" for peer, ratio in by_peer.items())
            for side, by_peer in over.items()
        ]
    return "\n".join(lines)


def _shown(figure: Any) -> str:
    if not isinstance(figure, dict):
        return "-" if figure is None else str(figure)
    ttft, itl = figure["ttft_ms"], figure["itl_ms"]
    return (
        f"TTFT {ttft['p50']}/{ttft['p99']} ITL {itl['p50']}/{itl['p99']} ms, {figure['in_target']:.0%} in target, "
        f"{figure['errors']} errors;"
    )


def named(text: str) -> tuple[str, str]:
    """`NAME=VALUE` -> both. Raises ValueError."""
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise ValueError(f"{text!r}: write NAME=VALUE")
    return name, value


def named_pids(text: str) -> tuple[str, tuple[int, ...]]:
    name, pids = named(text)
    return name, tuple(int(pid) for pid in pids.split(","))


def named_body(text: str) -> tuple[str, dict[str, Any]]:
    name, body = named(text)
    return name, dict(json.loads(body))


def numbers(text: str) -> list[float]:
    got = [float(part) for part in text.split(",")]
    if min(got) <= 0:
        raise ValueError(f"{text!r}: write numbers over 0")
    return got


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--ours", action="append", metavar="HOST:PORT", help="a running router; repeatable")
    where.add_argument("--local", action="store_true", help="start a router, a prefill and a decode worker here")
    add("--weights", nargs="+", choices=WEIGHT_FORMATS, default=["bf16"], help="with --local: a deployment for each")
    add("--model", default="", help="with --local: a directory or known name (default: the demo's)")
    peer: dict[str, Any] = {"action": "append", "default": []}
    add("--peer", type=named, metavar="NAME=URL", required=True, **peer, help="an OpenAI API up to /v1; repeatable")
    add("--peer-model", type=named, metavar="NAME=ID", **peer, help="the model to ask it for (default: its first)")
    add("--peer-body", type=named_body, metavar="NAME=JSON", **peer, help="fields of its requests; null removes one")
    add(
        "--pause", type=named_pids, metavar="NAME=PIDS", **peer, help="its processes, stopped while others are measured"
    )
    add("--one-at-a-time", metavar="NAME", **peer, help="a peer that takes one request at a time: no batches")
    add("--only", nargs="+", choices=SPEEDS + LOADS, default=[*SPEEDS, *LOADS], help="measures (default: all)")
    add("--rounds", type=int, default=3, help="of decode and prefill; medians count (default 3)")
    add("--batches", type=numbers, default=[1, 8, 32], help="of decode (default 1,8,32)")
    add("--mix", type=workload.parse_mix, default=(70.0, 30.0), help="short:long (default 70:30)")
    add("--requests", type=int, default=30, help="of a mixed load (default 30)")
    add("--saturation", type=float, default=0.0, help="requests/s of the best peer (default: found first)")
    add("--fractions", type=numbers, default=[0.6, 1.0], help="of it, to be measured (default 0.6,1)")
    add("--trials", type=int, default=4, help="halvings of goodput's search (default 4)")
    add("--seconds", type=float, default=30.0, help="of arrivals a trial, 10 requests at least (default 30)")
    add("--timeout", type=float, default=300.0, help="seconds a request may take (default 300)")
    add("--seed", type=int, default=0, help="of arrivals, order and text (default 0)")
    args = parser.parse_args(argv)
    if min(args.rounds, args.requests, args.trials) < 1 or args.saturation < 0 or args.seconds <= 0:
        parser.error("--rounds, --requests, --trials and --seconds must be over 0, and --saturation not below")
    args.batches = [int(batch) for batch in args.batches]
    peers = {name for name, _ in args.peer}
    told = {*dict(args.peer_model), *dict(args.peer_body), *dict(args.pause), *args.one_at_a_time}
    if told - peers:
        parser.error(f"no --peer is called {', '.join(sorted(told - peers))}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        with ended_by_signals():  # so that workers end and peers go on
            result = measure(args)
    except errors.TwinpoolError as error:
        print(f"bench.peers: {error.message}", file=sys.stderr)
        return 2
    print(table(result))
    asked = {"mix": ":".join(f"{weight:g}" for weight in args.mix), "requests": args.requests, "rounds": args.rounds}
    asked |= {"peers": [name for name, _ in args.peer], "seed": args.seed}
    print(json.dumps({"bench": "peers", **machine.describe(), **asked, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
