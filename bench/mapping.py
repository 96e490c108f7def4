"""What it costs when the two sides cut their rows differently: whole transfers beside those between equal sides.

Run: python -m bench.mapping [--seconds S]

One process holds a receiver and a sender for every transport and pair of block sizes, and they take turns, so that
only the ratios within one run mean something: both ends share an interpreter. 8,192 tokens of 4 layers, 8 KV heads of
size 128, INT8. The table shows medians; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Sequence

from bench.machine import describe
from kvtransfer import KvReceiver, KvSender, Plane, PushResult, Region, RowLayout, SharedMemory

NUM_TOKENS = 8192
NUM_LAYERS = 4
PLANES = tuple(Plane(item_bytes=size) for size in (128, 128, 2, 2))
BLOCKS = ((64, 64), (16, 64), (32, 64), (64, 16))  # of the sender, of the receiver; the equal pair first
PATIENCE_S = 60.0


def make_regions(tokens: int, memory: SharedMemory | None = None) -> list[Region]:
    """Exactly NUM_TOKENS in blocks of `tokens`. All memory is touched."""
    layout = RowLayout(tokens=tokens, num_heads=8, planes=PLANES)
    size = layout.row_bytes * (NUM_TOKENS // tokens)
    whole = memory.allocate(NUM_LAYERS * size) if memory is not None else memoryview(bytearray(NUM_LAYERS * size))
    whole[:] = b"\1" * len(whole)
    return [
        Region(
            name=f"layer.{i}",
            group="kv",
            buffer=whole[i * size : (i + 1) * size],
            row_bytes=layout.row_bytes,
            layout=layout,
        )
        for i in range(NUM_LAYERS)
    ]


class Pair:
    def __init__(self, transport: str, blocks: tuple[int, int]) -> None:
        self.theirs, self.mine = blocks
        memory = SharedMemory()
        self.receiver = KvReceiver(
            make_regions(self.mine, memory), fingerprint="bench", transport=transport, memory=memory
        )
        self.receiver.start()
        source = make_regions(self.theirs)
        self.num_bytes = sum(len(region.buffer) for region in source)
        self.sender = KvSender(source, fingerprint="bench", transport=transport)
        self.seconds: list[float] = []

    def transfer(self) -> None:
        ended, results = threading.Event(), list[PushResult]()

        def done(result: PushResult) -> None:
            results.append(result)
            ended.set()

        reservation = self.receiver.reserve(
            request_id="r",
            attempt=1,
            rows={"kv": range(NUM_TOKENS // self.mine)},
            tokens={"kv": NUM_TOKENS},
            timeout_s=PATIENCE_S,
            on_commit=lambda _: None,
            on_failed=lambda _: None,
        )
        begin = time.perf_counter()
        push = self.sender.open(reservation.target, request_id="r", attempt=1, timeout_s=PATIENCE_S)
        positions = range(NUM_TOKENS // self.theirs)
        for layer in range(NUM_LAYERS):
            push.put(layer, positions, positions)
        push.commit(b"", done)
        if not ended.wait(2 * PATIENCE_S) or results[0].error is not None:
            raise SystemExit(f"the transfer failed: {results[0].error if results else 'no end'}")
        self.seconds.append(time.perf_counter() - begin)
        reservation.release()

    def gb_per_s(self) -> float:
        return self.num_bytes / statistics.median(self.seconds[1:]) / 1e9  # the first makes the link

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    seconds = parser.parse_args(arguments).seconds
    pairs = {(transport, blocks): Pair(transport, blocks) for transport in ("tcp", "shm") for blocks in BLOCKS}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(pairs["tcp", BLOCKS[0]].seconds) < 3:
        for pair in pairs.values():
            pair.transfer()
    report: dict[str, object] = {**describe(), "load": round(os.getloadavg()[0], 1)}
    for (transport, blocks), pair in pairs.items():
        ratio = pair.gb_per_s() / pairs[transport, BLOCKS[0]].gb_per_s()
        print(f"{transport} {blocks[0]:>3} -> {blocks[1]:<3} {pair.gb_per_s():6.2f} GB/s  {ratio:.2f} of equal sides")
        report[f"{transport}_{blocks[0]}_to_{blocks[1]}_ratio"] = round(ratio, 3)
    for pair in pairs.values():
        pair.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
