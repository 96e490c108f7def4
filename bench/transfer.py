"""How close kvtransfer comes to the machine: rows between two processes, beside a socket and memcpy in one run.

Run: python -m bench.transfer [--seconds S] [--no-ttft]

Every round measures, in another order each time, for each row size: a memory copy of scattered rows (one thread), the
other ways of transfer_peers.py (a raw TCP socket, gRPC, and Mooncake and NIXL where they are installed) with the same
rows, and a whole transfer (reserve, push, verify, commit) over each transport. The table shows medians over the rounds,
with quartiles of the ratios, and the CPU seconds of both ends. Where other work shares the machine, two ends that need
a core each lose more than a copy by one thread: a second table is of those rounds alone in which neither of the two
compared waited for a core. Then whole requests are timed (transfer_ttft.py); the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from bench import transfer_ttft
from bench.machine import describe
from bench.transfer_peers import RECEIVING, SENDING, Receiving, Sending, address_of
from kvtransfer import Commit, KvReceiver, KvSender, PushResult, Region, SharedMemory, wire
from kvtransfer.departures import FRAME_BYTES
from twinpool.errors import TransferFailed

ROW_SIZES = {"256k": 256 << 10, "1m": 1 << 20}
MOVED_BYTES = 64 << 20  # in one measurement
TRANSPORTS = ("shm", "tcp")
NUM_LAYERS = 4
HEAD_DIM = 128
PATIENCE_S = 60.0
WAITED_SHARE = 0.05  # of a measurement's time: above it that was disturbed
COMPARED = (("shm", "memcpy"), ("tcp", "socket"), ("tcp", "mooncake"), ("tcp", "nixl"))
FINGERPRINT = "bench"


def make_regions(row_bytes: int, memory: SharedMemory | None = None) -> list[Region]:
    """Twice as many rows as travel, so that they can be scattered. All pages are touched."""
    size = 2 * MOVED_BYTES // NUM_LAYERS
    whole = memory.allocate(NUM_LAYERS * size) if memory is not None else memoryview(bytearray(NUM_LAYERS * size))
    whole[:] = os.urandom(row_bytes) * (len(whole) // row_bytes)
    return [
        Region(name=f"layer.{layer}", group="kv", buffer=whole[layer * size : (layer + 1) * size], row_bytes=row_bytes)
        for layer in range(NUM_LAYERS)
    ]


def waited_s() -> float:
    """How long threads of this process could run and had no core."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/schedstat") as file:  # it may have ended
            total += int(file.read().split()[1])
    return total / 1e9


