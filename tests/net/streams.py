"""python -m tests.net.streams: what several connections of a KV link (--kv-streams) are worth over a long way.

A receiver on one host and senders of 1, 2, 4 and 8 streams on the other, in turns; prints medians as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from statistics import median
from typing import Any

from kvtransfer import KvReceiver, KvSender, PushResult, Region
from kvtransfer.transports import Options
from tests.flow.cluster import REPO
from tests.net.lab import DECODE_HOST, PREFILL_HOST, Lab
from tests.net.measure import raw_mbit

STREAMS = (1, 2, 4, 8)
ROW_BYTES, NUM_ROWS = 256 << 10, 64
FINGERPRINT, KEY = "streams", "of the lab"
PATIENCE_S = 60.0


def regions() -> list[Region]:
    return [Region(name="kv", group="kv", buffer=memoryview(bytearray(ROW_BYTES * NUM_ROWS)), row_bytes=ROW_BYTES)]


def receive(host: str) -> None:
    receiver = KvReceiver(regions(), fingerprint=FINGERPRINT, cluster_key=KEY, transport="tcp", host=host)
    receiver.start()
    for attempt, _ in enumerate(sys.stdin, 1):
        ended = threading.Event()
        reservation = receiver.reserve(
            request_id="streams",
            attempt=attempt,
            rows={"kv": range(NUM_ROWS)},
            timeout_s=PATIENCE_S,
            on_commit=lambda _, ended=ended: ended.set(),  # type: ignore[misc]
            on_failed=lambda _, ended=ended: ended.set(),  # type: ignore[misc]
        )
        print(reservation.target.hex(), flush=True)
        ended.wait(PATIENCE_S)
        reservation.release()
    receiver.close()


def send() -> None:
    """A line of the number of streams, the attempt and the target each; answers seconds."""
    source = regions()
    senders = {
        count: KvSender(
            source, fingerprint=FINGERPRINT, cluster_key=KEY, transport="tcp", options=Options(streams=count)
        )
        for count in STREAMS
    }
    for line in sys.stdin:
        streams, attempt, target = line.split()
        ended = threading.Event()
        results: list[PushResult] = []

        def end(result: PushResult, ended: threading.Event = ended, results: list[PushResult] = results) -> None:
            results.append(result)
            ended.set()

        begun = time.monotonic()
        push = senders[int(streams)].open(
            bytes.fromhex(target), request_id="streams", attempt=int(attempt), timeout_s=PATIENCE_S
        )
        push.put(0, range(NUM_ROWS), range(NUM_ROWS))
        push.commit(b"", end)
        ended.wait(PATIENCE_S)
        assert results, "no end"
        assert results[0].error is None, results[0].error
        print(time.monotonic() - begun, flush=True)
    for sender in senders.values():
        sender.close()


class Helper:
    """One end, on its host."""

    def __init__(self, lab: Lab, host: int, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [*lab.on(host), sys.executable, "-m", "tests.net.streams", *arguments],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


def measure(lab: Lab, rounds: int) -> dict[str, Any]:
    receiver, sender = Helper(lab, DECODE_HOST, "receive", lab.address(DECODE_HOST)), Helper(lab, PREFILL_HOST, "send")
    seconds: dict[int, list[float]] = {count: [] for count in STREAMS}
    try:
        attempt = 0
        for _ in range(rounds + 1):
            for count in STREAMS:
                attempt += 1
                seconds[count].append(float(sender.ask(f"{count} {attempt} {receiver.ask('')}")))
        raw = raw_mbit(lab)
    finally:
        receiver.close()
        sender.close()
    bits = 8e-6 * ROW_BYTES * NUM_ROWS
    return {"socket_mbit": round(raw)} | {
        f"streams_{count}_mbit": round(bits / median(times[1:])) for count, times in seconds.items()
    }


def main() -> None:
    if sys.argv[1:2] == ["receive"]:
        receive(sys.argv[2])
        return
    if sys.argv[1:2] == ["send"]:
        send()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=float, default=300)
    parser.add_argument("--delay-ms", type=float, default=20, help="each way")
    parser.add_argument("--loss", type=float, default=0, help="of packets, 0 to 1")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    lab = Lab(rate_mbit=options.rate_mbit, delay_ms=options.delay_ms, loss=options.loss)
    try:
        print(json.dumps(vars(options) | measure(lab, options.rounds)))
    finally:
        lab.close()


if __name__ == "__main__":
    main()
