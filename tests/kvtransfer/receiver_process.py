"""A decode worker's transfer end as a process of its own: reserves 64 rows, prints the target, waits to be killed."""

from __future__ import annotations

import sys
import time

from kvtransfer import KvReceiver, SharedMemory
from tests.kvtransfer.peers import FINGERPRINT, KEY, Ends, named, share_regions


def main(parameter: str, port: int) -> None:
    transport, options = named(parameter)
    memory = SharedMemory()
    receiver = KvReceiver(
        share_regions(2, memory, row_bytes=64 << 10),
        fingerprint=FINGERPRINT,
        cluster_key=KEY,
        transport=transport,
        options=options,
        memory=memory,
        port=port,
    )
    receiver.start()
    reservation = receiver.reserve(
        request_id="r1", attempt=1, rows={"kv": range(64)}, timeout_s=60, on_commit=Ends(), on_failed=Ends()
    )
    print(receiver.endpoints[-1], reservation.target.hex(), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