def pin(other: int) -> None:
    """Gives this process and process `other` a core each, whatever moves the rows. Threads they have yet to start
    inherit it."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(f"--pinned needs two cores, this process may use {cores}")
    os.sched_setaffinity(0, cores[:1])
    os.sched_setaffinity(other, cores[1:2])


def scattered(regions: Sequence[Region], seed: int) -> list[int]:
    rows = range(regions[0].num_rows)
    return random.Random(seed).sample(rows, len(rows) // 2)


def pieces(regions: Sequence[Region], rows: Sequence[int]) -> list[memoryview]:
    return [region.row(row) for region in regions for row in rows]


class Control:
    """Commands and answers between the two processes: one JSON value a line."""

    def __init__(self, reads: IO[str], writes: IO[str]) -> None:
        self._reads = reads
        self._writes = writes

    def send(self, value: Any) -> None:
        self._writes.write(json.dumps(value) + "\n")
        self._writes.flush()

    def receive(self) -> Any:
        return json.loads(self._reads.readline())


def receiving_process(control: Control) -> None:
    """Serves the other end of every measurement on command."""
    memories = {name: SharedMemory() for name in ROW_SIZES}
    regions = {name: make_regions(size, memories[name]) for name, size in ROW_SIZES.items()}
    receivers = {name: KvReceiver(regions[name], fingerprint=FINGERPRINT, memory=memories[name]) for name in ROW_SIZES}
    for receiver in receivers.values():
        receiver.start()
    control.send({name: [address_of(region.buffer) for region in regions[name]] for name in ROW_SIZES})
    peers: dict[str, Receiving] = {}
    while (command := control.receive()) is not None:
        kind, name, seed = command
        if kind == "cpu":
            control.send((time.process_time(), waited_s()))
            continue
        if kind == "start":
            try:
                peers[name] = RECEIVING[name](regions)
                control.send(peers[name].describe())
            except ImportError as exc:
                print(f"bench.transfer: no {name}: {exc}", file=sys.stderr)
                control.send(None)
            continue
        rows = scattered(regions[name], seed + 1)
        if kind in peers:
            peers[kind].prepare(pieces(regions[name], rows))
            control.send(True)
            peers[kind].serve()
            continue
        ended = threading.Event()

        def end(_: Commit | TransferFailed, ended: threading.Event = ended) -> None:
            ended.set()

        reservation = receivers[name].reserve(
            request_id="bench", attempt=seed, rows={"kv": rows}, timeout_s=PATIENCE_S, on_commit=end, on_failed=end
        )
        control.send(reservation.target.hex())
        ended.wait(PATIENCE_S)
        reservation.release()
    for peer in peers.values():
        peer.close()
    for receiver in receivers.values():
        receiver.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    seconds: float
    cpu_seconds: float  # of both processes
    waited_seconds: float  # for a core, by their threads

    @property
    def is_disturbed(self) -> bool:
        return self.waited_seconds > WAITED_SHARE * self.seconds

    @property
    def gb_per_s(self) -> float:
        return MOVED_BYTES / self.seconds / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_seconds / MOVED_BYTES * 1e9


class Bench:
    def __init__(self, control: Control) -> None:
        self._control = control
        self._regions = {name: make_regions(size) for name, size in ROW_SIZES.items()}
        self._senders = {
            (transport, name): KvSender(self._regions[name], fingerprint=FINGERPRINT, transport=transport)
            for transport in TRANSPORTS
            for name in ROW_SIZES
        }
        self._there: dict[str, list[int]] = control.receive()  # where the other process' regions begin
        self._peers = self._start_peers()
        self._copy = {name: make_regions(size) for name, size in ROW_SIZES.items()}
        self._seed = 0

    def memcpy(self, name: str) -> float:
        source = pieces(self._regions[name], scattered(self._regions[name], self._seed))
        destination = pieces(self._copy[name], scattered(self._copy[name], self._seed + 1))
        begun = time.perf_counter()
        for to, what in zip(destination, source, strict=True):
            to[:] = what
        return time.perf_counter() - begun

    def _start_peers(self) -> dict[str, Sending]:
        peers: dict[str, Sending] = {}
        for kind in SENDING:
            self._control.send(("start", kind, 0))
            described = self._control.receive()
            if described is not None:
                peers[kind] = SENDING[kind](self._regions, described)
        return peers

    def peer(self, kind: str, name: str) -> float:
        """One of the other ways."""
        self._control.send((kind, name, self._seed))
        source = pieces(self._regions[name], scattered(self._regions[name], self._seed))
        rows = scattered(self._regions[name], self._seed + 1)
        there = [begin + row * ROW_SIZES[name] for begin in self._there[name] for row in rows]
        self._control.receive()
        begun = time.perf_counter()
        self._peers[kind].send(source, there)
        return time.perf_counter() - begun

    def transfer(self, transport: str, name: str) -> float:
        self._control.send(("transfer", name, self._seed))
        target = bytes.fromhex(self._control.receive())
        rows = scattered(self._regions[name], self._seed)
        ended = threading.Event()
        results: list[PushResult] = []

        def end(result: PushResult) -> None:
            results.append(result)
            ended.set()

        begun = time.perf_counter()
        push = self._senders[transport, name].open(target, request_id="bench", attempt=self._seed, timeout_s=PATIENCE_S)
        for layer in range(NUM_LAYERS):
            push.put(layer, range(len(rows)), rows)
        push.commit(b"", end)
        ended.wait(PATIENCE_S)
        seconds = time.perf_counter() - begun
        if not results or results[0].error is not None:
            raise SystemExit(f"the transfer failed: {results[0].error if results else 'no end'}")
        return seconds

    def round(self, name: str) -> dict[str, Sample]:
        """Every contender once."""
        contenders: dict[str, Callable[[str], float]] = {"memcpy": self.memcpy}
        contenders |= {kind: partial(self.peer, kind) for kind in self._peers}
        contenders |= {transport: partial(self.transfer, transport) for transport in TRANSPORTS}
        samples: dict[str, Sample] = {}
        order = list(contenders.items())
        random.Random(self._seed).shuffle(order)
        for kind, measure in order:
            self._seed += 2
            cpu, waited = self._spent()
            seconds = measure(name)
            cpu_then, waited_then = self._spent()
            samples[kind] = Sample(seconds=seconds, cpu_seconds=cpu_then - cpu, waited_seconds=waited_then - waited)
        return {kind: samples[kind] for kind in contenders}

    def _spent(self) -> tuple[float, float]:
        """By both processes so far: CPU seconds, and seconds in which a thread of theirs waited for a core."""
        self._control.send(("cpu", "1m", 0))
        cpu, waited = self._control.receive()
        return cpu + time.process_time(), waited + waited_s()

    def close(self) -> None:
        self._control.send(None)
        for peer in self._peers.values():
            peer.close()
        for sender in self._senders.values():
            sender.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="how long to measure (default 20 s)")
    parser.add_argument("--no-ttft", action="store_true", help="do not start a deployment to time whole requests")
    parser.add_argument("--ttft-pairs", type=int, default=6, help="pairs of whole requests, some 10 s each (default 6)")
    parser.add_argument(
        "--pinned", action="store_true", help="each end on a core of its own, as workers of `twinpool up` are"
    )
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)  # the second process
    options = parser.parse_args()
    if options.receive:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries may print
        receiving_process(Control(sys.stdin, answers))
        return
    receiving = subprocess.Popen(
        [sys.executable, "-m", "bench.transfer", "--receive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if options.pinned:
        pin(receiving.pid)
    assert receiving.stdin is not None
    assert receiving.stdout is not None
    bench = Bench(Control(receiving.stdout, receiving.stdin))
    rounds: dict[str, list[dict[str, Sample]]] = {name: [] for name in ROW_SIZES}
    for name in ROW_SIZES:
        bench.round(name)  # links, page tables, caches
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        for name in ROW_SIZES:
            rounds[name].append(bench.round(name))
    bench.close()
    receiving.wait(PATIENCE_S)
    result = report(rounds)
    result |= {"ttft_transfer_share_2048": None} if options.no_ttft else transfer_ttft.measure(options.ttft_pairs)
    if not options.no_ttft:
        print(
            f"2,048 tokens: the transfer adds {result['ttft_transfer_share_2048']:.1%} to a TTFT of "
            f"{result['ttft_ms_2048']} ms; {result['handoff_ms_2048']} ms from the last layer to the first decode "
            f"step, where a step takes {result['decode_step_ms']} ms; {result['second_token_ms_2048']} ms between the "
            "first two tokens"
        )
    print(json.dumps(result))


def wire_bytes_ratio(head_dim: int = HEAD_DIM) -> float:
    """All bytes that a link sends for a layer of 2,048 tokens in int8, over the bytes of its rows in bf16.

    A row is a block of 64 tokens: int8 keys and values, one fp16 scale for each token and head of both.
    """
    tokens, block, heads = 2048, 64, 8
    row_bytes = 2 * block * heads * (head_dim + 2)
    rows_left, sent = tokens // block, 0
    while rows_left:
        num_rows = min(rows_left, FRAME_BYTES // row_bytes)
        put = wire.Put(
            push=1,
            token=bytes(wire.TOKEN_BYTES),
            request_id="-" * 36,
            attempt=1,
            region=1,
            positions=wire.pack_u32(range(num_rows)),
            checksums=b"",
        )
        payload = num_rows * (row_bytes + wire.CHECKSUM_BYTES)
        sent += len(wire.encode(put, payload)) + payload
        rows_left -= num_rows
    return sent / (tokens * heads * head_dim * 2 * 2)


def report(rounds: dict[str, list[dict[str, Sample]]]) -> dict[str, Any]:
    """Prints the table; returns the figures. Ratios are of two neighbours in a round: ours over the other's speed."""
    print(
        f"{MOVED_BYTES >> 20} MiB of scattered rows, {len(rounds['1m'])} rounds, "
        f"{os.cpu_count()} CPUs ({platform.machine()}), load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'rows':>5} {'':>10} {'GB/s':>7} {'CPU s/GB':>9} {'of socket':>16} {'of memcpy':>16}")
    result: dict[str, Any] = {"bench": "transfer", **describe(), "pinned": len(os.sched_getaffinity(0)) == 1}
    kinds = list(rounds["1m"][0])
    for name in ROW_SIZES:
        for kind in kinds:
            speed = statistics.median(samples[kind].gb_per_s for samples in rounds[name])
            cpu = statistics.median(samples[kind].cpu_s_per_gb for samples in rounds[name])
            shown = ""
            for limit in ("socket", "memcpy"):
                low, middle, high = quartiles(rounds[name], kind, limit)
                shown += f" {f'{middle:.2f} ({low:.2f}-{high:.2f})':>16}"
                if kind in TRANSPORTS:
                    result |= {f"{kind}_{limit}_ratio_{name}": middle}
            print(f"{name:>5} {kind:>10} {speed:7.2f} {cpu:9.3f}{shown}")
            result |= {f"{kind}_gb_per_s_{name}": round(speed, 3), f"{kind}_cpu_s_per_gb_{name}": round(cpu, 3)}
    for other in ("grpc", "mooncake", "nixl"):
        result[f"tcp_vs_{other}"] = quartiles(rounds["1m"], "tcp", other)[1] if other in kinds else None
    result |= undisturbed(rounds)
    wire_ratio, of_small_heads = wire_bytes_ratio(), wire_bytes_ratio(64)
    print(
        f"bytes on the wire with int8, headers included: {wire_ratio:.4f} of bf16's rows (head size {HEAD_DIM}), "
        f"{of_small_heads:.4f} (64)"
    )
    return result | {"wire_bytes_ratio": round(wire_ratio, 4), "wire_bytes_ratio_64": round(of_small_heads, 4)}


