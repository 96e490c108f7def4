"""What a transfer over 1 Gbit/s and 1 ms adds to a 1,024-token prompt.

    python -m tests.net.measure [--rounds N] [MODEL_DIR]

Pairs: an answer of one token (no decode worker, no transfer) and one of two tokens, the other first in every second
pair, each prompt a new one. Prints medians as one JSON object; `ttft_share` is that of the pairs' own ratios, with its
quartiles. `bound_share` is what no transfer could beat: the bytes at the link's own rate, as
measured by a plain socket in the same run, over the time that prefill takes to produce them; over 1 it is the link.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.net.lab import DECODE_HOST, PREFILL_HOST, Lab, Spread, spread
from twinpool import model_store

NUM_TOKENS = 1024
_RAW_BYTES = 64 << 20
_RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 7999)); print("ready", flush=True)
link, _ = listener.accept(); left, begun = int(sys.argv[2]), 0
buffer = memoryview(bytearray(1 << 20))
while left:
    left -= link.recv_into(buffer, min(left, 1 << 20)); begun = begun or time.monotonic()
print(time.monotonic() - begun)
"""
_SEND = """
import socket, sys
link = socket.create_connection((sys.argv[1], 7999)); data = bytes(1 << 20)
for _ in range(int(sys.argv[2]) >> 20): link.sendall(data)
"""


def raw_mbit(lab: Lab) -> float:
    """What a plain socket gets over the link, from host 1 to host 2."""
    arguments = [lab.address(DECODE_HOST), str(_RAW_BYTES)]
    receive = [*lab.on(DECODE_HOST), sys.executable, "-c", _RECEIVE, *arguments]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        subprocess.run([*lab.on(PREFILL_HOST), sys.executable, "-c", _SEND, *arguments], check=True, timeout=120)
        return 8 * _RAW_BYTES / float(receiver.stdout.readline()) / 1e6


def measure(deployment: Spread, rounds: int) -> dict[str, Any]:
    draw = random.Random(41)
    without: list[Any] = []
    within: list[Any] = []
    for number in range(rounds + 1):
        for max_tokens in (1, 2) if number % 2 else (2, 1):
            prompt = [draw.randrange(1000, 30_000) for _ in range(NUM_TOKENS)]
            answer = deployment.ask(prompt=prompt, max_tokens=max_tokens)
            assert "error" not in answer, answer
            (without if max_tokens == 1 else within).append(answer["timeline"])
    without, within = without[1:], within[1:]  # the first of each makes the link and warms up
    alone_ms, with_ms = (median(line["ttft_ms"] for line in lines) for lines in (without, within))
    prefill_ms = median(line["prefill_ms"] for line in without)
    wait_ms = median(line["transfer_wait_ms"] for line in within)
    shares = [line["ttft_ms"] / alone["ttft_ms"] - 1 for alone, line in zip(without, within, strict=True)]
    lower, share, upper = quantiles(shares)
    link_mbit = raw_mbit(deployment.lab)
    return {
        "prompt_tokens": NUM_TOKENS,
        "rounds": rounds,
        "transfer_bytes": within[0]["transfer_bytes"],
        "link_mbit": round(link_mbit),
        "prefill_ms": round(prefill_ms, 1),
        "ttft_without_ms": round(alone_ms, 1),
        "ttft_with_ms": round(with_ms, 1),
        "ttft_share": round(share, 4),
        "ttft_share_quartiles": [round(lower, 4), round(upper, 4)],
        "transfer_wait_ms": round(wait_ms, 1),
        "transfer_wait_share": round(wait_ms / with_ms, 4),
        "bound_share": round(within[0]["transfer_bytes"] * 8 / (link_mbit * 1000) / prefill_ms, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", nargs="?", type=Path, help="default: the default model")
    parser.add_argument("--rounds", type=int, default=15, help="pairs, one more to warm up (default 15)")
    arguments = parser.parse_args()
    model = arguments.model_dir or model_store.ensure(model_store.DEFAULT_MODEL)
    options = {"dtype": "bf16", "block_size": "64", "memory": "128MiB"}
    with tempfile.TemporaryDirectory() as folder, spread(Path(folder), model, **options) as deployment:
        print(json.dumps(measure(deployment, arguments.rounds)))


if __name__ == "__main__":
    main()
