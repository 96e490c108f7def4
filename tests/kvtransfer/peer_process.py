"""One end of transfers as a process of its own, to be frozen and killed.

`send` LEASE_S: opens a push of four rows for each target it reads ("number target"), puts one layer if told "rows".
`receive` LEASE_S TRANSPORT: reserves 64 rows, prints the target.
"""

from __future__ import annotations

import sys
import time

from kvtransfer import KvReceiver, KvSender, SharedMemory
from tests.kvtransfer.peers import FINGERPRINT, KEY, Ends, make_regions, named, share_regions


def send(lease_s: float, parameter: str) -> None:
    transport, options = named(parameter)
    sender = KvSender(
        make_regions(1),
        fingerprint=FINGERPRINT,
        cluster_key=KEY,
        transport=transport,
        options=options,
        lease_s=lease_s,
    )
    for line in sys.stdin:
        request_id, target, rows = line.split()
        push = sender.open(bytes.fromhex(target), request_id=request_id, attempt=1, timeout_s=60)
        if rows == "rows":
            push.put(0, range(2), range(2))


def receive(lease_s: float, parameter: str) -> None:
    transport, options = named(parameter)
    memory = SharedMemory()
    receiver = KvReceiver(
        share_regions(2, memory),
        fingerprint=FINGERPRINT,
        cluster_key=KEY,
        transport=transport,
        options=options,
        memory=memory,
        lease_s=lease_s,
    )
    receiver.start()
    reservation = receiver.reserve(
        request_id="r1", attempt=1, rows={"kv": range(64)}, timeout_s=60, on_commit=Ends(), on_failed=Ends()
    )
    print(reservation.target.hex(), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]](float(sys.argv[2]), sys.argv[3])