def undisturbed(rounds: dict[str, list[dict[str, Sample]]]) -> dict[str, Any]:
    """Prints, and returns, the ratios of rounds in which nobody else took a core from either of the two."""
    found: dict[str, Any] = {}
    for name in ROW_SIZES:
        for kind, other in COMPARED:
            both = [each for each in rounds[name] if other in each]
            alone = [each for each in both if not each[kind].is_disturbed and not each[other].is_disturbed]
            found |= {f"{kind}_of_{other}_{name}_undisturbed": None, f"{kind}_of_{other}_{name}_rounds": len(alone)}
            if alone:
                low, middle, high = quartiles(alone, kind, other)
                found[f"{kind}_of_{other}_{name}_undisturbed"] = middle
                print(
                    f"{name:>5} {kind:>10} of {other}: {middle:.2f} ({low:.2f}-{high:.2f}) "
                    f"in the {len(alone)} of {len(both)} rounds in which neither waited for a core"
                )
    return found


def quartiles(rounds: Sequence[dict[str, Sample]], kind: str, other: str) -> tuple[float, float, float]:
    """The speed of `kind` over that of `other`, round by round: lower quartile, median, upper quartile."""
    ratios = [samples[other].seconds / samples[kind].seconds for samples in rounds]
    low, middle, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return round(low, 3), round(middle, 3), round(high, 3)


if __name__ == "__main__":
    main()
