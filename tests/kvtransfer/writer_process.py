"""A prefill worker's transfer end as a process of its own: pushes a layer to each target it reads, says so, goes on.

One line "number target" begins a push, "abort number" gives it up.
"""

from __future__ import annotations

import sys

from kvtransfer import KvSender, Push
from tests.kvtransfer.peers import FINGERPRINT, KEY, make_regions


def main(transport: str) -> None:
    sender = KvSender(make_regions(1), fingerprint=FINGERPRINT, cluster_key=KEY, transport=transport)
    pushes: dict[str, Push] = {}
    for line in sys.stdin:
        first, second = line.split()
        if first == "abort":
            pushes[second].abort("told to")
            continue
        pushes[first] = sender.open(bytes.fromhex(second), request_id=f"r{first}", attempt=1, timeout_s=60)
        pushes[first].put(0, range(2), range(2))


if __name__ == "__main__":
    main(sys.argv[1])
